"""What may be chosen for the Triton attention over window and entries, and what a choice costs.
Free of torch and triton.

A class is measured and modelled with as many entries as a list has, or as `KEYS` tokens make: for a
prompt its queries are the last of one sequence.

A decode that one program sees whole is launched in another form of the kernel than one that is
split, so it is a class of another form: what was tried with the one says nothing of the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.compressed_attention import CompressedAttentionMetadata, CompressedAttentionRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TritonKernel
from hal_kernels.compressed_attention.triton_variants import (
    HEADS_TOGETHER,
    KERNELS,
    SPLIT_ENTRIES,
    V41_MAIN,
    is_whole,
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
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_MODULE = "hal_kernels.compressed_attention.triton"
_SIZES = ("entries", "head_dim", "heads", "ratio", "window")
_PAGE = 64
_ALONE = "window"  # without entries
_WHOLE = "whole"  # a decode that one program sees whole
_ENDINGS = (
    *(f"{form}-{phase}" for form in ("dense", "sparse") for phase in ("decode", "prefill")),
    f"sparse-{_WHOLE}",
    *(f"{_ALONE}-{phase}" for phase in ("prefill", _WHOLE)),
)
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
_PAGED, _V41 = "compressed_attention.paged", "compressed_attention.v41"


def shape_of(
    request: CompressedAttentionRequest, device: DeviceSpec
) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range; None for float16, whose tiles
    are not to be chosen. The window alone has a class without entries: one of one token each stands
    for none, as a class has no size of 0."""
    if request.dtype != "bfloat16":
        return None
    is_alone = not request.compress_ratio
    main = request.window_format if is_alone else request.main_format
    form = _ALONE if is_alone else "sparse" if request.top_k else "dense"
    ratio = request.compress_ratio or 1
    sizes = {
        "entries": 1 if is_alone else request.top_k or max(1, KEYS // ratio),
        "head_dim": request.head_dim,
        "heads": request.num_heads,
        "ratio": ratio,
        "window": request.window,
    }
    kernel = _V41 if request.window_format == "v41_528" else _PAGED
    name = f"{main}-{form}-{_phase(request)}"
    shape = shape_class(request.dtype, name, request.tokens.high, sizes)
    return kernel, shape


def _phase(request: CompressedAttentionRequest) -> str:
    if request.phase != "decode":
        return "prefill"
    one_program = is_whole(
        is_decode=True, top_k=request.top_k, compress_ratio=request.compress_ratio
    )
    return _WHOLE if one_program else "decode"


def _parts(shape: ShapeClass) -> tuple[str, str, str]:
    """(format of the entries, or of the window alone, "dense", "sparse" or "window", "decode",
    "whole" or "prefill")."""
    main, form, phase = shape.form.split("-")
    return main, form, phase


def _is_whole(shape: ShapeClass) -> bool:
    return _parts(shape)[2] != "decode"


def _why_never(target: Target, shape: ShapeClass, units: int | None) -> str:
    """A class that `shape_of` never makes: split of one split's entries, or whole of more."""
    _, form, phase = _parts(shape)
    entries = shape.size("entries")
    if form != "sparse" or phase == "prefill":
        return ""
    if is_whole(is_decode=True, top_k=entries, compress_ratio=1) == (phase == _WHOLE):
        return ""
    number = "at most" if phase == _WHOLE else "more than"
    return f"required {number} {SPLIT_ENTRIES} entries of a {shape.form}, found {entries}"


def _default(kernel: TritonKernel) -> Callable[[Target, ShapeClass], Default]:
    """The window alone is launched as a part of the form without lists, and what one program sees
    whole as a prompt is."""
    of_form = default_of(kernel)

    def default(target: Target, shape: ShapeClass) -> Default:
        form = shape.form.replace(f"-{_ALONE}-", "-dense-")
        form = form.replace(f"-{_WHOLE}", "-prefill")
        return of_form(target, dataclasses.replace(shape, form=form))

    return default


def _window_format(main: str) -> str:
    return "v41_528" if main in V41_MAIN else main


def _space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    return steps_of_keys(target, (16, 32, 64))


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    n, (main, form, phase) = configuration["BLOCK_N"], _parts(shape)
    entries, window = 0 if form == _ALONE else shape.size("entries"), shape.size("window")
    heads, dim, is_decode = shape.size("heads"), shape.size("head_dim"), phase != "prefill"
    splits = 1 if _is_whole(shape) else max(1, -(-entries // SPLIT_ENTRIES))
    programs = shape.rows * splits * -(-heads // HEADS_TOGETHER)
    of_entries = -(-(min(entries, SPLIT_ENTRIES) if is_decode else entries) // n)
    steps = -(-window // n) + of_entries  # of the first split, which has the window as well
    rows = [KV_FORMATS[name].row_bytes(dim) for name in (_window_format(main), main)]
    per_pair = 4.0 * dim
    sequences = shape.rows if is_decode else 1
    read = [
        float(sequences * count * row) for count, row in zip((window, entries), rows, strict=True)
    ]
    parts = 0.0 if _is_whole(shape) else 4.0 * shape.rows * heads * splits * dim
    return Footprint(
        programs=programs,
        steps=steps,
        step_bytes=n * max(rows),
        ahead=ONE_AHEAD,
        flops=per_pair * programs * steps * HEADS_TOGETHER * n,
        needed_flops=per_pair * shape.rows * heads * (window + entries),
        memory_bytes=sum(read) + 4.0 * shape.rows * heads * dim + parts,
    )


def _call(shape: ShapeClass, device: Any) -> Call:
    import torch

    main, form, phase = _parts(shape)
    is_sparse, is_alone = form == "sparse", form == _ALONE
    main_format: Any = main
    window_format: Any = _window_format(main)
    heads, dim, ratio = (shape.size(name) for name in ("heads", "head_dim", "ratio"))
    entries, window = shape.size("entries"), shape.size("window")
    kind: Any = "prefill" if phase == "prefill" else "decode"
    queries, context = batch_of(kind, shape.rows, max(entries * ratio, window))
    request = CompressedAttentionRequest(
        phase=kind, num_heads=heads, head_dim=dim,
        rope_dim=min(64, dim), window=window, top_k=entries if is_sparse else 0,
        compress_ratio=0 if is_alone else ratio, has_sinks=True, window_format=window_format,
        main_format=main_format, block_size=_PAGE, dtype=shape.dtype,
        tokens=TokenRange(1, shape.rows),
    )  # fmt: skip
    tables = [page_table(len(queries), n, _PAGE, device) for n in (context, context // ratio)]
    caches = [
        cache_of(name, table, dim, _PAGE)
        for name, table in zip((window_format, main_format), tables, strict=True)
    ]
    plain = metadata(tables[0], context, queries)
    meta = CompressedAttentionMetadata(
        query_start_loc=plain.query_start_loc, seq_lens=plain.seq_lens,
        window_block_table=tables[0], main_block_table=None if is_alone else tables[1],
        max_query_len=plain.max_query_len, max_seq_len=plain.max_seq_len,
    )  # fmt: skip
    q = torch.randn(shape.rows, heads * dim, device=device).to(torch.bfloat16)
    lists = lists_of(shape.rows, context // ratio, entries, device) if is_sparse else None
    static = {"scale": dim**-0.5, "sinks": torch.randn(heads, device=device)}
    main_cache = None if is_alone else caches[1]
    return Call(request=request, static=static, args=(q, caches[0], main_cache, meta, lists))


def _dtypes(target: Target) -> Sequence[str]:
    return ("bfloat16",)


def _tunable(kernel: TritonKernel, formats: Sequence[str]) -> TunableKernel:
    forms = tuple(
        f"{name}-{ending}"
        for name in formats
        for ending in _ENDINGS
        if _window_format(name) == name or not ending.startswith(_ALONE)
    )
    return TunableKernel(
        kernel=kernel.name, module=_MODULE, size_names=_SIZES, forms=forms, dtypes=_dtypes,
        default=_default(kernel), space=_space, footprint=_footprint, call=_call,
        why_never=_why_never,
    )  # fmt: skip


TUNABLE = (
    _tunable(_BY_NAME[_PAGED], ("bf16", "v4_584")),
    _tunable(_BY_NAME[_V41], V41_MAIN),
)
