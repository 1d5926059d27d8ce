"""What may be chosen for split products with quantised weights, and what a choice costs.

A configuration has the number of parts beside the tiles of one: that is no constant of the kernel,
but of its grid and of the sum behind it. Free of torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hal.ops.formats import FORMATS as WEIGHT_FORMATS
from hal.ops.formats import WeightFormat
from hal.ops.gemm import GemmRequest
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.split_k_schedule import LEAST_COLUMNS, SPLITS, splits_of
from hal_kernels.gemm.split_k_variants import FORMS, KERNELS, split_k_tiles
from hal_kernels.tuning.performance_model import Footprint
from hal_kernels.tuning.shapes import LEAST_ROWS, ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_GATED = "-gated"
_CHOSEN = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
# Of the formats in FP8, whose scales decide which kernel multiplies them.
_FP8_FORMATS = {
    "g128": "fp8_block128_a8",
    "g32": "fp8_block32_a8",  # with scales of powers of two some multiply it as weight32
    "weight32": "fp8_block32_ue8m0_a8",
    "fp8g128": "fp8_block128",
    "fp8g32": "fp8_block32_ue8m0",
}


def _name(shape: ShapeClass) -> str:
    return shape.form.removesuffix(_GATED)


def _is_gated(shape: ShapeClass) -> bool:
    return shape.form.endswith(_GATED)


def _columns(shape: ShapeClass) -> int:
    return shape.size("n") // (2 if _is_gated(shape) else 1)


def split_class(request: GemmRequest, dtype: str, config: str) -> ShapeClass:
    """The class of a request whose few rows are split. dtype, config: of the parts, as the
    catalogue names them."""
    return shape_class(dtype, config, LEAST_ROWS, {"n": request.n, "k": request.k})


def chosen_of(tiles: Mapping[str, Any], splits: int) -> dict[str, int]:
    """What of the constants of `split_k_tiles` may be chosen, with the number of parts."""
    return {**{name: int(tiles[name]) for name in _CHOSEN}, "SPLIT_K": splits}


def _default(target: Target, shape: ShapeClass, units: int = 0) -> Default:
    """Raises KeyError for a form that is not compiled for the dtype or the target."""
    if (shape.dtype, shape.form) not in _compiled(target):
        raise KeyError(f"gemm.split_k: no {shape.form} of {shape.dtype} on {target.arch}")
    tiles = split_k_tiles(target, _name(shape), is_gated=_is_gated(shape))
    count = -(-_columns(shape) // tiles["BLOCK_N"])
    splits = splits_of(count, shape.size("k"), units) if units else SPLITS[0]
    return Default(config=shape.form, configuration=chosen_of(tiles, max(splits, SPLITS[0])))


@cache
def _compiled(target: Target) -> frozenset[tuple[str, str]]:
    return frozenset((one.dtype, one.config) for one in KERNELS[0].variants(target))


def why_no_weight(shape: ShapeClass, form: WeightFormat, *, is_gated: bool) -> str:
    """Why there is no weight [n, k] in a format, "" where there is one. A last block of square
    ones may be cut, a last group of a row not."""
    if is_gated and shape.size("n") % 2:
        return f"required an even n of a gated product, found {shape.size('n')}"
    group = form.group_size or 1
    if form.block_n == 1 and shape.size("k") % group:
        return f"required k as a multiple of {group} for {form.name}, found {shape.size('k')}"
    return ""


def _why_never(target: Target, shape: ShapeClass, units: int | None) -> str:
    """A class that `split_class` never makes: more rows, or a weight whose K stays whole."""
    if why := why_no_weight(shape, _format_of(_name(shape)), is_gated=_is_gated(shape)):
        return why
    if shape.rows != LEAST_ROWS:
        return f"required rows up to {LEAST_ROWS}, of which alone K is cut, found {shape.rows}"
    k, least = shape.size("k"), SPLITS[0] * LEAST_COLUMNS
    if k < least:
        return f"required k of {least} or more, from which on it is cut, found {k}"
    block = split_k_tiles(target, _name(shape), is_gated=_is_gated(shape))["BLOCK_N"]
    tiles = -(-_columns(shape) // block)
    if units is not None and splits_of(tiles, k, units) == 1:
        return (
            "required fewer tiles than a device with a known number of multiprocessors runs at a "
            f"time, or K stays whole, found {tiles} tiles and {units} multiprocessors"
        )
    return ""


def _space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    form = FORMS[_name(shape)]
    given = _default(target, shape).configuration
    depths = (given["BLOCK_K"],) if form.is_square or form.kind == 1 else (64, 128)
    splits = [one for one in SPLITS if shape.size("k") >= one * LEAST_COLUMNS] or [SPLITS[0]]
    stages = (2,) if target.backend == "hip" else (2, 3, 4)
    return [
        {
            "BLOCK_N": columns, "BLOCK_K": depth, "SPLIT_K": parts, "num_warps": warps,
            "num_stages": ahead,
        }
        for columns in (32, 64, 128)
        for depth in depths
        for parts in splits
        for warps in (2, 4, 8)
        for ahead in stages
    ]  # fmt: skip


def _weight_bytes(name: str) -> float:
    """Of an element with its share of a group's scale and minimum."""
    form = FORMS[name]
    scales = (2 if form.has_minimum else 1) * 2 / form.group if form.group else 0.0
    return form.bits / 8 + (0.0 if form.is_square or form.kind == 1 else scales)


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    """Of the parts, with their float32 sums, written and read."""
    rows, columns, depth = (configuration[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    splits, halves, k = configuration["SPLIT_K"], 2 if _is_gated(shape) else 1, shape.size("k")
    activation, weight = (
        (1.0 if shape.dtype.startswith("fp8") else 2.0),
        _weight_bytes(_name(shape)),
    )
    blocks = -(-_columns(shape) // columns)
    whole = -(-k // depth)
    steps = -(-whole // splits)
    return Footprint(
        programs=blocks * splits,
        steps=steps,
        step_bytes=int(depth * (rows * activation + columns * halves * weight)),
        flops=2.0 * blocks * rows * columns * halves * steps * splits * depth,
        needed_flops=2.0 * shape.rows * _columns(shape) * halves * k,
        memory_bytes=shape.rows * k * activation
        + _columns(shape) * halves * (k * weight + 8.0 * splits * shape.rows)
        + 2.0 * shape.rows * _columns(shape),
    )


def _format_of(name: str) -> WeightFormat:
    """A format of weights that is multiplied in a form: "w4g32-asym" is "int4_g32_asym"."""
    if name in _FP8_FORMATS:
        return WEIGHT_FORMATS[_FP8_FORMATS[name]]
    stem, *endings = name.split("-")
    bits, _, group = stem.removeprefix("w").partition("g")
    return WEIGHT_FORMATS["_".join((f"int{bits}", f"g{group}" if group else "channel", *endings))]


def _call(shape: ShapeClass, device: Any) -> Call:
    from hal_kernels.gemm.triton_tuning import call_of

    dtype = "float16" if shape.dtype == "float16" else "bfloat16"
    form = _format_of(_name(shape))
    return call_of(form, shape, device, is_gated=_is_gated(shape), dtype=dtype)


TUNABLE = TunableKernel(
    kernel="gemm.split_k",
    module="hal_kernels.gemm.triton",
    size_names=("k", "n"),
    forms=tuple(name + gated for gated in ("", _GATED) for name in FORMS),
    dtypes=lambda target: (target.fp8_dtype, "bfloat16", "float16"),
    default=_default,
    default_of_units=_default,
    space=_space,
    footprint=_footprint,
    call=_call,
    launch_only=frozenset({"SPLIT_K"}),
    why_never=_why_never,
)
