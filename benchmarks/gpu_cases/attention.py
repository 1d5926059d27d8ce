"""Cases of dense attention: prompts, decodes, with the output projection, over listed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional

from gpu_cases.case import BF16, Bench, Case, CaseMaker, reference_case
from gpu_cases.paging import PAGE, lists_of, metadata, page_table, paged_heads, starts_of
from hal.ops.attention import AttentionRequest
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest, BlockSparseMetadata
from hal.ops.formats import torch_dtype
from hal_kernels.attention import triton as attention
from hal_kernels.attention_projection import triton as attention_projection
from hal_kernels.block_sparse_attention import triton as block_sparse

_TOLERANCE = 2.0**-6
_MERGED = ("attention.decode", "attention_projection.merge", "attention_projection.sum")


def makers() -> Iterator[CaseMaker]:
    yield CaseMaker(
        name="attention prefill",
        kernels=("attention.prefill",),
        make=lambda b: attention_case(b, "prefill"),
        share=2.0,
    )
    yield CaseMaker(
        name="attention decode",
        kernels=("attention.decode", "attention.merge"),
        make=lambda b: attention_case(b, "decode"),
    )
    for phase, kernels in (
        ("prefill", ("attention.prefill",)),
        ("decode", ("attention.decode", "attention.merge")),
    ):
        yield CaseMaker(
            name=f"attention {phase} with sinks and a soft cap",
            kernels=kernels,
            make=lambda b, p=phase: attention_case(b, p, is_plain=False),
        )
        yield CaseMaker(
            name=f"attention {phase} over caches of FP8",
            kernels=kernels,
            make=lambda b, p=phase: attention_case(b, p, kv_dtype="float8_e4m3fn"),
        )
    yield CaseMaker(
        name="attention and projection in one pass",
        kernels=("attention_projection.one_pass", "attention_projection.sum"),
        make=lambda b: projection_case(b, sequences=1, context=b.size(256, 20)),
    )
    yield CaseMaker(
        name="attention and projection by splits of the keys",
        kernels=_MERGED,
        make=lambda b: projection_case(b, sequences=b.size(16, 3), context=b.size(2048, 40)),
    )
    yield CaseMaker(
        name="attention over listed blocks",
        kernels=("block_sparse_attention.paged",),
        make=block_sparse_case,
    )


def _heads(bench: Bench) -> dict[str, Any]:
    dim = bench.size(128, 32)
    return {
        "num_heads": bench.size(32, 4), "num_kv_heads": bench.size(8, 2), "head_dim": dim,
        "v_head_dim": dim, "block_size": PAGE, "dtype": "bfloat16",
    }  # fmt: skip


def _gathered(cache: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """Keys as a library without pages takes them: [sequences, heads, context, dim]."""
    return cache[table.long()].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()


def attention_case(
    bench: Bench, phase: Any, *, is_plain: bool = True, kv_dtype: str = "bfloat16"
) -> Case:
    """Beside the library's attention on keys that were gathered before: it is not charged for what
    pages cost. If it is not plain, it has sinks and a soft cap, which the library has not, as it
    has no caches of FP8."""
    fields, is_decode = _heads(bench), phase == "decode"
    heads, kv_heads, dim = (fields[n] for n in ("num_heads", "num_kv_heads", "head_dim"))
    sequences, context = bench.size(16 if is_decode else 2, 2), bench.size(2048, 40)
    new = 1 if is_decode else context
    table = page_table(bench, sequences, context)
    k, v = (paged_heads(bench, table, kv_heads, dim).to(torch_dtype(kv_dtype)) for _ in range(2))
    q, is_fp8 = bench.bf16(sequences * new, heads * dim), kv_dtype != "bfloat16"
    request = AttentionRequest(
        phase=phase, kv_dtype=kv_dtype, context_tokens=context, has_sinks=not is_plain,
        softcap=0.0 if is_plain else 2.0, has_kv_scales=is_fp8, **fields,
    )  # fmt: skip
    static = {"scale": dim**-0.5, "sinks": None if is_plain else bench.randn(heads)}
    if is_fp8:
        static |= {"k_scale": 0.9, "v_scale": 1.3}
    rows = q.view(sequences, new, heads, dim).transpose(1, 2)
    keys, values = (_gathered(cache, table, context) for cache in (k, v))
    has_library = is_plain and not is_fp8

    def theirs() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            rows, keys, values, is_causal=not is_decode, enable_gqa=True
        )

    return reference_case(
        f"attention {phase} {sequences}x{new} of {context}"
        + ("" if is_plain else ", capped")
        + (", FP8" if is_fp8 else ""),
        request,
        attention.bind,
        bench,
        (q, k, v, metadata(bench, table, context, new, sequences)),
        tokens=q.shape[0],
        tolerance=_TOLERANCE,
        static=static,
        theirs=theirs if has_library else None,
        library="SDPA on gathered keys",
    )


def projection_case(bench: Bench, *, sequences: int, context: int) -> Case:
    """Beside the library's attention and product, one after the other."""
    fields, hidden = _heads(bench), bench.size(4096, 96)
    heads, kv_heads, dim = (fields[n] for n in ("num_heads", "num_kv_heads", "head_dim"))
    table = page_table(bench, sequences, context)
    k, v = (paged_heads(bench, table, kv_heads, dim) for _ in range(2))
    q, residual = bench.bf16(sequences, heads * dim), bench.bf16(sequences, hidden)
    weight = (bench.randn(hidden, heads * dim) / (heads * dim) ** 0.5).to(BF16)
    request = AttentionProjectionRequest(
        phase="decode", hidden_size=hidden, kv_dtype="bfloat16", has_residual=True,
        context_tokens=context, **fields,
    )  # fmt: skip
    rows = q.view(sequences, 1, heads, dim).transpose(1, 2)
    keys, values = (_gathered(cache, table, context) for cache in (k, v))

    def theirs() -> torch.Tensor:
        y = functional.scaled_dot_product_attention(rows, keys, values, enable_gqa=True)
        return functional.linear(y.reshape(sequences, -1), weight) + residual

    return reference_case(
        f"attention and projection {sequences} of {context} to {hidden}",
        request,
        attention_projection.bind,
        bench,
        (q, k, v, metadata(bench, table, context, 1, sequences), residual),
        tokens=sequences,
        tolerance=_TOLERANCE,
        static={"scale": dim**-0.5, "weight": weight},
        theirs=theirs,
        library="SDPA on gathered keys, cuBLAS",
    )


def block_sparse_case(bench: Bench) -> Case:
    fields = _heads(bench)
    heads, kv_heads, dim = (fields[n] for n in ("num_heads", "num_kv_heads", "head_dim"))
    sequences, context, new = 2, bench.size(4096, 96), bench.size(1024, 20)
    query_block, key_block, places = bench.size(64, 8), bench.size(64, 16), bench.size(16, 3)
    table = page_table(bench, sequences, context)
    k, v = (paged_heads(bench, table, kv_heads, dim) for _ in range(2))
    q = bench.bf16(sequences * new, heads * dim)
    lists = -(-new // query_block)
    blocks = lists_of(bench, sequences * lists * kv_heads, -(-context // key_block), places)
    request = BlockSparseAttentionRequest(
        phase="prefill", query_block=query_block, key_block=key_block, num_selected=places,
        context_tokens=context, **fields,
    )  # fmt: skip
    meta = metadata(bench, table, context, new, sequences)
    return reference_case(
        f"attention over listed blocks {sequences}x{new} of {context}, {places} of {key_block}",
        request,
        block_sparse.bind,
        bench,
        (
            q, k, v, blocks.view(-1, kv_heads, places),
            BlockSparseMetadata(
                query_start_loc=meta.query_start_loc, seq_lens=meta.seq_lens, block_table=table,
                list_start_loc=starts_of(bench, [lists] * sequences), max_query_len=new,
                max_seq_len=context,
            ),
        ),
        tokens=q.shape[0],
        tolerance=_TOLERANCE,
        static={"scale": dim**-0.5},
    )  # fmt: skip
