"""The specialisations of the collectives over peers' memory. Free of torch.

Push is what PCIe runs, pull what a fabric runs; flags by PTX on NVIDIA, by atomics on AMD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.collective.layout import (
    BLOCK,
    LOOPED_BLOCK,
    WIRE_GROUP,
    Algorithm,
    norm_warps,
    num_warps,
)

_WORLDS = (2, 8)
_NORM_WIDTHS = (4096, 8192)
MOST_NORM_WIDTH = _NORM_WIDTHS[-1]  # of a row that is held in registers
# A conversion would be emulated bit by bit; on gfx1201 it is not, but the sums spill.
NO_FP8_WIRE = ("sm_80", "gfx90a", "gfx1100", "gfx1201")
_MODULE = "hal_kernels.collective.triton_kernels"
_SOURCES = ("hal_kernels.collective.peer_memory",)
_COMMON = {"buffer_W_ptr": "int64", "epoch_P_ptr": "int32", "status_ptr": "int32"}
_OFFSETS = ("half_bytes", "flag_offset", "slot_elements")


def _variant(
    config: str,
    tensors: Sequence[str],
    scalars: dict[str, str],
    divisible: Sequence[str],
    constants: dict[str, Any],
    num_warps: int,
    *,
    dtype: str = "",
) -> KernelVariant:
    scalars = {"rank": "i32", "max_polls": "i32", **dict.fromkeys(_OFFSETS, "i32"), **scalars}
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={**dict.fromkeys(tensors, dtype or "bfloat16"), **_COMMON},
        scalars=scalars,
        divisible=frozenset({*_OFFSETS, *divisible}),
        constants=constants,
        num_warps=num_warps,
    )


def _wires(target: Target) -> tuple[str, ...]:
    return ("plain",) if target.arch in NO_FP8_WIRE else ("plain", "fp8")


def config_of(algorithm: Algorithm, world_size: int, transport: str, *, has_fp8_wire: bool) -> str:
    """The name of the specialisation whose machine code speaks for a collective: of the nearest
    number of ranks that is no smaller."""
    direction = "push" if transport == "pcie" else "pull"
    if algorithm == "all_gather":
        return f"w8-{direction}"
    world = 8 if algorithm == "reduce_scatter" or world_size > 2 else 2
    return f"w{world}-{direction}-{'fp8' if has_fp8_wire else 'plain'}"


def norm_config_of(world_size: int, width: int, transport: str) -> str:
    """The same, of an all-reduce with its norm: and of the nearest width that is no smaller, where
    a row is held in registers."""
    world, direction = 8 if world_size > 2 else 2, "push" if transport == "pcie" else "pull"
    if width > MOST_NORM_WIDTH:
        return f"w{world}-{direction}"
    return f"w{world}-h{next(w for w in _NORM_WIDTHS if width <= w)}-{direction}"


def norm_kernel_of(width: int) -> str:
    """The kernel of an all-reduce with its norm: rows beyond `MOST_NORM_WIDTH` go tile by tile."""
    return f"collective.all_reduce_norm{'_looped' * (width > MOST_NORM_WIDTH)}"


def _constants(target: Target, world: int, is_push: bool, wire: str | None) -> dict[str, Any]:
    constants: dict[str, Any] = {
        "WORLD": world,
        "BLOCK": BLOCK,
        "IS_PUSH": is_push,
        "USE_PTX": target.backend == "cuda",
    }
    if wire is not None:
        constants |= {
            "WIRE_GROUP": WIRE_GROUP if wire == "fp8" else 0,
            "IS_FNUZ": target.fp8_dtype.endswith("fnuz"),
        }
    return constants


def _all_reduce(target: Target, more: dict[str, str]) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            f"w{world}-{'push' if is_push else 'pull'}-{wire}",
            ("x_N_ptr", "y_N_ptr"),
            {"N": "i32", "scale_offset": "i32", **more},
            ("N", "scale_offset", *more),
            _constants(target, world, is_push, wire),
            num_warps(target.warp_size),
        )
        for world in _WORLDS
        for is_push in (True, False)
        for wire in _wires(target)
    )


def _one_shot(target: Target) -> Sequence[KernelVariant]:
    return _all_reduce(target, {})


def _two_shot(target: Target) -> Sequence[KernelVariant]:
    return _all_reduce(target, {"part_elements": "i32", "result_offset": "i32"})


def _reduce_scatter(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            f"w{world}-{'push' if is_push else 'pull'}-{wire}",
            ("x_TW_ptr", "y_TP_ptr"),
            {"T": "i32", "part_width": "i32", "scale_offset": "i32"},
            ("part_width", "scale_offset"),
            _constants(target, world, is_push, wire),
            num_warps(target.warp_size),
        )
        for world in (8,)
        for is_push in (True, False)
        for wire in _wires(target)
    )


def _all_gather(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            f"w{world}-{'push' if is_push else 'pull'}",
            ("x_TP_ptr", "y_TW_ptr"),
            {"T": "i32", "part_width": "i32"},
            ("part_width",),
            _constants(target, world, is_push, None),
            num_warps(target.warp_size),
            dtype=dtype,
        )
        for dtype in ACTIVATION_DTYPES
        for world in (8,)
        for is_push in (True, False)
    )


def _all_reduce_norm(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            f"w{world}-h{width}-{'push' if is_push else 'pull'}",
            ("x_TH_ptr", "residual_TH_ptr", "weight_H_ptr", "y_TH_ptr"),
            {"T": "i32", "H": "i32", "eps": "fp32"},
            ("H",),
            _constants(target, world, is_push, None) | {"BLOCK": width},
            norm_warps(width, target.warp_size),
        )
        for world in _WORLDS
        for width in _NORM_WIDTHS
        for is_push in (True, False)
    )


def _all_reduce_norm_looped(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            f"w{world}-{'push' if is_push else 'pull'}",
            ("x_TH_ptr", "residual_TH_ptr", "weight_H_ptr", "y_TH_ptr"),
            {"T": "i32", "H": "i32", "eps": "fp32", "row_elements": "i32"},
            ("H", "row_elements"),
            _constants(target, world, is_push, None) | {"BLOCK": LOOPED_BLOCK},
            norm_warps(LOOPED_BLOCK, target.warp_size),
        )
        for world in _WORLDS
        for is_push in (True, False)
    )


def _kernel(name: str, function: str, variants: Any, module: str = _MODULE) -> TritonKernel:
    return TritonKernel(
        name=f"collective.{name}",
        op="collective",
        module=module,
        function=function,
        variants=variants,
        uses_matrix_unit=False,
        sources=_SOURCES,
    )


KERNELS = (
    _kernel("all_reduce_one_shot", "_all_reduce_one_shot_kernel", _one_shot),
    _kernel("all_reduce_two_shot", "_all_reduce_two_shot_kernel", _two_shot),
    _kernel("reduce_scatter", "_reduce_scatter_kernel", _reduce_scatter),
    _kernel("all_gather", "_all_gather_kernel", _all_gather),
    _kernel("all_reduce_norm", "_all_reduce_norm_kernel", _all_reduce_norm),
    _kernel(
        "all_reduce_norm_looped", "_all_reduce_norm_looped_kernel", _all_reduce_norm_looped,
        "hal_kernels.collective.looped_norm_kernels",
    ),
)  # fmt: skip
