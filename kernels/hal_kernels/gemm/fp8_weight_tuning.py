"""What may be chosen for the Triton products of 16-bit rows with an FP8 weight, and what a choice
costs. Free of torch and triton.

A step of K is one block of the weight's scales, so of a tile its rows, columns and launch options
are to be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.ops.formats import FORMATS
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.dense_forms import size_of
from hal_kernels.gemm.split_k_tuning import why_no_weight
from hal_kernels.gemm.weight_only_variants import weight_only_tiles
from hal_kernels.tuning.performance_model import Footprint
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_GATED = "-gated"
_FORMATS = {"g128": "fp8_block128", "g32": "fp8_block32_ue8m0"}


def _halves(shape: ShapeClass) -> int:
    return 2 if shape.form.endswith(_GATED) else 1


def _default(target: Target, shape: ShapeClass) -> Default:
    size, name = size_of(shape.rows), f"fp8{shape.form.removesuffix(_GATED)}"
    tiles = weight_only_tiles(target, name, size, is_gated=_halves(shape) == 2)
    return Default(config=f"{size}-{shape.form}", configuration=tiles)


def _space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    columns = shape.size("n") // _halves(shape)
    rows = (16,) if shape.rows <= 16 else (32, 64, 128)
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for m in rows
        if m <= max(32, shape.rows)
        for n in (32, 64, 128)
        if n <= max(64, columns) and m * n * _halves(shape) <= 128 * 128
        for warps in (4, 8)
        for stages in ((2,) if target.backend == "hip" else (2, 3))
    ]


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    m, n, depth = (configuration[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    halves, k = _halves(shape), shape.size("k")
    columns = shape.size("n") // halves
    blocks, steps = -(-shape.rows // m) * -(-columns // n), -(-k // depth)
    return Footprint(
        programs=blocks,
        steps=steps,
        step_bytes=depth * (2 * m + n * halves),
        flops=2.0 * blocks * m * n * halves * steps * depth,
        needed_flops=2.0 * shape.rows * columns * halves * k,
        memory_bytes=2.0 * shape.rows * (k + columns) + float(columns * halves * k),
    )


def _call(shape: ShapeClass, device: Any) -> Call:
    from hal_kernels.gemm.triton_tuning import call_of

    form = FORMATS[_FORMATS[shape.form.removesuffix(_GATED)]]
    return call_of(form, shape, device, is_gated=_halves(shape) == 2)


def _why_never(target: Target, shape: ShapeClass, units: int | None) -> str:
    form = FORMATS[_FORMATS[shape.form.removesuffix(_GATED)]]
    return why_no_weight(shape, form, is_gated=_halves(shape) == 2)


TUNABLE = TunableKernel(
    kernel="gemm.fp8_weight_only",
    module="hal_kernels.gemm.triton",
    size_names=("k", "n"),
    forms=tuple(name + gated for gated in ("", _GATED) for name in _FORMATS),
    dtypes=lambda target: ("bfloat16",),
    default=_default,
    space=_space,
    footprint=_footprint,
    call=_call,
    why_never=_why_never,
)
