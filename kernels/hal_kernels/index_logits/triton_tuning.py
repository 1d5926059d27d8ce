"""What may be chosen for the Triton indexer scores, and what a choice costs. Free of torch and
triton.

A class is measured and modelled with `KEYS` keys of each sequence: for a prompt its queries are the
last of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.index_logits.triton_variants import KERNELS
from hal_kernels.tuning.key_tiles import (
    KEYS,
    batch_of,
    cache_of,
    chosen,
    default_of,
    metadata,
    page_table,
    steps_of_keys,
)
from hal_kernels.tuning.performance_model import Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, TunableKernel

_MODULE = "hal_kernels.index_logits.triton"
_SIZES = ("head_dim", "heads")
_NAMES = ("BLOCK_N", "BLOCK_Q", "num_warps", "num_stages")
_PAGE = 64
_PAGED, _FP4 = KERNELS
_FORMS = tuple(
    f"{key_format}-{phase}"
    for key_format in ("bf16", "fp8_132", "fp4_68")
    for phase in ("decode", "prefill")
)


def chosen_tiles(options: Mapping[str, Any]) -> dict[str, int]:
    """The constants of a launch that tuning chooses."""
    return chosen(options, _NAMES)


def shape_of(request: IndexLogitsRequest, device: DeviceSpec) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range; None for float16, whose tiles
    are not to be chosen."""
    is_fp8 = request.dtype == "float8_e4m3fn"
    dtype = request.dtype
    if not is_fp8 and dtype != "bfloat16":
        return None
    if is_fp8:
        dtype = "fp8_e4m3fnuz" if device.arch.startswith("gfx94") else "fp8_e4m3fn"
    kernel = _FP4.name if is_fp8 and request.key_format == "fp4_68" else _PAGED.name
    form = f"{request.key_format}-{'decode' if request.phase == 'decode' else 'prefill'}"
    sizes = {"heads": request.num_heads, "head_dim": request.head_dim}
    return kernel, shape_class(dtype, form, request.tokens.high, sizes)


def shape_of_selection(
    request: IndexSelectionRequest, device: DeviceSpec
) -> tuple[str, ShapeClass] | None:
    """As `shape_of`, of scores that are computed with the choice in one call."""
    return shape_of(request.logits, device)


def _phase(shape: ShapeClass) -> str:
    return shape.form.rpartition("-")[2]


def _space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    queries = (1,) if _phase(shape) == "decode" else (8, 16, 32)
    return [
        {**steps, "BLOCK_Q": count}
        for steps in steps_of_keys(target, (32, 64, 128))
        for count in queries
    ]


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    n, count = configuration["BLOCK_N"], configuration["BLOCK_Q"]
    heads, dim = shape.size("heads"), shape.size("head_dim")
    is_decode = _phase(shape) == "decode"
    keys = KEYS if is_decode else max(KEYS, shape.rows)
    sequences, queries = (shape.rows, 1) if is_decode else (1, shape.rows)
    programs = sequences * -(-queries // count) * -(-keys // n)
    padded = max(16, 1 << (heads - 1).bit_length())
    wide = 1 if shape.dtype.startswith("fp8") else 2
    row = KV_FORMATS[shape.form.rpartition("-")[0]].row_bytes(dim)
    query_bytes = heads * (dim * wide + 4)
    return Footprint(
        programs=programs,
        steps=1,  # a program reads its keys once, for all its queries
        step_bytes=n * row + count * query_bytes,
        flops=2.0 * programs * n * count * padded * dim,
        needed_flops=2.0 * sequences * queries * keys * heads * dim,
        memory_bytes=float(
            sequences * keys * row + shape.rows * query_bytes + 4 * shape.rows * keys
        ),
    )


def _call(shape: ShapeClass, device: Any) -> Call:
    import torch

    phase, heads, dim = _phase(shape), shape.size("heads"), shape.size("head_dim")
    key_format: Any = shape.form.rpartition("-")[0]
    dtype = "float8_e4m3fn" if shape.dtype.startswith("fp8") else shape.dtype
    request = IndexLogitsRequest(
        phase="decode" if phase == "decode" else "prefill", num_heads=heads, head_dim=dim,
        key_format=key_format, block_size=_PAGE, dtype=dtype, tokens=TokenRange(1, shape.rows),
    )  # fmt: skip
    queries, keys = batch_of(phase, shape.rows, KEYS)
    table = page_table(len(queries), keys, _PAGE, device)
    q = torch.randn(shape.rows, heads * dim, device=device).to(getattr(torch, dtype))
    weights = torch.randn(shape.rows, heads, device=device)
    cache = cache_of(key_format, table, dim, _PAGE)
    args = (q, weights, cache, metadata(table, keys, queries))
    return Call(request=request, static={"scale": dim**-0.5}, args=args)


def _paged_dtypes(target: Target) -> Sequence[str]:
    return ("bfloat16", target.fp8_dtype)


def _fp8_dtypes(target: Target) -> Sequence[str]:
    return (target.fp8_dtype,)


def _tunable(number: int, forms: tuple[str, ...], dtypes: Any) -> TunableKernel:
    kernel = KERNELS[number]
    return TunableKernel(
        kernel=kernel.name, module=_MODULE, size_names=_SIZES, forms=forms, dtypes=dtypes,
        default=default_of(kernel, _NAMES), space=_space, footprint=_footprint, call=_call,
    )  # fmt: skip


TUNABLE = (
    _tunable(0, _FORMS, _paged_dtypes),
    _tunable(1, ("fp4_68-decode", "fp4_68-prefill"), _fp8_dtypes),
)
