"""Triton latent attention in the interpreter against float64, over shuffled pages with NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.mla_attention.triton as triton_mla
from gpu_devices import gpu
from hal.ops.attention import AttentionMetadata
from hal.ops.mla_attention import MlaAttentionRequest, reference
from sparse_cases import index_lists, metadata, paged_rows

# Heads, latent and rotary values of a row, rows of a page.
SHAPES = {"small": (5, 32, 16, 16), "no-rope": (17, 24, 0, 16), "v3": (3, 512, 64, 64)}
WIDE = {
    "wide": (64, 512, 64, 64),
    "wide-48": (64, 48, 16, 16),
    "wide-of-two": (128, 24, 16, 16),
}  # 64 heads a program
# Weights and, of packed rows, values are rounded to bfloat16 (2**-9 each), the result once more.
TOLERANCE = 2.0**-7


def request_of(shape: str, phase: str, **fields: Any) -> MlaAttentionRequest:
    heads, rank, rope, block_size = (SHAPES | WIDE)[shape]
    defaults: dict[str, Any] = {
        "phase": phase,
        "num_heads": heads,
        "kv_lora_rank": rank,
        "rope_dim": rope,
        "block_size": block_size,
        "dtype": "bfloat16",
        "kv_format": "bf16",
    }
    return MlaAttentionRequest(**(defaults | fields))


def check(
    request: MlaAttentionRequest,
    lengths: list[tuple[int, int]],
    arch: str = "sm_90",
    **options: Any,
) -> None:
    """Compares one batch of (context with the new tokens, new tokens)."""
    cache, table = paged_rows(
        request.kv_format, [n for n, _ in lengths], request.row_dim, request.block_size, **options
    )
    meta = metadata(lengths, table)
    tokens = sum(new for _, new in lengths)
    q = torch.randn(tokens, request.num_heads * request.row_dim + 32).bfloat16()[:, 16:-16]
    lists = index_lists(lengths, request.top_k) if request.top_k else None
    found = triton_mla.bind(request, gpu(arch), scale=0.1)(q, cache, meta, lists)
    wide = cache.double() if request.kv_format == "bf16" else cache
    exact = reference(request, scale=0.1)(q.double(), wide, meta, lists)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert (found.double() - exact).abs().max() <= TOLERANCE * exact.abs().max()


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize(
    ("shape", "kv_format"), [("small", "bf16"), ("no-rope", "bf16"), ("v3", "fp8_656")]
)
def test_decode_and_prefill(shape: str, kv_format: str, top_k: int) -> None:
    fields = {"kv_format": kv_format, "top_k": top_k}
    check(request_of(shape, "decode", **fields), [(1, 1), (67, 1), (200, 1)])
    check(request_of(shape, "prefill", **fields), [(5, 5), (70, 2), (4, 0), (1, 1)])


@pytest.mark.parametrize("top_k", [0, 64, 96])
@pytest.mark.parametrize(
    ("shape", "kv_format"), [("wide", "bf16"), ("wide", "fp8_656"), ("wide-48", "bf16")]
)
def test_programs_of_64_heads(shape: str, kv_format: str, top_k: int) -> None:
    fields = {"kv_format": kv_format, "top_k": top_k}
    check(request_of(shape, "decode", **fields), [(1, 1), (67, 1)])
    check(request_of(shape, "prefill", **fields), [(70, 2), (4, 0)])


def test_programs_of_64_heads_in_more_than_one_split() -> None:
    check(request_of("wide-of-two", "decode"), [(530, 1), (3, 1)])
    check(request_of("wide-of-two", "decode", top_k=576), [(550, 1)])


def test_more_than_one_split() -> None:
    check(request_of("small", "decode"), [(1030, 1), (3, 1), (512, 1)])
    check(request_of("small", "decode", top_k=576), [(700, 1), (30, 1)])


def test_several_new_tokens_in_a_decode() -> None:
    check(request_of("small", "decode", top_k=64), [(40, 3), (9, 1)], "gfx1100")


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_rows_in_chunks_of_columns(arch: str) -> None:
    for kv_format in ("fp8_656", "bf16"):
        check(request_of("v3", "decode", kv_format=kv_format), [(37, 1), (2, 1)], arch)


def test_attention_that_is_not_causal() -> None:
    check(request_of("small", "prefill", is_causal=False), [(20, 4)])
    check(request_of("small", "prefill", is_causal=False, top_k=64), [(20, 4)])


@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
def test_large_and_tiny_rows(magnitude: float) -> None:
    check(request_of("v3", "decode", kv_format="fp8_656"), [(40, 1)], magnitude=magnitude)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_query_that_sees_nothing_is_zero(phase: str) -> None:
    request = request_of("small", phase, top_k=64)
    cache, table = paged_rows("bf16", [9, 9], request.row_dim, 16)
    q = torch.randn(2, 5 * request.row_dim).bfloat16()
    lists = torch.full((2, 64), -1, dtype=torch.int32)
    lists[1, 7], lists[1, 9] = 9, 1 << 20  # beyond the sequence
    kernel = triton_mla.bind(request, gpu("sm_90"), scale=1.0)
    assert not kernel(q, cache, metadata([(9, 1), (9, 1)], table), lists).any()


def test_a_sequence_alone_and_in_a_batch_is_the_same_to_the_bit() -> None:
    request = request_of("small", "decode")
    cache, table = paged_rows("bf16", [900, 40], request.row_dim, 16)
    q = torch.randn(2, 5 * request.row_dim).bfloat16()
    kernel = triton_mla.bind(request, gpu("sm_90"), scale=0.1)
    together = kernel(q, cache, metadata([(900, 1), (40, 1)], table))
    assert torch.equal(kernel(q[1:], cache, metadata([(40, 1)], table[1:]))[0], together[1])


def test_no_sequences() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    meta = AttentionMetadata(none, none[:0], none[:0, None], 0, 0)
    for phase in ("decode", "prefill"):
        request = request_of("small", phase)
        kernel = triton_mla.bind(request, gpu("sm_90"), scale=0.1)
        cache = torch.zeros(1, 16, request.row_dim).bfloat16()
        assert kernel(torch.empty(0, 5 * request.row_dim).bfloat16(), cache, meta).shape == (0, 160)
