"""How candidates call libraries of latent attention and index scores, against stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fake_latent as latent
import fake_libraries as fake
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.attention import AttentionMetadata
from hal.ops.compressed_attention import (
    CompressedAttentionMetadata,
    CompressedAttentionRequest,
)
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.kv_formats import KV_FORMATS, write_rows
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.request import TokenRange
from hal_backends.ascend import npu_attention
from hal_backends.gpu import aiter, deep_gemm, flash_mla, flashinfer_mla
from library_cases import CDNA4, HOPPER, close, device, one

TOKENS = TokenRange(1, 64)
SIZE = 64


def step(lengths: list[int], queries: list[int]) -> tuple[AttentionMetadata, int]:
    blocks = [-(-n // SIZE) for n in lengths]
    order = torch.randperm(sum(blocks) + 2).int()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        table[i, :count] = order[sum(blocks[:i]) :][:count]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    return meta, len(order)


def cache_of(name: str, pages: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the cache, the same for a reference in float64)."""
    rows = torch.randn(pages * SIZE, dim)
    if name == "bf16":
        cache = rows.view(pages, SIZE, dim).bfloat16()
        return cache, cache.double()
    cache = torch.zeros(pages, KV_FORMATS[name].page_bytes(SIZE), dtype=torch.uint8)
    write_rows(name, cache, SIZE, torch.arange(pages * SIZE), rows)
    return cache, cache


LATENT: list[tuple[Any, DeviceSpec, str, str, int, int, int]] = [
    (flash_mla, HOPPER, "flash_mla_sparse_packed", "fp8_656", 128, 64, 64),
    (flash_mla, HOPPER, "flash_mla_sparse", "bf16", 128, 64, 64),
    (flash_mla, HOPPER, "flash_mla_dense", "bf16", 0, 4, 64),
    (
        flashinfer_mla,
        device("nvidia", "sm_120", "matrix.fp8_e4m3fn"),
        "flashinfer_sparse_sm120",
        "fp8_656",
        100,
        12,
        64,
    ),
    (aiter, CDNA4, "aiter", "bf16", 96, 16, 64),
    (aiter, CDNA4, "aiter", "bf16", 0, 16, 64),
    (
        npu_attention,
        device("ascend", "ascend-910b"),
        "npu_sparse_flash_attention",
        "bf16",
        96,
        8,
        0,
    ),
]


@pytest.mark.parametrize(
    ("library", "on", "name", "kv_format", "top_k", "heads", "rope"),
    LATENT,
    ids=[f"{case[2]}-{case[4]}" for case in LATENT],
)
def test_latent_attention(
    library: Any, on: DeviceSpec, name: str, kv_format: Any, top_k: int, heads: int, rope: int
) -> None:
    request = MlaAttentionRequest(
        phase="decode",
        num_heads=heads,
        kv_lora_rank=512,
        rope_dim=rope,
        block_size=SIZE,
        dtype="bfloat16",
        kv_format=kv_format,
        top_k=top_k,
        tokens=TOKENS,
    )
    candidate = one(library.candidates("mla_attention", on), name)
    assert candidate.serves(request), candidate.not_supported_reasons(request)
    lengths = [3, 70, 150]
    meta, pages = step(lengths, [1, 1, 1])
    cache, exact = cache_of(kv_format, pages, 512 + rope)
    q = torch.randn(3, heads * (512 + rope)).bfloat16()
    indices = None
    if top_k:
        indices = torch.full((3, top_k), -1, dtype=torch.int32)
        for i, length in enumerate(lengths):
            chosen = torch.randperm(length)[:top_k].int()
            indices[i, : len(chosen)] = chosen
    with fake.installed(
        flash_mla={
            "flash_mla_with_kvcache": latent.flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": latent.flash_mla_sparse_fwd,
            "get_mla_metadata": latent.get_mla_metadata,
        },
        flashinfer__mla___sparse_mla_sm120___api={
            "sparse_mla_sm120_decode_dsv3_2": latent.sparse_mla_sm120_decode_dsv3_2
        },
        aiter__mla={"mla_decode_fwd": latent.mla_decode_fwd},
        torch_npu={"npu_sparse_flash_attention": latent.npu_sparse_flash_attention},
    ):
        got = candidate.load()(request, scale=0.05)(q, cache, meta, indices)
    want = CATALOGUE["mla_attention"].reference(request, scale=0.05)(
        q.double(), exact, meta, indices
    )
    close(got, want, name)


@pytest.mark.parametrize("ratio", [0, 4])
@pytest.mark.parametrize(
    ("library", "on", "name"),
    [
        (flash_mla, HOPPER, "flash_mla_compressed"),
        (
            flashinfer_mla,
            device("nvidia", "sm_120", "matrix.fp8_e4m3fn"),
            "flashinfer_sparse_sm120",
        ),
    ],
    ids=["flash_mla", "flashinfer"],
)
def test_a_window_and_listed_entries(library: Any, on: DeviceSpec, name: str, ratio: int) -> None:
    request = CompressedAttentionRequest(
        phase="decode",
        num_heads=64,
        head_dim=512,
        rope_dim=64,
        window=128,
        top_k=64 if ratio else 0,
        compress_ratio=ratio,
        has_sinks=True,
        window_format="v4_584",
        main_format="v4_584",
        block_size=SIZE,
        dtype="bfloat16",
        tokens=TOKENS,
    )
    candidate = one(library.candidates("compressed_attention", on), name)
    assert candidate.serves(request), candidate.not_supported_reasons(request)
    lengths = [3, 70, 300]
    near, pages = step(lengths, [1, 1, 1])
    far, main_pages = step([max(1, n // 4) for n in lengths], [1, 1, 1])
    meta = CompressedAttentionMetadata(
        query_start_loc=near.query_start_loc,
        seq_lens=near.seq_lens,
        window_block_table=near.block_table,
        main_block_table=far.block_table if ratio else None,
        max_query_len=1,
        max_seq_len=300,
    )
    window, _ = cache_of("v4_584", pages, 512)
    main = cache_of("v4_584", main_pages, 512)[0] if ratio else None
    indices = torch.stack([torch.randperm(80)[:64] for _ in lengths]).int() if ratio else None
    q, sinks = torch.randn(3, 64 * 512).bfloat16(), torch.randn(64)
    reference = CATALOGUE["compressed_attention"].reference(request, scale=0.05, sinks=sinks)
    with fake.installed(
        flash_mla={
            "flash_mla_with_kvcache": latent.flash_mla_with_kvcache,
            "get_mla_metadata": latent.get_mla_metadata,
        },
        flashinfer__mla___sparse_mla_sm120___api={
            "sparse_mla_sm120_decode_dsv4": latent.sparse_mla_sm120_decode_dsv4
        },
    ):
        kernel = candidate.load()(request, scale=0.05, sinks=sinks)
        got = kernel(q, window, main, meta, indices)
    close(got, reference(q.double(), window, main, meta, indices), name)


@pytest.mark.parametrize("ratio", [1, 4])
def test_index_scores(ratio: int) -> None:
    request = IndexLogitsRequest(
        phase="decode",
        num_heads=32,
        head_dim=128,
        key_format="fp8_132",
        block_size=SIZE,
        dtype="float8_e4m3fn",
        compress_ratio=ratio,
        tokens=TOKENS,
    )
    meta, pages = step([5, 70, 150], [1, 1, 1])
    cache, exact = cache_of("fp8_132", pages, 128)
    q = torch.randn(3, 32 * 128).to(torch.float8_e4m3fn)
    weights = torch.randn(3, 32)
    want = CATALOGUE["index_logits"].reference(request, scale=0.3)(q.double(), weights, exact, meta)

    def schedule(context_lens: torch.Tensor, block_size: int, num_sms: int) -> str:
        assert (block_size, num_sms) == (SIZE, 132)
        return "schedule"

    def paged(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        out_logits: torch.Tensor,
        context_lens: torch.Tensor,
        kv_indices: torch.Tensor,
        max_model_len: int,
        *,
        Preshuffle: bool,
        KVBlockSize: int,
    ) -> None:
        assert (Preshuffle, KVBlockSize) == (False, SIZE)
        out_logits.copy_(
            latent.fp8_paged_mqa_logits(
                q, kv_cache, weights, context_lens, kv_indices, None, max_model_len
            )
        )

    with fake.installed(
        deep_gemm={
            "fp8_paged_mqa_logits": latent.fp8_paged_mqa_logits,
            "get_paged_mqa_logits_metadata": schedule,
            "get_num_sms": lambda: 132,
        },
        aiter__ops__triton__pa_mqa_logits={"deepgemm_fp8_paged_mqa_logits": paged},
    ):
        for candidate in (
            one(deep_gemm.candidates("index_logits", HOPPER), "deep_gemm"),
            one(aiter.candidates("index_logits", CDNA4), "aiter"),
        ):
            assert candidate.serves(request), candidate.not_supported_reasons(request)
            got = candidate.load()(request, scale=0.3)(q, weights, cache, meta)
            close(got, want, candidate.name, 1e-3)
