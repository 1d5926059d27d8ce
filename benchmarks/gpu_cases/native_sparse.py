"""Cases of native sparse attention, and of the entries that it reads.

The exact result of the attention is of the blocks that the kernels selected: which of two blocks of
almost the same importance is selected is left to rounding. So the choice is judged by what it is
worth, and the result by the exact branches over what was selected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import Bench, Case, CaseMaker, reference_case, widened
from gpu_cases.judging import error_of
from gpu_cases.paging import PAGE, metadata, page_table, paged_heads, starts_of
from hal.ops import attention, block_sparse_attention, nsa_attention
from hal.ops.attention import AttentionRequest
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest, BlockSparseMetadata
from hal.ops.nsa_attention import NsaAttentionRequest, NsaCaches, NsaMetadata
from hal.ops.nsa_compress import NsaCompressRequest, NsaCompressWeights
from hal_kernels.nsa_attention import triton as nsa
from hal_kernels.nsa_compress import triton as nsa_compress

_CHOICE = ("nsa_attention.entries", "nsa_attention.select", "nsa_attention.lists")
_LEAST_WORTH = 1.0 - 1e-3  # of the importance of the best blocks: bfloat16 keys, float32 sums
_CLOSED = float("-inf")


def makers() -> Iterator[CaseMaker]:
    for phase, more in (("prefill", ()), ("decode", ("nsa_attention.merge",))):
        yield CaseMaker(
            name=f"native sparse attention, {phase}",
            kernels=(*_CHOICE, "nsa_attention.branch", *more),
            make=lambda b, p=phase: nsa_case(b, p),
            share=2.0,
        )
        yield CaseMaker(
            name=f"compression of blocks for native sparse attention, {phase}",
            kernels=("nsa_compress.hidden", "nsa_compress.project"),
            make=lambda b, p=phase: compress_case(b, p),
        )


def compress_case(bench: Bench, phase: Any) -> Case:
    """Keys of the paper's size. A prompt beside a piece of one; or decodes, of which one in 16
    completes an entry."""
    request = NsaCompressRequest(
        phase=phase, num_kv_heads=bench.size(4, 2), head_dim=bench.size(192, 24),
        hidden_size=bench.size(512, 40), block_size=PAGE, dtype="bfloat16",
        compress_length=bench.size(32, 4), compress_stride=bench.size(16, 2),
    )  # fmt: skip
    if phase == "decode":
        batch = [(bench.size(1000, 9) + i, 1) for i in range(bench.size(256, 4))]
    else:
        batch = [(bench.size(8192, 21), bench.size(8192, 21)), (bench.size(500, 9), 3)]
    most = max(length for length, _ in batch)
    table = page_table(bench, len(batch), most)
    entry_table = page_table(bench, len(batch), request.entries_at(most))
    meta = NsaMetadata(
        query_start_loc=starts_of(bench, [new for _, new in batch]),
        seq_lens=bench.on(torch.tensor([length for length, _ in batch], dtype=torch.int32)),
        block_table=table, entry_block_table=entry_table,
        max_query_len=max(new for _, new in batch), max_seq_len=most,
    )  # fmt: skip
    heads, dim, hidden = request.num_kv_heads, request.head_dim, request.hidden_size
    width = request.compress_length * dim
    weights = NsaCompressWeights(
        w1=(bench.randn(hidden, width) * width**-0.5).bfloat16(),
        w2=(bench.randn(dim, hidden) * hidden**-0.5).bfloat16(),
        position=bench.bf16(request.compress_length, dim),
        b1=bench.bf16(hidden), b2=bench.bf16(dim),
    )  # fmt: skip
    tokens = sum(new for _, new in batch)
    return reference_case(
        f"compression of blocks, {phase}, {tokens} tokens of {heads} heads of {dim}",
        request,
        nsa_compress.bind,
        bench,
        (paged_heads(bench, table, heads, dim), paged_heads(bench, entry_table, heads, dim), meta),
        tokens=tokens,
        tolerance=2.0**-7,
        written=(1,),
        static={"weights": weights},
    )


def nsa_case(bench: Bench, phase: Any) -> Case:
    is_decode, dim = phase == "decode", bench.size(128, 32)
    request = NsaAttentionRequest(
        phase=phase, num_heads=bench.size(32, 4), num_kv_heads=bench.size(4, 2), head_dim=dim,
        v_head_dim=dim, block_size=PAGE, dtype="bfloat16", compress_length=32, compress_stride=16,
        select_size=64, num_selected=bench.size(16, 3), num_initial=1,
        num_local=bench.size(2, 1), window=bench.size(512, 40), publishes_blocks=True,
        context_tokens=bench.size(4096, 400),
    )  # fmt: skip
    sequences, context = bench.size(8 if is_decode else 1, 2), request.context_tokens
    new = 1 if is_decode else bench.size(256, 2)
    scale = dim**-0.5
    q, gates, caches, meta = _inputs(bench, request, sequences, context, new)
    kernel = nsa.bind(request, bench.spec, scale=scale)

    def judge(found: Any, _: Any) -> float:
        out, blocks = found
        exact = _exact(request, scale, (q, gates, caches, meta), blocks)
        if _worth(request, scale, (q, gates, caches, meta), blocks) < _LEAST_WORTH:
            return float("inf")
        return error_of(out, exact)

    family = nsa_attention.FAMILY
    return Case(
        name=f"native sparse attention {phase} {sequences}x{new} of {context}",
        ours=lambda: kernel(q, gates, caches, meta),
        exact=lambda: (),  # it depends on what was selected, which is judged with it
        tolerance=2.0**-6,
        judge=judge,
        flops=family.flops(request, q.shape[0]),
        bytes_moved=family.bytes_moved(request, q.shape[0]),
    )


def _inputs(
    bench: Bench, request: NsaAttentionRequest, sequences: int, context: int, new: int
) -> tuple[torch.Tensor, torch.Tensor, NsaCaches, NsaMetadata]:
    entries = request.entries_at(context)
    table, entry_table = (page_table(bench, sequences, rows) for rows in (context, entries))
    kv_heads, dim = request.num_kv_heads, request.head_dim
    caches = [
        paged_heads(bench, pages, kv_heads, dim)
        for pages in (entry_table, entry_table, table, table, table, table)
    ]
    plain = metadata(bench, table, context, new, sequences)
    meta = NsaMetadata(
        query_start_loc=plain.query_start_loc, seq_lens=plain.seq_lens, block_table=table,
        entry_block_table=entry_table, max_query_len=new, max_seq_len=context,
    )  # fmt: skip
    tokens = sequences * new
    q = bench.bf16(tokens, request.num_heads * dim)
    return q, bench.bf16(tokens, request.num_heads, 3), NsaCaches(*caches), meta


def _worth(request: NsaAttentionRequest, scale: float, inputs: Any, blocks: torch.Tensor) -> float:
    """The importance of what was selected, of that of the best: the least of any query. Infinite
    importances are those of blocks that every query selects; infinitely little is one twice."""
    q, gates, caches, meta = widened(inputs)
    everything = -(-meta.max_seq_len // request.select_size)
    whole = dataclasses.replace(request, num_selected=everything)
    captured: list[torch.Tensor] = []
    plain = nsa_attention.block_scores

    def capture(*args: Any) -> torch.Tensor:
        captured.append(plain(*args))
        return captured[-1]

    nsa_attention.block_scores = capture
    try:
        _, best = nsa_attention.reference(whole, scale=scale)(q, gates, caches, meta)
    finally:
        nsa_attention.block_scores = plain
    scores = torch.cat(captured)
    best = best[..., : blocks.shape[-1]]

    def total(lists: torch.Tensor) -> torch.Tensor:
        held = scores.gather(-1, lists.clamp(min=0).long())
        return held.masked_fill(lists < 0, 0.0).sum(dim=-1)

    ordered = blocks.sort(dim=-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        return 0.0
    return float((total(blocks) / total(best).clamp(min=1e-12)).min())


def _exact(
    request: NsaAttentionRequest, scale: float, inputs: Any, blocks: torch.Tensor
) -> torch.Tensor:
    """The three branches, by the references of three ops, under their gates."""
    q, gates, caches, meta = widened(inputs)
    closed = gates.clone()
    closed[..., 1:] = _CLOSED
    compressed, _ = nsa_attention.reference(request, scale=scale)(q, closed, caches, meta)
    shape: dict[str, Any] = {
        "num_heads": request.num_heads, "num_kv_heads": request.num_kv_heads,
        "head_dim": request.head_dim, "v_head_dim": request.v_head_dim,
        "block_size": request.block_size, "dtype": "float64",
    }  # fmt: skip
    listed = BlockSparseAttentionRequest(
        **shape, query_block=1, key_block=request.select_size, num_selected=request.num_selected
    )
    own = {
        "query_start_loc": meta.query_start_loc, "seq_lens": meta.seq_lens,
        "block_table": meta.block_table, "max_query_len": meta.max_query_len,
        "max_seq_len": meta.max_seq_len,
    }  # fmt: skip
    selected = block_sparse_attention.reference(listed, scale=scale)(
        q, caches.selected_keys, caches.selected_values, blocks,
        BlockSparseMetadata(list_start_loc=meta.query_start_loc, **own),
    )  # fmt: skip
    near = AttentionRequest(**shape, kv_dtype="float64", window=request.window)
    sliding = attention.reference(near, scale=scale)(
        q, caches.window_keys, caches.window_values, attention.AttentionMetadata(**own)
    )
    weights = gates.sigmoid().repeat_interleave(request.v_head_dim, dim=1)
    return compressed + selected * weights[..., 1] + sliding * weights[..., 2]
