"""What may be chosen for the Triton products per expert, and what a choice costs. Free of torch and
triton.

The rows of a class are those of one expert, where all experts have as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.formats import FORMATS
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.aot.targets import Target
from hal_kernels.grouped_gemm.triton_limits import choose_kernel, choose_kernels
from hal_kernels.grouped_gemm.triton_variants import FEW_ROWS, NEEDS_64_ROWS, tiles
from hal_kernels.grouped_gemm.widened_variants import widened_expert_tiles
from hal_kernels.tuning.performance_model import Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_MODULE = "hal_kernels.grouped_gemm.triton"
_NOT_TUNED = ("grouped_gemm.weight_only", "grouped_gemm.integer")  # weights that are widened
_SIZES = ("experts", "k", "n")
_CHOSEN = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
_DENSE_DEPTHS = {True: (32, 64, 128), False: (32, 64)}  # columns of a step, of few rows and of more
_WIDENED_DEPTHS = {128: (32, 64), 32: (32,), 0: ()}  # by columns that share a scale
_FORMATS = {"g128": "fp8_block128_a8", "g32": "fp8_block32_ue8m0_a8"}


def chosen(constants: Mapping[str, Any]) -> dict[str, int]:
    """The constants of a launch that tuning chooses."""
    return {name: constants[name] for name in _CHOSEN if name in constants}


def rows_of(tokens: int, request: GroupedGemmRequest) -> int:
    """Rows of an expert of so many tokens, rounded up."""
    return -(-tokens * request.experts_per_token // request.num_experts)


def shape_of(request: GroupedGemmRequest, device: DeviceSpec) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range; None for what no kernel
    serves, and for what nothing is tuned of: weights that are widened, and parts along K."""
    choices = choose_kernels(request, device)
    if isinstance(choices, Reason) or any(c.kernel == "grouped_gemm.split_k" for c in choices):
        return None
    return whole_shape_of(request, device)


def whole_shape_of(
    request: GroupedGemmRequest, device: DeviceSpec
) -> tuple[str, ShapeClass] | None:
    """As `shape_of`, of the whole product, whether or not K is cut for so few rows."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason) or choice.kernel in _NOT_TUNED:
        return None
    group = f"g{request.weight_format.group_size}"
    is_block = choice.kernel in ("grouped_gemm.fp8_block", "grouped_gemm.fp8_widened")
    parts = [group] if is_block else []
    parts += ["gated"] if request.epilogue == "silu_gated" else []
    sizes = {"experts": request.num_experts, "n": request.n, "k": request.k}
    rows = rows_of(request.tokens.high, request)
    return choice.kernel, shape_class(choice.dtype, "-".join(parts) or "plain", rows, sizes)


def _kind(kernel: str) -> str:
    name = kernel.partition(".")[2]
    return name if name in ("dense", "mxfp4", "fp8_widened") else "fp8"


def _group(shape: ShapeClass) -> int:
    return next((int(part[1:]) for part in shape.form.split("-") if part[1:].isdigit()), 0)


def _is_gated(shape: ShapeClass) -> bool:
    return shape.form.endswith("gated")


def _default(kind: str) -> Any:
    def default(target: Target, shape: ShapeClass) -> Default:
        size = "small" if shape.rows <= FEW_ROWS else "large"
        group = f"g{_group(shape)}-" if _group(shape) else ""
        found = (
            widened_expert_tiles(target, _group(shape), shape.rows, is_gated=_is_gated(shape))
            if kind == "fp8_widened"
            else tiles(target, kind, shape.rows, is_gated=_is_gated(shape), group=_group(shape))
        )
        name = f"{group}{size}{'-gated' if _is_gated(shape) else ''}"
        return Default(config=name, configuration=chosen(found))

    return default


def _space(kind: str) -> Any:
    def space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
        needs_64 = kind != "dense" and target.arch in NEEDS_64_ROWS
        few = shape.rows <= FEW_ROWS
        rows = (64,) if needs_64 and few else (16,) if few else (64, 128) if needs_64 else (32, 64)
        depths = (2,) if target.backend == "hip" else (2, 3, 4) if kind != "mxfp4" else (2, 3)
        columns = (32, 64) if _is_gated(shape) else (32, 64, 128)
        warps = (2, 4, 8) if few and kind == "dense" else (2, 4) if few else (4, 8)
        steps = {"dense": _DENSE_DEPTHS[few], "fp8_widened": _WIDENED_DEPTHS[_group(shape)]}
        tiles_of = [(m, n, w) for m in rows for n in columns for w in warps]
        if kind == "dense" and not few and not _is_gated(shape):
            tiles_of += [(m, 256, w) for m in rows for w in (8, 16)]
        return [
            {"BLOCK_M": m, "BLOCK_N": n, "num_warps": w, "num_stages": stages}
            | ({"BLOCK_K": k} if kind in steps else {})
            for m, n, w in tiles_of
            for k in steps.get(kind, (64,))
            for stages in depths
        ]

    return space


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    m, n = configuration["BLOCK_M"], configuration["BLOCK_N"]
    halves = 2 if _is_gated(shape) else 1
    experts, k, columns = shape.size("experts"), shape.size("k"), shape.size("n") // halves
    is_wide = not shape.dtype.startswith("fp8")
    activation = 2.0 if is_wide else 1.0
    is_fp4 = not is_wide and not _group(shape)
    weight = 0.53125 if is_fp4 else activation  # a scale of a byte per 32 columns
    depth = configuration.get("BLOCK_K") or _group(shape)
    blocks = experts * -(-shape.rows // m) * -(-columns // n)
    steps = -(-k // depth)
    rows = float(experts * shape.rows)
    return Footprint(
        programs=blocks,
        steps=steps,
        step_bytes=int(depth * (m * activation + n * halves * weight)),
        flops=2.0 * blocks * m * n * halves * steps * depth,
        needed_flops=2.0 * rows * columns * halves * k,
        memory_bytes=rows * k * activation
        + experts * columns * halves * k * weight
        + 2.0 * rows * columns,
    )


def _call(kernel: str) -> Any:
    def call(shape: ShapeClass, device: Any) -> Call:
        import dataclasses

        import torch

        from hal.ops.formats import quantize_weight, torch_dtype

        experts, n, k = shape.size("experts"), shape.size("n"), shape.size("k")
        is_wide = kernel == "grouped_gemm.dense"
        name = shape.dtype if is_wide else _FORMATS.get(shape.form.split("-")[0], "mxfp4_a8")
        dtype = shape.dtype if is_wide else "bfloat16"
        request = GroupedGemmRequest(
            num_experts=experts, experts_per_token=1, n=n, k=k, dtype=dtype,
            weight_format=FORMATS[name], epilogue="silu_gated" if _is_gated(shape) else "none",
            tokens=TokenRange(1, experts * shape.rows),
        )  # fmt: skip
        weight: Any
        if is_wide:
            weight = (torch.randn(experts, n, k, device=device) / k**0.5).to(torch_dtype(dtype))
        else:
            # One expert's values for all of them: what differs between experts takes no time.
            packed = quantize_weight(torch.randn(n, k) / k**0.5, FORMATS[name])
            moved: dict[str, Any] = {
                field.name: value.to(device)
                for field in dataclasses.fields(packed)
                if isinstance(value := getattr(packed, field.name), torch.Tensor)
            }
            weight = [dataclasses.replace(packed, **moved)] * experts
        rows = experts * shape.rows
        x = torch.randn(rows, k, device=device).to(torch_dtype(dtype))
        offsets = torch.arange(0, rows + 1, shape.rows, dtype=torch.int64, device=device)
        return Call(request=request, static={"weight": weight}, args=(x, offsets))

    return call


def _wide(target: Target) -> Sequence[str]:
    return ("bfloat16", "float16")


def _eight(target: Target) -> Sequence[str]:
    return (target.fp8_dtype,)


def _tunable(kernel: str, forms: tuple[str, ...], dtypes: Any) -> TunableKernel:
    kind = _kind(kernel)
    return TunableKernel(
        kernel=kernel, module=_MODULE, size_names=_SIZES, forms=forms, dtypes=dtypes,
        default=_default(kind), space=_space(kind), footprint=_footprint, call=_call(kernel),
    )  # fmt: skip


TUNABLE = (
    _tunable("grouped_gemm.dense", ("plain", "gated"), _wide),
    _tunable("grouped_gemm.fp8_block", ("g128", "g128-gated", "g32", "g32-gated"), _eight),
    _tunable("grouped_gemm.fp8_widened", ("g128", "g128-gated", "g32", "g32-gated"), _eight),
    _tunable("grouped_gemm.mxfp4", ("plain", "gated"), _eight),
)
