"""What limits judge is what is launched, of products per expert: constants, tiles and types."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import hal_kernels.grouped_gemm.triton as experts
import hal_kernels.grouped_gemm.triton_rounding as rounding
import hal_kernels.grouped_gemm.triton_split_k as split_k
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.aot.variant import KernelVariant
from hal_kernels.grouped_gemm.triton_limits import choose_kernels, not_supported_reasons
from recorded_launches import assert_compiled, assert_types, compiled, recorded

ARCHES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100")
EXPERTS, PICKED, N, K = 8, 2, 512, 2048
NAMES = (
    "bfloat16", "float16", "fp8_block128_a8", "fp8_block32_a8", "fp8_block32_ue8m0_a8", "mxfp4_a8",
    "fp8_block128", "fp8_block32_ue8m0", "mxfp4", "int8_channel", "int8_g32", "int4_g32",
    "int4_g32_asym",
)  # fmt: skip
FUNCTIONS = {
    "dense": "_grouped_gemm_kernel", "fp8_block": "_grouped_gemm_fp8_kernel",
    "fp8_widened": "_grouped_gemm_fp8_widened_kernel", "mxfp4": "_grouped_gemm_mxfp4_kernel",
    "weight_only": "_grouped_gemm_weight_only_kernel", "integer": "_grouped_gemm_integer_kernel",
    "split_k": "_grouped_gemm_split_k_kernel", "split_k_sum": "_grouped_split_sum_kernel",
    "round_rows": "_round_rows_kernel",
}  # fmt: skip


def requests() -> Iterator[GroupedGemmRequest]:
    gates = (("none", 0.0), ("silu_gated", 0.0), ("silu_gated", 7.0))
    for name, dtype, tokens, (epilogue, clamp) in itertools.product(
        NAMES, ("bfloat16", "float16"), (1, 512), gates
    ):
        yield GroupedGemmRequest(
            num_experts=EXPERTS, experts_per_token=PICKED, n=N, k=K, dtype=dtype,
            weight_format=FORMATS[name], epilogue=epilogue, clamp=clamp,  # type: ignore[arg-type]
            tokens=TokenRange(tokens, tokens),
        )  # fmt: skip


@cache
def weight_of(name: str) -> torch.Tensor | list[QuantizedWeight]:
    form = FORMATS[name]
    if form.is_dense:
        return torch.zeros(EXPERTS, N, K, dtype=getattr(torch, name))
    if form.element != "int":
        return [quantize_weight(torch.ones(N, K), form)] * EXPERTS
    scale = torch.ones(N, K // form.group_size).half() if form.group_size else torch.ones(N)
    eight = form.bits == 8
    data = torch.zeros(N, K if eight else K // 2, dtype=torch.int8 if eight else torch.uint8)
    minimum = None if form.is_symmetric else scale
    return [QuantizedWeight(format=form, data=data, scale=scale, minimum=minimum)] * EXPERTS


def allocating(
    arch: str = "", *, group: int, out_dtype: str, is_ue8m0: bool
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """In place of a rounding, which has tests of its own."""

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(x.shape, dtype=getattr(torch, out_dtype.replace("fp8", "float8")))
        shape = (x.shape[0], x.shape[1] // group)
        return values, torch.zeros(shape, dtype=torch.uint8 if is_ue8m0 else torch.float32)

    return quantize


def with_units(arch: str, units: int) -> DeviceSpec:
    device = gpu(arch)
    return dataclasses.replace(device, attributes={**device.attributes, "compute_units": units})


@pytest.mark.parametrize("units", [0, 132], ids=["whole", "split"])
@pytest.mark.parametrize("arch", ARCHES)
def test_products_per_expert(arch: str, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bind_quantize_groups", "bind_quantize_rows"):
        monkeypatch.setattr(experts, name, allocating)
    found = recorded(monkeypatch, (experts, rounding, split_k), *FUNCTIONS.values())
    device, seen = with_units(arch, units), set[str]()
    for request in requests():
        if not_supported_reasons(request, device, allowed=("native", "emulated")):
            continue
        choices = choose_kernels(request, device)
        assert not isinstance(choices, Reason)
        rows = request.tokens.high * PICKED
        product = experts.bind(request, device, weight=weight_of(request.weight_format.name))
        x = torch.zeros(rows, K, dtype=getattr(torch, request.dtype))
        product(x, torch.linspace(0, rows, EXPERTS + 1).long())
        for choice in choices:
            kind = choice.kernel.split(".")[1]
            (launched,) = found[FUNCTIONS[kind]]
            check(kind, launched, compiled(choice.kernel, arch, choice.dtype, choice.config))
            seen.add(kind)
        assert sum(map(len, found.values())) == len(choices)
        for launches in found.values():
            launches.clear()
    assert {"dense", "integer", "weight_only"} <= seen
    assert ("split_k" in seen) == ("split_k_sum" in seen) == bool(units)


def check(kind: str, launched: dict[str, Any], variant: KernelVariant) -> None:
    """But for what follows sizes: the number of experts, which is searched and not computed with,
    and the columns of sums and roundings, compiled for the widest."""
    of_sizes = {"E", "BLOCK_E"}
    of_sizes |= {"split_k_sum": {"BLOCK_N"}, "round_rows": {"BLOCK_G"}}.get(kind, set())
    assert_types(launched, variant)
    assert_compiled(launched, variant, *(variant.constants.keys() - of_sizes))
    for name in of_sizes & variant.constants.keys():
        assert launched[name] <= variant.constants[name]
