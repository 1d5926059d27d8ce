"""Index arithmetic of kernels over drawn sizes: pages, lists, splits, slots, places.

Few of the drawn numbers are powers of two or multiples of a tile, and sequences that have neither
keys nor queries are among them. Caches are NaN wherever nothing was written, so an address that is
off by one shows in the result. The examples are small and few: the interpreter is slow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hal_kernels.attention.triton as triton_attention
import hal_kernels.compressed_attention.triton as triton_compressed
import hal_kernels.index_logits.triton as triton_index_logits
import hal_kernels.index_top_k.triton as triton_top_k
import hal_kernels.kv_write.triton as triton_kv_write
import hal_kernels.mla_attention.triton as triton_mla
import hal_kernels.moe_dispatch.triton as triton_dispatch
from gpu_devices import gpu
from hal.ops import (
    attention,
    compressed_attention,
    index_logits,
    index_top_k,
    kv_write,
    mla_attention,
    moe_dispatch,
)
from hal.ops.kv_formats import KV_FORMATS
from hal_kernels.mla_attention.triton_kernels import split_bounds
from kernel_errors import assert_exact
from sparse_cases import index_lists, metadata, paged_rows

FEW = settings(
    max_examples=4, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
MANY = settings(FEW, max_examples=40)
SEEDS = st.integers(0, 10**6)
PAGES = st.integers(1, 24)  # rows of a page
ARCHS = st.sampled_from(["sm_90", "sm_120", "gfx942", "gfx1100"])


@st.composite
def batches(draw: st.DrawFn, phase: str, most: int = 80) -> list[tuple[int, int]]:
    """(context with the new tokens, new tokens) of a few sequences, with a query at least."""
    count = draw(st.integers(1, 3))
    if phase == "decode":
        return [(draw(st.integers(1, most)), 1) for _ in range(count)]
    lengths = [draw(st.integers(0, most)) for _ in range(count)]
    batch = [(length, draw(st.integers(0, min(length, 4)))) for length in lengths]
    return [*batch, (draw(st.integers(1, most)), 1)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@FEW
@given(data=st.data(), seed=SEEDS)
def test_paged_attention(
    attention_cases: SimpleNamespace, phase: str, data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    lengths = data.draw(batches(phase))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    request = attention.AttentionRequest(
        phase=phase,  # type: ignore[arg-type]
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=16,
        v_head_dim=16,
        block_size=data.draw(PAGES),
        window=data.draw(st.integers(0, 30)),
        dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    q, k, v, meta = attention_cases.paged(
        [length for length, _ in lengths], [new for _, new in lengths],
        (request.num_heads, kv_heads), 16, request.block_size, torch.bfloat16,
    )  # fmt: skip
    found = triton_attention.bind(request, gpu(data.draw(ARCHS)), scale=0.25)(q, k, v, meta)
    exact = attention_cases.exact(q, k, v, meta, scale=0.25, window=request.window)
    assert_exact("attention", found, exact)


@triton.jit
def _bounds_kernel(out_ptr, end, num_splits, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    first, behind = split_bounds(end, tl.program_id(0), num_splits, SPLIT, BLOCK_N)
    tl.store(out_ptr + tl.program_id(0) * 2, first)
    tl.store(out_ptr + tl.program_id(0) * 2 + 1, behind)


@MANY
@given(
    end=st.integers(0, 5000), splits=st.integers(1, 9), steps=st.integers(1, 5),
    block=st.sampled_from([16, 32, 64]),
)  # fmt: skip
def test_splits_hold_every_key_once(end: int, splits: int, steps: int, block: int) -> None:
    out = torch.full((splits, 2), -1, dtype=torch.int32)
    _bounds_kernel[(splits,)](out, end, splits, SPLIT=steps * block, BLOCK_N=block)
    held = [key for first, behind in out.tolist() for key in range(first, behind)]
    assert held == list(range(end))
    for first, behind in out.tolist():
        assert first % block == 0
        # None that another split ends in, and no shorter one but the last.
        assert behind >= end or behind - first >= steps * block


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@FEW
@given(data=st.data(), seed=SEEDS)
def test_latent_rows_by_lists_and_splits(phase: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    top_k = data.draw(st.sampled_from([0, 64, 576]))
    lengths = data.draw(batches(phase, most=90))
    if phase == "decode" and data.draw(st.booleans()):
        lengths.append((data.draw(st.integers(513, 900)), 1))  # of more than one split
    request = mla_attention.MlaAttentionRequest(
        phase=phase,  # type: ignore[arg-type]
        num_heads=data.draw(st.integers(1, 5)),
        kv_lora_rank=24,
        rope_dim=data.draw(st.sampled_from([0, 8])),
        block_size=data.draw(PAGES),
        top_k=top_k,
        dtype="bfloat16",
        kv_format="bf16",
    )
    cache, table = paged_rows("bf16", [n for n, _ in lengths], request.row_dim, request.block_size)
    meta = metadata(lengths, table)
    q = torch.randn(sum(new for _, new in lengths), request.num_heads * request.row_dim).bfloat16()
    lists = index_lists(lengths, top_k) if top_k else None
    found = triton_mla.bind(request, gpu(data.draw(ARCHS)), scale=0.2)(q, cache, meta, lists)
    exact = mla_attention.reference(request, scale=0.2)(q.double(), cache.double(), meta, lists)
    assert_exact("mla_attention", found, exact)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@FEW
@given(data=st.data(), seed=SEEDS)
def test_window_and_listed_entries(phase: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    lengths, ratio = data.draw(batches(phase)), data.draw(st.integers(1, 9))
    top_k = data.draw(st.sampled_from([0, 64]))
    request = compressed_attention.CompressedAttentionRequest(
        phase=phase,  # type: ignore[arg-type]
        num_heads=data.draw(st.integers(1, 5)),
        head_dim=32,
        rope_dim=16,
        window=data.draw(st.integers(1, 40)),
        top_k=top_k,
        compress_ratio=ratio,
        has_sinks=True,
        window_format="bf16",
        main_format="bf16",
        block_size=data.draw(PAGES),
        dtype="bfloat16",
    )
    size = request.block_size
    window, window_table = paged_rows("bf16", [n for n, _ in lengths], 32, size)
    main, main_table = paged_rows("bf16", [n // ratio for n, _ in lengths], 32, size)
    plain = metadata(lengths, window_table)
    meta = compressed_attention.CompressedAttentionMetadata(
        query_start_loc=plain.query_start_loc,
        seq_lens=plain.seq_lens,
        window_block_table=window_table,
        main_block_table=main_table,
        max_query_len=plain.max_query_len,
        max_seq_len=plain.max_seq_len,
    )
    sinks = torch.randn(request.num_heads)
    q = torch.randn(sum(new for _, new in lengths), request.num_heads * 32).bfloat16()
    lists = index_lists(lengths, top_k, ratio) if top_k else None
    kernel = triton_compressed.bind(request, gpu(data.draw(ARCHS)), scale=0.2, sinks=sinks)
    golden = compressed_attention.reference(request, scale=0.2, sinks=sinks.double())
    exact = golden(q.double(), window.double(), main.double(), meta, lists)
    assert_exact("compressed_attention", kernel(q, window, main, meta, lists), exact)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@FEW
@given(data=st.data(), seed=SEEDS)
def test_scores_of_the_index(phase: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    lengths, ratio = data.draw(batches(phase)), data.draw(st.integers(1, 9))
    request = index_logits.IndexLogitsRequest(
        phase=phase,  # type: ignore[arg-type]
        num_heads=data.draw(st.integers(1, 5)),
        head_dim=32,
        key_format="bf16",
        block_size=data.draw(PAGES),
        dtype="bfloat16",
        compress_ratio=ratio,
    )
    cache, table = paged_rows("bf16", [n // ratio for n, _ in lengths], 32, request.block_size)
    meta, tokens = metadata(lengths, table), sum(new for _, new in lengths)
    q, weights = torch.randn(tokens, request.num_heads * 32).bfloat16(), torch.rand(tokens, 5)
    weights = weights[:, : request.num_heads].contiguous()
    found = triton_index_logits.bind(request, gpu(data.draw(ARCHS)), scale=0.3)(
        q, weights, cache, meta
    )
    exact = index_logits.reference(request, scale=0.3)(q.double(), weights, cache, meta)
    assert torch.equal(found == float("-inf"), exact == float("-inf"))
    seen = exact > float("-inf")
    torch.testing.assert_close(found[seen].double(), exact[seen].double(), rtol=1e-4, atol=1e-4)


@settings(FEW, max_examples=8)
@given(data=st.data(), seed=SEEDS)
def test_chosen_entries_and_candidate_blocks(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    entries, rows = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 20))
    top_k = data.draw(st.integers(1, min(70, 8 * count)))  # blocks hold as many
    logits = torch.randn(rows, entries + 3)[:, :entries]
    if data.draw(st.booleans()):
        logits = logits.round()  # equal scores
    # The last entry that is seen is the first of its block, the last one, or any.
    ends = [8 * data.draw(st.integers(0, 25)) + data.draw(st.integers(0, 2)) for _ in range(rows)]
    visible = torch.tensor([min(entries, end) for end in ends], dtype=torch.int32)
    fields: dict[str, Any] = {"phase": "decode", "top_k": top_k, "candidate_blocks": count}
    publishing = index_top_k.IndexTopKRequest(**fields, publishes_candidates=True)
    results = triton_top_k.bind(publishing, gpu("sm_90"))(logits, visible)
    for got, want in zip(results, index_top_k.reference(publishing)(logits, visible), strict=True):
        assert torch.equal(got.sort(dim=1).values, want.sort(dim=1).values)
    # Blocks of any order, also such as no query sees, with padding between.
    blocks = torch.stack([torch.randperm(entries // 8 + 20)[:count] for _ in range(rows)]).int()
    blocks[torch.rand(blocks.shape) < 0.2] = -1
    limited = index_top_k.IndexTopKRequest(**fields)
    found = triton_top_k.bind(limited, gpu("sm_90"))(logits, visible, blocks)
    exact = index_top_k.reference(limited)(logits, visible, blocks)
    assert torch.equal(found.sort(dim=1).values, exact.sort(dim=1).values)


@pytest.mark.parametrize("name", ["fp8_656", "v4_584", "v41_528", "fp8_132", "fp4_288", "fp4_68"])
@FEW
@given(data=st.data(), seed=SEEDS)
def test_rows_go_into_their_slots_only(name: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    pages, block_size, form = data.draw(st.integers(1, 4)), data.draw(PAGES), KV_FORMATS[name]
    request = kv_write.KvWriteRequest(
        phase="decode",
        num_kv_heads=1,
        head_dim=form.dim,
        v_head_dim=0,
        block_size=block_size,
        dtype="bfloat16",
        kv_dtype="uint8",
        kv_format=form.name,
    )
    exact = torch.randint(256, (pages, form.page_bytes(block_size)), dtype=torch.uint8)
    found = exact.clone()
    slots = torch.randperm(pages * block_size)[: data.draw(st.integers(0, 5))]
    rows = torch.randn(len(slots), form.dim).bfloat16()
    triton_kv_write.bind(request, gpu("sm_80"))(rows, found, slots)
    kv_write.reference(request)(rows, exact, slots)
    assert torch.equal(found, exact)


@settings(FEW, max_examples=8)
@given(data=st.data(), seed=SEEDS)
def test_places_of_experts(data: st.DataObject, seed: int) -> None:
    """Also of an expert that a token has twice, and of ids of other ranks."""
    torch.manual_seed(seed)
    experts, tokens = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 40))
    top_k = data.draw(st.integers(1, min(6, experts)))
    hidden = data.draw(st.integers(1, 40))
    lowest = data.draw(st.sampled_from([-1, 0]))
    ids = torch.randint(lowest, experts, (tokens, top_k), dtype=torch.int32)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    permute, combine = (
        moe_dispatch.MoeDispatchRequest(
            kind=kind, num_experts=experts, top_k=top_k, hidden_size=hidden, dtype="float32"
        )
        for kind in ("permute", "combine")
    )
    found = triton_dispatch.bind(permute, gpu("sm_90"))(x, ids)
    for got, want in zip(found, moe_dispatch.reference(permute)(x, ids), strict=True):
        assert torch.equal(got, want)
    rows, _, source = found
    y = triton_dispatch.bind(combine, gpu("sm_90"))(rows, source, weights)
    exact = moe_dispatch.reference(combine)(rows.double(), source, weights.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
