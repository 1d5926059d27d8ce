"""What may be chosen for the Triton latent attention, and what a choice costs. Free of torch and
triton.

A class is measured and modelled with `KEYS` keys of each sequence, or as many as a list has: for a
prompt its queries are the last of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TritonKernel
from hal_kernels.mla_attention.triton_variants import (
    KERNELS,
    SPLIT_KEYS,
    block_heads,
    config_of,
    is_wide,
)
from hal_kernels.tuning.key_tiles import (
    KEYS,
    batch_of,
    cache_of,
    default_of,
    lists_of,
    metadata,
    page_table,
    steps_of_keys,
)
from hal_kernels.tuning.performance_model import ONE_AHEAD, Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, TunableKernel

_MODULE = "hal_kernels.mla_attention.triton"
_SIZES = ("heads", "keys", "rank", "rope")
_PAGE = 64
_WIDE_HEADS = 64
_FORMS = tuple(
    config_of(kv_format, is_sparse=is_sparse, phase=phase, heads=16)
    for kv_format in ("bf16", "fp8_656")
    for is_sparse in (False, True)
    for phase in ("decode", "prefill")
)
_MANY_HEADS = tuple(
    form
    for is_sparse in (False, True)
    for phase in ("decode", "prefill")
    if (form := config_of("bf16", is_sparse=is_sparse, phase=phase, heads=128)) not in _FORMS
)


def shape_of(request: MlaAttentionRequest, device: DeviceSpec) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range; None for float16, whose tiles
    are not to be chosen."""
    if request.dtype != "bfloat16":
        return None
    is_of_64 = is_wide(device.arch, request.num_heads, request.rope_dim)
    form = config_of(
        request.kv_format,
        is_sparse=bool(request.top_k),
        phase="decode" if request.phase == "decode" else "prefill",
        heads=16 if is_of_64 else request.num_heads,
    )
    sizes = {
        "heads": request.num_heads,
        "keys": request.top_k or KEYS,
        "rank": request.kv_lora_rank,
        "rope": max(1, request.rope_dim),
    }
    kernel = "mla_attention.wide" if is_of_64 else "mla_attention.paged"
    return kernel, shape_class(request.dtype, form, request.tokens.high, sizes)


def _parts(shape: ShapeClass) -> tuple[str, bool, str]:
    """(format, whether lists, phase) of a form."""
    kv_format, form, phase, *_ = shape.form.split("-")
    return kv_format, form == "sparse", phase


def _space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    return steps_of_keys(target, (16, 32, 64))


def _footprint(is_of_64: bool) -> Any:
    def footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
        n, (kv_format, _, phase) = configuration["BLOCK_N"], _parts(shape)
        heads, rank, rope = (shape.size(name) for name in ("heads", "rank", "rope"))
        rows = _WIDE_HEADS if is_of_64 else block_heads(kv_format, heads)
        is_decode = phase == "decode"
        keys = shape.size("keys")
        splits = -(-keys // SPLIT_KEYS) if is_decode else 1
        programs = shape.rows * splits * -(-heads // rows)
        steps = -(-min(keys, SPLIT_KEYS) // n) if is_decode else -(-keys // n)
        row = KV_FORMATS[kv_format].row_bytes(rank + rope)
        per_pair = 2.0 * (2 * rank + rope)
        parts = 4.0 * shape.rows * heads * splits * rank if is_decode else 0.0
        read = shape.rows * keys if is_decode else max(keys, shape.rows)
        return Footprint(
            programs=programs,
            steps=steps,
            step_bytes=n * row,
            ahead=ONE_AHEAD,
            flops=per_pair * programs * steps * rows * n,
            needed_flops=per_pair * shape.rows * heads * keys,
            memory_bytes=float(read * row) + 2.0 * shape.rows * heads * (2 * rank + rope) + parts,
        )

    return footprint


def _call(shape: ShapeClass, device: Any) -> Call:
    import torch

    kv_format, is_sparse, phase = _parts(shape)
    heads, rank, rope = (shape.size(name) for name in ("heads", "rank", "rope"))
    keys = shape.size("keys")
    queries, context = batch_of(phase, shape.rows, max(keys, KEYS) if is_sparse else keys)
    request = MlaAttentionRequest(
        phase="decode" if phase == "decode" else "prefill", num_heads=heads, kv_lora_rank=rank,
        rope_dim=rope, block_size=_PAGE, dtype=shape.dtype,
        kv_format="bf16" if kv_format == "bf16" else "fp8_656", top_k=keys if is_sparse else 0,
        tokens=TokenRange(1, shape.rows),
    )  # fmt: skip
    table = page_table(len(queries), context, _PAGE, device)
    q = torch.randn(shape.rows, heads * (rank + rope), device=device).to(torch.bfloat16)
    lists = lists_of(shape.rows, context, keys, device) if is_sparse else None
    cache = cache_of(kv_format, table, rank + rope, _PAGE)
    args = (q, cache, metadata(table, context, queries), lists)
    return Call(request=request, static={"scale": (rank + rope) ** -0.5}, args=args)


def _dtypes(target: Target) -> Sequence[str]:
    return ("bfloat16",)


def _tunable(kernel: TritonKernel, forms: tuple[str, ...]) -> TunableKernel:
    return TunableKernel(
        kernel=kernel.name, module=_MODULE, size_names=_SIZES, forms=forms, dtypes=_dtypes,
        default=default_of(kernel), space=_space,
        footprint=_footprint(kernel.name == "mla_attention.wide"), call=_call,
    )  # fmt: skip


_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
TUNABLE = (
    _tunable(_BY_NAME["mla_attention.paged"], (*_FORMS, *_MANY_HEADS)),
    _tunable(_BY_NAME["mla_attention.wide"], _FORMS),
)
