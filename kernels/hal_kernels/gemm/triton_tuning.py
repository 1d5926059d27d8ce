"""What may be chosen for the Triton products, and what a choice costs. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.formats import FORMATS, WeightFormat
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.dense_forms import dense_size
from hal_kernels.gemm.split_k_tuning import split_class, why_no_weight
from hal_kernels.gemm.triton_limits import choose_kernel, choose_kernels, dense_class, size_of
from hal_kernels.gemm.triton_variants import configurations
from hal_kernels.gemm.weight_only_variants import weight_only_tiles
from hal_kernels.gemm.widened_variants import widened_tiles
from hal_kernels.tuning.performance_model import Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_MODULE = "hal_kernels.gemm.triton"
_SIZES = ("k", "n")
_TABLES = {"plain": "gemm", "bias": "gemm", "gated": "gemm_gated"}
# Formats by which a call of a quantised form is made: (kernel, form) -> name.
_FORMATS = {
    ("gemm.fp8_block", "g128"): "fp8_block128_a8",
    ("gemm.fp8_block", "g32"): "fp8_block32_a8",
    ("gemm.fp8_block", "g128-gated"): "fp8_block128_a8",
    ("gemm.fp8_block", "g32-gated"): "fp8_block32_a8",
    ("gemm.fp8_widened", "g128"): "fp8_block128_a8",
    ("gemm.fp8_widened", "g32"): "fp8_block32_a8",
    ("gemm.fp8_widened", "g128-gated"): "fp8_block128_a8",
    ("gemm.fp8_widened", "g32-gated"): "fp8_block32_a8",
    ("gemm.mxfp8", "weight32"): "fp8_block32_ue8m0_a8",
    ("gemm.mxfp8", "weight32-gated"): "fp8_block32_ue8m0_a8",
    ("gemm.weight_only", "w8"): "int8_channel",
    ("gemm.weight_only", "w8g32"): "int8_g32",
    ("gemm.weight_only", "w4g32"): "int4_g32",
    ("gemm.weight_only", "w4g32-asym"): "int4_g32_asym",
    ("gemm.weight_only", "w4g64"): "int4_g64",
    ("gemm.weight_only", "w4g64-zero"): "int4_g64_zero",
    ("gemm.weight_only", "w4g128"): "int4_g128",
    ("gemm.weight_only", "w4g128-zero"): "int4_g128_zero",
    ("gemm.weight_only", "w8-gated"): "int8_channel",
    ("gemm.weight_only", "w8g32-gated"): "int8_g32",
    ("gemm.weight_only", "w4g32-gated"): "int4_g32",
    ("gemm.weight_only", "w4g32-asym-gated"): "int4_g32_asym",
    ("gemm.weight_only", "w4g64-gated"): "int4_g64",
    ("gemm.weight_only", "w4g64-zero-gated"): "int4_g64_zero",
    ("gemm.weight_only", "w4g128-gated"): "int4_g128",
    ("gemm.weight_only", "w4g128-zero-gated"): "int4_g128_zero",
}
_ALIKE = ("-bias", "-silu", "-float32")  # what follows a product, and does not change what is tuned
# Scales of groups included.
_WEIGHT_BYTES = {
    "w8": 1.0, "w8g32": 1.0625, "w4g32": 0.5625, "w4g32-asym": 0.625, "w4g64": 0.53125,
    "w4g64-zero": 0.5625, "w4g128": 0.515625, "w4g128-zero": 0.53125,
}  # fmt: skip


def shape_of(request: GemmRequest, device: DeviceSpec) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range, of few rows that are split
    those of the parts; None for what no kernel serves."""
    choices = choose_kernels(request, device)
    if not isinstance(choices, Reason) and choices[0].kernel == "gemm.split_k":
        parts = choices[0]
        return parts.kernel, split_class(request, parts.dtype, parts.config)
    return whole_shape_of(request, device)


def whole_shape_of(request: GemmRequest, device: DeviceSpec) -> tuple[str, ShapeClass] | None:
    """As `shape_of`, of the product that is not split, which more rows of a call site take. Of rows
    in float16 only dense products are tuned."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        return None
    if choice.kernel == "gemm.weight_only" and choice.dtype != "bfloat16":
        return None
    name = choice.config
    if choice.kernel == "gemm.dense":
        return choice.kernel, dense_class(request)
    if choice.kernel in ("gemm.weight_only", "gemm.fp8_weight_only"):
        form = _without_alike(name.partition("-")[2])
    else:
        form = _without_alike(name.removesuffix("-small"))
    sizes = {"n": request.n, "k": request.k}
    return choice.kernel, shape_class(choice.dtype, form, request.tokens.high, sizes)


def _without_alike(form: str) -> str:
    for suffix in _ALIKE:
        form = form.removesuffix(suffix)
    return form


def _tiles(shape: ShapeClass) -> list[tuple[int, int]]:
    """Rows and columns of a tile: of few rows the weight's bytes decide, so tiles are narrow."""
    if shape.rows <= 16:
        return [(16, 32), (16, 64), (16, 128)]
    shapes = [(32, 64), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128)]
    return [(m, n) for m, n in shapes if m <= max(32, shape.rows) and n <= max(64, _columns(shape))]


def _columns(shape: ShapeClass) -> int:
    return shape.size("n") // _halves(shape)


def _halves(shape: ShapeClass) -> int:
    return 2 if shape.form.endswith("gated") else 1


def _warps(m: int, n: int) -> int:
    return 8 if m * n >= 128 * 128 else 4


def _depths(target: Target) -> tuple[int, ...]:
    return (2,) if target.backend == "hip" else (3, 4)


def _dense_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    splits = (1, 4, 8) if shape.rows <= 16 and shape.size("k") >= 1024 else (1,)
    columns = (64, 128) if shape.rows <= 16 else (32, 64)
    return [
        {
            "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLIT_K": split,
            "GROUP_M": 1 if m == 16 else 8, "num_warps": _warps(m, n), "num_stages": stages,
        }
        for m, n in _tiles(shape)
        for k in columns
        for split in splits
        for stages in _depths(target)
    ]  # fmt: skip


def _weight_only_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    # On AMD a weight that is loaded a step ahead passes through LDS once more.
    ahead = (1, 2) if target.backend == "hip" else (3, 4)
    return [
        {
            "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 1 if m == 16 else 8,
            "num_warps": warps, "num_stages": stages,
        }
        for m, n in _tiles(shape)
        if m * n * _halves(shape) <= 128 * 128
        for k in ((64, 128) if m == 16 else (32, 64))
        for warps in ((2, 4) if m == 16 else (8,) if m * n >= 128 * 64 else (4,))
        for stages in ahead
    ]  # fmt: skip


def _fp8_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    # wgmma and tcgen05 take 64 rows; with fewer Triton widens FP8 without a word.
    least = 64 if target.arch in ("sm_90", "sm_100", "sm_103") else 16
    tiles = [(m, n) for m, n in _tiles(shape) if m >= least] or [(64, 32), (64, 64), (64, 128)]
    return [
        {
            "BLOCK_M": m, "BLOCK_N": n, "GROUP_M": 1 if shape.rows <= 16 else 8,
            "num_warps": warps, "num_stages": stages,
        }
        for m, n in tiles
        if m * n * _halves(shape) <= 128 * 128
        for warps in (4, 8)
        for stages in _depths(target)
    ]  # fmt: skip


def _widened_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    steps = (32,) if shape.form.startswith("g32") else (32, 64)
    return [
        {**tile, "BLOCK_K": k}
        for tile in _fp8_space(target, shape)
        if tile["BLOCK_M"] * tile["BLOCK_N"] * _halves(shape) <= 64 * 128
        for k in steps
    ]


def _mxfp8_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    return [
        {
            "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "GROUP_M": 1 if m == 16 else 8,
            "num_warps": warps, "num_stages": stages,
        }
        for m, n in _tiles(shape)
        if m * n * _halves(shape) <= 128 * 128
        for warps in sorted({4, _warps(m, n)})
        for stages in (2, 3)
    ]  # fmt: skip


def _dense_default(target: Target, shape: ShapeClass, units: int = 0) -> Default:
    name, rows, k = _TABLES[shape.form], shape.rows, shape.size("k")
    size = dense_size(
        target, name, units, rows=rows, features=_columns(shape), k=k,
        has_wide=shape.form == "plain",
    )  # fmt: skip
    suffix = "" if shape.form == "plain" else f"-{shape.form}"
    return Default(config=size + suffix, configuration=configurations(name, target)[size])


def _weight_only_default(target: Target, shape: ShapeClass) -> Default:
    size, is_gated = size_of(shape.rows), _halves(shape) == 2
    name = shape.form.removesuffix("-gated")
    tiles = weight_only_tiles(target, name, size, is_gated=is_gated)
    return Default(config=f"{size}-{shape.form}", configuration=tiles)


def _fp8_default(target: Target, shape: ShapeClass) -> Default:
    name = f"{shape.form}-small" if size_of(shape.rows) == "small" else shape.form
    return Default(config=name, configuration=configurations("gemm_fp8_block", target)[name])


def _widened_default(target: Target, shape: ShapeClass) -> Default:
    size, group = size_of(shape.rows), 32 if shape.form.startswith("g32") else 128
    tiles = widened_tiles(target, group, size, is_wide=_halves(shape) == 2)
    return Default(config=shape.form + "-small" * (size == "small"), configuration=tiles)


def _mxfp8_default(target: Target, shape: ShapeClass) -> Default:
    name = f"{shape.form}-small" if size_of(shape.rows) == "small" else shape.form
    return Default(config=name, configuration=configurations("gemm_mxfp8", target)[name])


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    """Of the product alone, with its float32 parts where K is split."""
    m, n = configuration["BLOCK_M"], configuration["BLOCK_N"]
    columns, k = _columns(shape), shape.size("k")
    halves = _halves(shape)
    depth = configuration.get("BLOCK_K", configuration.get("GROUP_K", 64))
    splits = configuration.get("SPLIT_K", 1)
    activation = 1.0 if shape.dtype.startswith("fp8") else 2.0
    weight = _WEIGHT_BYTES.get(shape.form.removesuffix("-gated"), activation)
    blocks = -(-shape.rows // m) * -(-columns // n)
    whole = -(-k // depth)
    steps = -(-whole // splits)
    parts = 8.0 * splits * shape.rows * columns * halves if splits > 1 else 0.0
    return Footprint(
        programs=blocks * splits,
        steps=steps,
        step_bytes=int(depth * (m * activation + n * halves * weight)),
        flops=2.0 * blocks * m * n * halves * steps * splits * depth,
        needed_flops=2.0 * shape.rows * columns * halves * k,
        memory_bytes=shape.rows * k * activation
        + columns * halves * k * weight
        + 2.0 * shape.rows * columns
        + parts,
    )


def _dense_call(shape: ShapeClass, device: Any) -> Call:
    import torch

    from hal.ops.formats import torch_dtype

    n, k, dtype = shape.size("n"), shape.size("k"), torch_dtype(shape.dtype)
    request = GemmRequest(
        n=n, k=k, dtype=shape.dtype, weight_format=FORMATS[shape.dtype],
        has_bias=shape.form == "bias", tokens=TokenRange(1, shape.rows),
        epilogue="silu_gated" if shape.form == "gated" else "none",
    )  # fmt: skip
    static = {"weight": (torch.randn(n, k, device=device) / k**0.5).to(dtype)}
    if shape.form == "bias":
        static["bias"] = torch.randn(n, device=device).to(dtype)
    x = torch.randn(shape.rows, k, device=device).to(dtype)
    return Call(request=request, static=static, args=(x,))


def call_of(
    form: WeightFormat, shape: ShapeClass, device: Any, *, is_gated: bool, dtype: str = "bfloat16"
) -> Call:
    """A call with a random weight in a format, of rows in a dtype."""
    import dataclasses

    import torch

    from hal.ops.formats import torch_dtype

    n, k = shape.size("n"), shape.size("k")
    packed = random_weight(form, n, k)
    moved: dict[str, Any] = {
        field.name: value.to(device)
        for field in dataclasses.fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    request = GemmRequest(
        n=n, k=k, dtype=dtype, weight_format=form, tokens=TokenRange(1, shape.rows),
        epilogue="silu_gated" if is_gated else "none",
    )  # fmt: skip
    x = torch.randn(shape.rows, k, device=device).to(torch_dtype(dtype))
    return Call(request=request, static={"weight": dataclasses.replace(packed, **moved)}, args=(x,))


def random_weight(form: WeightFormat, n: int, k: int) -> Any:
    """A `QuantizedWeight` [N, K] on the host; of integers, random ones and scales."""
    import torch

    from hal.ops.formats import QuantizedWeight, quantize_weight

    if form.element != "int":
        return quantize_weight(torch.randn(n, k) / k**0.5, form)
    shape = form.scale_shape(n, k)
    scale = (torch.rand(shape) * 0.05 + 0.001).to(getattr(torch, form.scale_dtype))
    data = torch.randint(0, 256, (n, k * form.bits // 8), dtype=torch.uint8)
    return QuantizedWeight(
        format=form,
        data=data.view(torch.int8) if form.bits == 8 else data,
        scale=scale,
        minimum=_random_minimum(form, shape, scale.dtype),
    )


def _random_minimum(form: WeightFormat, shape: tuple[int, ...], dtype: Any) -> Any:
    import torch

    if form.is_symmetric:
        return None
    return (torch.randint(0, 16, shape) if form.has_zeros else -torch.rand(shape)).to(dtype)


def _quantised_call(kernel: str) -> Any:
    def call(shape: ShapeClass, device: Any) -> Call:
        form: WeightFormat = FORMATS[_FORMATS[kernel, shape.form]]
        return call_of(form, shape, device, is_gated=_halves(shape) == 2)

    return call


def _why_no_call(kernel: str) -> Callable[[Target, ShapeClass, int | None], str]:
    def why(target: Target, shape: ShapeClass, units: int | None) -> str:
        form = FORMATS[_FORMATS.get((kernel, shape.form), shape.dtype)]
        return why_no_weight(shape, form, is_gated=_halves(shape) == 2)

    return why


def _wide(target: Target) -> Sequence[str]:
    return ("bfloat16", "float16")


def _eight(target: Target) -> Sequence[str]:
    return (target.fp8_dtype,)


TUNABLE = (
    TunableKernel(
        kernel="gemm.dense", module=_MODULE, size_names=_SIZES, forms=("plain", "bias", "gated"),
        dtypes=_wide, default=_dense_default, default_of_units=_dense_default, space=_dense_space,
        footprint=_footprint, call=_dense_call, why_never=_why_no_call("gemm.dense"),
    ),
    TunableKernel(
        kernel="gemm.fp8_block", module=_MODULE, size_names=_SIZES,
        forms=("g128", "g32", "g128-gated", "g32-gated"),
        dtypes=_eight, default=_fp8_default, space=_fp8_space, footprint=_footprint,
        call=_quantised_call("gemm.fp8_block"), why_never=_why_no_call("gemm.fp8_block"),
    ),
    TunableKernel(
        kernel="gemm.fp8_widened", module=_MODULE, size_names=_SIZES,
        forms=("g128", "g32", "g128-gated", "g32-gated"),
        dtypes=_eight, default=_widened_default, space=_widened_space, footprint=_footprint,
        call=_quantised_call("gemm.fp8_widened"), why_never=_why_no_call("gemm.fp8_widened"),
    ),
    TunableKernel(
        kernel="gemm.mxfp8", module=_MODULE, size_names=_SIZES,
        forms=("weight32", "weight32-gated"),
        dtypes=_eight, default=_mxfp8_default, space=_mxfp8_space, footprint=_footprint,
        call=_quantised_call("gemm.mxfp8"), why_never=_why_no_call("gemm.mxfp8"),
    ),
    TunableKernel(
        kernel="gemm.weight_only", module=_MODULE, size_names=_SIZES,
        forms=tuple(form for kernel, form in _FORMATS if kernel == "gemm.weight_only"),
        dtypes=lambda target: ("bfloat16",), default=_weight_only_default,
        space=_weight_only_space, footprint=_footprint,
        call=_quantised_call("gemm.weight_only"), why_never=_why_no_call("gemm.weight_only"),
    ),
)  # fmt: skip
