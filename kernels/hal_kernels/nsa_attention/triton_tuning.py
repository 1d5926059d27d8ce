"""What may be chosen for the Triton kernels of native sparse attention that attend, and what a
choice costs. Free of torch and triton.

A request launches several: its classes are one for each. Tiles of the choice of blocks follow from
the sizes of entries and blocks, and are not to be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.nsa_attention import NsaAttentionRequest, NsaCaches, NsaMetadata
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.nsa_attention.triton_variants import (
    HEAD_DIMS,
    SPLIT_ENTRIES,
    SPLIT_KEYS,
    entry_tiles,
    padded,
    row_tiles,
)
from hal_kernels.tuning.key_tiles import (
    KEYS,
    batch_of,
    chosen,
    metadata,
    page_table,
    steps_of_keys,
)
from hal_kernels.tuning.performance_model import ONE_AHEAD, Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_MODULE = "hal_kernels.nsa_attention.triton"
ENTRIES, BRANCH = "nsa_attention.entries", "nsa_attention.branch"
_SIZES = ("group", "head_dim", "kv_heads", "places", "select", "stride", "window")
_NAMES = ("BLOCK_N", "BLOCK_Q", "BLOCK_G", "num_warps", "num_stages")
_ENTRY_FORMS = tuple(f"d{size}-{form}" for size in HEAD_DIMS for form in ("whole", "split"))
_BRANCH_FORMS = tuple(
    f"d{size}-{form}" for size in HEAD_DIMS for form in ("selected", "window", "split")
)
_PAGE = 64


def chosen_tiles(options: Mapping[str, Any]) -> dict[str, int]:
    """The constants of a launch that tuning chooses."""
    return chosen(options, _NAMES)


def shapes_of(
    request: NsaAttentionRequest, device: DeviceSpec
) -> tuple[tuple[str, ShapeClass], ...]:
    """Kernels and classes of a request at the most tokens of its range; none for what the kernels
    do not serve."""
    width = max(request.head_dim, request.v_head_dim)
    if width > HEAD_DIMS[-1]:
        return ()
    sizes = {
        "group": request.num_heads // request.num_kv_heads,
        "head_dim": width,
        "kv_heads": request.num_kv_heads,
        "places": request.num_selected,
        "select": request.select_size,
        "stride": request.compress_stride,
        "window": request.window,
    }
    is_decode = request.phase == "decode"
    forms = [(ENTRIES, "split" if is_decode else "whole")]
    forms += [(BRANCH, form) for form in (("split",) if is_decode else ("selected", "window"))]
    size, rows = padded(width, HEAD_DIMS), request.tokens.high
    return tuple(
        (kernel, shape_class(request.dtype, f"d{size}-{form}", rows, sizes))
        for kernel, form in forms
    )


def _parts(shape: ShapeClass) -> tuple[int, str]:
    """(padded head size, form)."""
    size, form = shape.form.split("-")
    return int(size[1:]), form


def _entry_default(target: Target, shape: ShapeClass) -> Default:
    size, form = _parts(shape)
    options = entry_tiles(target, size, shape.size("group"), is_query=form == "split")
    return Default(config=shape.form, configuration=chosen_tiles(options))


def _branch_default(target: Target, shape: ShapeClass) -> Default:
    size, form = _parts(shape)
    options = row_tiles(
        target, size, shape.size("group"), is_query=form != "window",
        key_block=shape.size("select"),
    )  # fmt: skip
    return Default(config=shape.form, configuration=chosen_tiles(options))


def _entry_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    return steps_of_keys(target, (16, 32, 64))


def _branch_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    most = shape.size("select") & -shape.size("select")  # a step lies in one block of keys
    return steps_of_keys(target, [n for n in (16, 32, 64) if n <= most])


def _entry_footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    _, form = _parts(shape)
    entries = max(1, KEYS // shape.size("stride"))
    most = SPLIT_ENTRIES if form == "split" else entries
    return _footprint(shape, configuration, keys=entries, most=most, is_shared=form == "whole")


def _branch_footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    """Of a decode the selected branch, which the window's launch is like."""
    _, form = _parts(shape)
    keys = shape.size("places") * shape.size("select")
    if form == "window":
        keys = shape.size("window")
    most = SPLIT_KEYS if form == "split" else keys
    return _footprint(shape, configuration, keys=keys, most=most, is_shared=form == "window")


def _footprint(
    shape: ShapeClass, configuration: Mapping[str, int], *, keys: int, most: int, is_shared: bool
) -> Footprint:
    """keys: that a query sees. most: of one program. is_shared: whether the queries of a prompt
    read the same rows, so that the memory delivers each once."""
    n, count = configuration["BLOCK_N"], configuration["BLOCK_Q"]
    heads, kv_heads = shape.size("group") * shape.size("kv_heads"), shape.size("kv_heads")
    size, _ = _parts(shape)
    wide = shape.size("head_dim")
    programs = -(-shape.rows // count) * kv_heads * -(-keys // most)
    steps = -(-min(keys, most) // n)
    read = min(shape.rows * keys, max(KEYS, shape.rows)) if is_shared else shape.rows * keys
    return Footprint(
        programs=programs,
        steps=steps,
        step_bytes=4 * n * size,
        ahead=ONE_AHEAD,
        flops=4.0 * programs * steps * count * configuration["BLOCK_G"] * n * size,
        needed_flops=4.0 * shape.rows * heads * keys * wide,
        memory_bytes=4.0 * read * kv_heads * wide + 4.0 * shape.rows * heads * wide,
    )


def _call(shape: ShapeClass, device: Any) -> Call:
    import torch

    from hal.ops.formats import torch_dtype

    _, form = _parts(shape)
    phase = "decode" if form == "split" else "prefill"
    group, kv_heads, width = (shape.size(n) for n in ("group", "kv_heads", "head_dim"))
    stride, dtype = shape.size("stride"), torch_dtype(shape.dtype)
    request = NsaAttentionRequest(
        phase="decode" if form == "split" else "prefill", num_heads=group * kv_heads,
        num_kv_heads=kv_heads, head_dim=width, v_head_dim=width, block_size=_PAGE,
        dtype=shape.dtype, compress_length=min(2 * stride, shape.size("select")),
        compress_stride=stride, select_size=shape.size("select"),
        num_selected=shape.size("places"), num_initial=0, num_local=0,
        window=shape.size("window"), tokens=TokenRange(1, shape.rows),
    )  # fmt: skip
    queries, context = batch_of(phase, shape.rows, KEYS)
    tables = [
        page_table(len(queries), max(1, rows), _PAGE, device)
        for rows in (context, request.entries_at(context))
    ]
    caches = [
        torch.randn(table.numel(), _PAGE, kv_heads, width, device=device).to(dtype)
        for table in (tables[1], tables[1], *[tables[0]] * 4)
    ]
    plain = metadata(tables[0], context, queries)
    meta = NsaMetadata(
        query_start_loc=plain.query_start_loc, seq_lens=plain.seq_lens, block_table=tables[0],
        entry_block_table=tables[1], max_query_len=plain.max_query_len,
        max_seq_len=plain.max_seq_len,
    )  # fmt: skip
    q = torch.randn(shape.rows, group * kv_heads * width, device=device).to(dtype)
    gates = torch.randn(shape.rows, group * kv_heads, 3, device=device).to(dtype)
    args = (q, gates, NsaCaches(*caches), meta)
    return Call(request=request, static={"scale": width**-0.5}, args=args)


def _dtypes(target: Target) -> Sequence[str]:
    return ("bfloat16", "float16")


TUNABLE = (
    TunableKernel(
        kernel=ENTRIES, module=_MODULE, size_names=_SIZES, forms=_ENTRY_FORMS, dtypes=_dtypes,
        default=_entry_default, space=_entry_space, footprint=_entry_footprint, call=_call,
    ),
    TunableKernel(
        kernel=BRANCH, module=_MODULE, size_names=_SIZES, forms=_BRANCH_FORMS, dtypes=_dtypes,
        default=_branch_default, space=_branch_space, footprint=_branch_footprint, call=_call,
    ),
)  # fmt: skip
