"""What limits judge is what is launched, of collectives over peers' memory: direction, ranks, wire,
warps and how flags are read, at the numbers of ranks that were compiled."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import hal_kernels.collective.looped_norm_kernels as looped_norm_kernels
import hal_kernels.collective.triton_kernels as kernels
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.collective.layout import Algorithm, buffer_layout
from hal_kernels.collective.triton import (
    _device_options,
    bind_all_reduce_norm,
    bind_to_buffers,
)
from hal_kernels.collective.triton_limits import (
    norm_not_supported_reasons,
    not_supported_reasons,
)
from hal_kernels.collective.triton_variants import MOST_NORM_WIDTH
from recorded_launches import compiled, recorded

ARCHES = [target.arch for target in TARGETS]
FUNCTIONS = {
    "one_shot": "_all_reduce_one_shot_kernel",
    "two_shot": "_all_reduce_two_shot_kernel",
    "reduce_scatter": "_reduce_scatter_kernel",
    "all_gather": "_all_gather_kernel",
}
ROWS = 4


def device_of(arch: str) -> DeviceSpec:
    """With the compiler's target, as the database names it."""
    device = gpu(arch)
    target = f"{find_target(arch).backend}:{arch}"
    return dataclasses.replace(device, attributes=device.attributes | {"triton_target": target})


def buffers(algorithm: Any, world: int, elements: int, wire: str, row_block: int = 0) -> Any:
    layout = buffer_layout(
        algorithm, world, elements, element_bytes=2, wire_bytes=1 if wire else 0,
        row_block=row_block,
    )  # fmt: skip
    return SimpleNamespace(
        layout=layout, world_size=world, rank=0, addresses=None, epochs=None, status=None
    )


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize("transport", ["pcie", "nvlink"])
@pytest.mark.parametrize("has_wire", [False, True])
def test_collectives(
    arch: str,
    algorithm: Algorithm,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_wire: bool,
) -> None:
    device, kind = device_of(arch), "all_reduce" if "shot" in algorithm else algorithm
    for world in (2, 8) if "shot" in algorithm else (8,):
        request = CollectiveRequest(
            kind=kind,  # type: ignore[arg-type]
            world_size=world, width=1024, dtype="bfloat16", transport=transport,
        )  # fmt: skip
        limits = functools.partial(
            not_supported_reasons, algorithm=algorithm, has_fp8_wire=has_wire
        )
        if (has_wire and algorithm == "all_gather") or limits(request, device):
            continue
        (query,) = evidence_asked(limits, request, device)
        variant = compiled(query.kernel, arch, query.dtype, query.config)
        fnuz = "fp8_e4m3fnuz" if arch.startswith("gfx94") else "fp8_e4m3fn"
        wire = fnuz if has_wire else ""
        with monkeypatch.context() as patch:
            found = recorded(patch, [kernels], FUNCTIONS[algorithm])
            bind_to_buffers(
                buffers(algorithm, world, ROWS * 1024, wire), algorithm,
                is_push=transport == "pcie", wire=wire, **_device_options(device),
            )(torch.ones(ROWS, 1024 if algorithm != "all_gather" else 128).bfloat16())  # fmt: skip
            (launched,) = found[FUNCTIONS[algorithm]]
        for name, value in variant.constants.items():
            # Of which FP8 a wire would be is of no meaning without one.
            assert launched[name] == value or (name == "IS_FNUZ" and not wire), name
        assert launched["num_warps"] == variant.num_warps


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("transport", ["pcie", "nvlink"])
def test_the_sum_with_its_norm(arch: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(arch)
    widths = ((2, 4096), (8, 4096), (2, 8192), (8, 8192), (8, 7168), (2, 16_384), (8, 10_240))
    for world, width in widths:
        request = AllReduceNormRequest(
            kind="all_reduce", world_size=world, width=width, dtype="bfloat16", transport=transport
        )
        if norm_not_supported_reasons(request, device):
            continue
        (query,) = evidence_asked(norm_not_supported_reasons, request, device)
        variant = compiled(query.kernel, arch, query.dtype, query.config)
        is_looped = width > MOST_NORM_WIDTH
        assert query.kernel == f"collective.all_reduce_norm{'_looped' * is_looped}"
        block = 8192 if width == 7168 else width  # a power of two, or whole tiles of 2048
        function = f"_all_reduce_norm{'_looped' * is_looped}_kernel"
        with monkeypatch.context() as patch:
            found = recorded(patch, [kernels, looped_norm_kernels], function)
            rows = torch.ones(ROWS, width).bfloat16()
            bind_all_reduce_norm(
                buffers("one_shot", world, ROWS * block, "", block), torch.ones(width), 1e-6,
                is_push=transport == "pcie", **_device_options(device),
            )(rows, rows)  # fmt: skip
            (launched,) = found[function]
        assert {name: launched[name] for name in variant.constants} == variant.constants
        assert launched["num_warps"] == variant.num_warps
