"""Accelerators' attention candidates that need nothing but torch, on torch's CPU device, against
float64, with fresh random input for the shapes that they say they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.ops import CATALOGUE
from hal.ops.attention import AttentionRequest
from hal.ops.formats import torch_dtype
from hal.ops.mla_attention import MlaAttentionRequest
from hal_backends.gpu import torch_latent, torch_sdpa
from torch_cases import HOPPER, OTHER, TOKENS, changed, check, paged, serving


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("window", [0, 20])
def test_sdpa_over_pages(dtype: str, phase: Any, window: int) -> None:
    request = AttentionRequest(
        phase=phase,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype=dtype,
        kv_dtype=dtype,
        window=window,
        tokens=TOKENS,
    )
    lengths = [1, 16, 47, 130]
    queries = [1] * 4 if phase == "decode" else [1, 16, 5, 77]
    pages, meta = paged(lengths, queries, 16)
    caches = [torch.randn(pages, 16, 2, 32).to(torch_dtype(dtype)) for _ in range(2)]
    q = torch.randn(sum(queries), 6 * 32).to(torch_dtype(dtype))
    want = CATALOGUE["attention"].reference(request, scale=0.2)(
        q.double(), *(c.double() for c in caches), meta
    )
    candidates = [
        *torch_sdpa.candidates("attention", OTHER),
        # The variants of which torch has one for the CPU.
        *(c for c in torch_sdpa.candidates("attention", HOPPER) if c.name.endswith("math")),
    ]
    for candidate in serving(candidates, request):
        got = candidate.load()(request, scale=0.2)(q, *caches, meta)
        check(got, want, dtype, candidate.name)


def test_limits_of_the_flash_variant() -> None:
    request = AttentionRequest(
        phase="prefill",
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        tokens=TOKENS,
    )
    (flash,) = (c for c in torch_sdpa.candidates("attention", HOPPER) if c.name.endswith("flash"))
    assert flash.serves(request)
    assert [r.what for r in flash.not_supported_reasons(changed(request, window=8))] == ["window"]
    assert [r.what for r in flash.not_supported_reasons(changed(request, head_dim=260))] == [
        "v_head_dim",
        "head_dim",
        "head_dim",
    ]


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_656"])
@pytest.mark.parametrize("top_k", [0, 24])
def test_latent_attention(kv_format: Any, top_k: int) -> None:
    from hal.ops.kv_formats import KV_FORMATS, write_rows

    request = MlaAttentionRequest(
        phase="prefill",
        num_heads=4,
        kv_lora_rank=512,
        rope_dim=64,
        block_size=16,
        dtype="bfloat16",
        kv_format=kv_format,
        top_k=top_k,
        tokens=TOKENS,
    )
    lengths, queries = [3, 40, 90], [3, 9, 17]
    pages, meta = paged(lengths, queries, 16)
    rows = torch.randn(pages * 16, 576)
    if kv_format == "bf16":
        cache = rows.view(pages, 16, 576).bfloat16()
        exact: torch.Tensor = cache.double()
    else:
        cache = torch.zeros(pages, KV_FORMATS[kv_format].page_bytes(16), dtype=torch.uint8)
        write_rows(kv_format, cache, 16, torch.arange(pages * 16), rows)
        exact = cache
    q = torch.randn(sum(queries), 4 * 576).bfloat16()
    indices = None
    if top_k:
        indices = torch.stack([torch.randperm(90)[:top_k] for _ in range(len(q))]).int()
        indices[:, -2:] = -1
    reference = CATALOGUE["mla_attention"].reference(request, scale=0.04)
    want = reference(q.double(), exact, meta, indices)
    for candidate in serving(torch_latent.candidates("mla_attention", OTHER), request):
        if candidate.semantic_notes(request):
            assert top_k
            continue
        got = candidate.load()(request, scale=0.04)(q, cache, meta, indices)
        check(got, want, "bfloat16", candidate.name)


def test_dense_for_sparse_is_a_change_of_meaning() -> None:
    notes = {}
    for top_k in (0, 512):
        request = MlaAttentionRequest(
            num_heads=4,
            kv_lora_rank=512,
            rope_dim=64,
            block_size=64,
            dtype="bfloat16",
            kv_format="bf16",
            top_k=top_k,
        )
        for candidate in torch_latent.candidates("mla_attention", OTHER):
            notes[candidate.name.rsplit(".", 1)[1], top_k] = [
                n.name for n in candidate.semantic_notes(request)
            ]
    assert notes["torch_dense", 0] == []
    assert notes["torch_dense", 512] == ["dense_attention_for_sparse"]
    assert notes["torch_listed", 512] == []


@pytest.mark.parametrize("ratio", [0, 4])
def test_compressed_attention(ratio: int) -> None:
    from hal.ops.compressed_attention import (
        CompressedAttentionMetadata,
        CompressedAttentionRequest,
    )

    request = CompressedAttentionRequest(
        phase="prefill",
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        window=24,
        top_k=8 if ratio else 0,
        compress_ratio=ratio,
        has_sinks=True,
        window_format="bf16",
        main_format="bf16",
        block_size=16,
        dtype="bfloat16",
        tokens=TOKENS,
    )
    lengths, queries = [5, 60, 100], [5, 7, 20]
    pages, window = paged(lengths, queries, 16)
    main_pages, main = paged([max(1, n // 4) for n in lengths], queries, 16)
    meta = CompressedAttentionMetadata(
        query_start_loc=window.query_start_loc,
        seq_lens=window.seq_lens,
        window_block_table=window.block_table,
        main_block_table=main.block_table if ratio else None,
        max_query_len=20,
        max_seq_len=100,
    )
    caches = [torch.randn(n, 16, 64).bfloat16() for n in (pages, main_pages)]
    q = torch.randn(sum(queries), 4 * 64).bfloat16()
    sinks = torch.randn(4)
    indices = None
    if ratio:
        indices = torch.stack([torch.randperm(26)[:8] for _ in range(len(q))]).int()
    reference = CATALOGUE["compressed_attention"].reference(request, scale=0.1, sinks=sinks)
    main_cache = caches[1] if ratio else None
    want = reference(
        q.double(),
        caches[0].double(),
        None if main_cache is None else main_cache.double(),
        meta,
        indices,
    )
    for candidate in serving(torch_latent.candidates("compressed_attention", OTHER), request):
        got = candidate.load()(request, scale=0.1, sinks=sinks)(
            q, caches[0], main_cache, meta, indices
        )
        check(got, want, "bfloat16", candidate.name)
