"""What may be chosen for the Triton attention over listed blocks, and what a choice costs. Free of
torch and triton.

A class is of lists that are full, over sequences of `KEYS` keys or of as many as its queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest, BlockSparseMetadata
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.block_sparse_attention.triton_variants import (
    HEAD_DIMS,
    KERNELS,
    LEAST_TILE,
    largest_factor,
    power_of_two,
    tiles,
)
from hal_kernels.tuning.key_tiles import (
    KEYS,
    chosen,
    lists_of,
    metadata,
    page_table,
    steps_of_keys,
)
from hal_kernels.tuning.performance_model import ONE_AHEAD, Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

_SIZES = ("group", "head_dim", "key_block", "kv_heads", "places", "query_block")
_NAMES = ("BLOCK_N", "BLOCK_Q", "BLOCK_G", "num_warps", "num_stages")
_PAGE = 64
_FORMS = tuple(f"d{size}-{form}" for size in HEAD_DIMS for form in ("block", "token"))


def chosen_tiles(options: Mapping[str, Any]) -> dict[str, int]:
    """The constants of a launch that tuning chooses."""
    return chosen(options, _NAMES)


def shape_of(
    request: BlockSparseAttentionRequest, device: DeviceSpec
) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range; None for what the kernel does
    not serve."""
    width = max(request.head_dim, request.v_head_dim)
    size = next((size for size in HEAD_DIMS if width <= size), 0)
    if not size:
        return None
    sizes = {
        "group": request.num_heads // request.num_kv_heads,
        "head_dim": width,
        "key_block": request.key_block,
        "kv_heads": request.num_kv_heads,
        "places": request.num_selected,
        "query_block": request.query_block,
    }
    form = f"d{size}-{'token' if request.query_block == 1 else 'block'}"
    return KERNELS[0].name, shape_class(request.dtype, form, request.tokens.high, sizes)


def _is_token(shape: ShapeClass) -> bool:
    return shape.form.endswith("token")


def _query_block(shape: ShapeClass) -> int:
    return 1 if _is_token(shape) else shape.size("query_block")


def _padded(shape: ShapeClass) -> int:
    return int(shape.form.split("-")[0][1:])


def _default(target: Target, shape: ShapeClass) -> Default:
    options = tiles(
        target,
        _padded(shape),
        shape.size("group"),
        query_block=_query_block(shape),
        key_block=shape.size("key_block"),
    )
    return Default(config=shape.form, configuration=chosen_tiles(options))


def _space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    heads = power_of_two(shape.size("group"))
    most_queries = largest_factor(_query_block(shape))  # a tile lies in one block of queries
    queries = sorted({min(most_queries, max(1, rows // heads)) for rows in (32, 64, 128)})
    most = largest_factor(shape.size("key_block"))  # and a step in one of keys
    return [
        {**steps, "BLOCK_Q": count, "BLOCK_G": max(heads, LEAST_TILE // count)}
        for steps in steps_of_keys(target, [n for n in (16, 32, 64) if n <= most])
        for count in queries
    ]


def _footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    n, count = configuration["BLOCK_N"], configuration["BLOCK_Q"]
    heads, kv_heads = shape.size("group") * shape.size("kv_heads"), shape.size("kv_heads")
    wide, padded = shape.size("head_dim"), _padded(shape)
    keys = shape.size("places") * shape.size("key_block")
    programs = -(-shape.rows // count) * kv_heads
    steps = -(-keys // n)
    rows = count * configuration["BLOCK_G"]
    lists = -(-shape.rows // _query_block(shape))
    context = max(KEYS, shape.rows)
    return Footprint(
        programs=programs,
        steps=steps,
        step_bytes=4 * n * padded,
        ahead=ONE_AHEAD,
        flops=4.0 * programs * steps * rows * n * padded,
        needed_flops=4.0 * shape.rows * heads * keys * wide,
        # A row that several lists name comes from the cache; more than the context there is not.
        memory_bytes=4.0 * min(context, lists * keys) * kv_heads * wide
        + 4.0 * shape.rows * heads * wide
        + 4.0 * lists * kv_heads * shape.size("places"),
    )


def _call(shape: ShapeClass, device: Any) -> Call:
    import torch

    from hal.ops.formats import torch_dtype

    group, kv_heads = shape.size("group"), shape.size("kv_heads")
    width, places, key_block = (shape.size(n) for n in ("head_dim", "places", "key_block"))
    dtype, query_block = torch_dtype(shape.dtype), _query_block(shape)
    request = BlockSparseAttentionRequest(
        phase="prefill", num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=width,
        v_head_dim=width, query_block=query_block, key_block=key_block, num_selected=places,
        block_size=_PAGE, dtype=shape.dtype, tokens=TokenRange(1, shape.rows),
    )  # fmt: skip
    context = max(KEYS, shape.rows, places * key_block)
    table = page_table(1, context, _PAGE, device)
    caches = [
        torch.randn(table.numel(), _PAGE, kv_heads, width, device=device).to(dtype)
        for _ in range(2)
    ]
    lists = -(-shape.rows // query_block)
    blocks = lists_of(lists * kv_heads, -(-context // key_block), places, device)
    plain = metadata(table, context, [shape.rows])
    meta = BlockSparseMetadata(
        query_start_loc=plain.query_start_loc, seq_lens=plain.seq_lens, block_table=table,
        list_start_loc=torch.tensor([0, lists], dtype=torch.int32, device=device),
        max_query_len=shape.rows, max_seq_len=context,
    )  # fmt: skip
    q = torch.randn(shape.rows, group * kv_heads * width, device=device).to(dtype)
    args = (q, *caches, blocks.view(lists, kv_heads, places), meta)
    return Call(request=request, static={"scale": width**-0.5}, args=args)


def _dtypes(target: Target) -> Sequence[str]:
    return ("bfloat16", "float16")


TUNABLE = (
    TunableKernel(
        kernel=KERNELS[0].name, module="hal_kernels.block_sparse_attention.triton",
        size_names=_SIZES, forms=_FORMS, dtypes=_dtypes, default=_default,
        space=_space, footprint=_footprint, call=_call,
    ),
)  # fmt: skip
