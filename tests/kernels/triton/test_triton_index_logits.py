"""Triton indexer scores in the interpreter against float64, over shuffled pages with NaN around."""

from __future__ import annotations

import pytest
import torch

import hal_kernels.index_logits.triton as triton_index_logits
from gpu_devices import gpu
from hal.ops.attention import AttentionMetadata
from hal.ops.index_logits import IndexLogitsRequest, reference
from hal.ops.kv_formats import KV_FORMATS, write_rows
from hal.ops.low_precision import encode_fp8
from sparse_cases import metadata, paged_rows

# Heads, head size, rows of a page.
SHAPES = {"h32-d128": (32, 128, 16), "h5-d40": (5, 40, 64), "h5-d128": (5, 128, 64)}


def request_of(
    shape: str, key_format: str, dtype: str, phase: str, ratio: int
) -> IndexLogitsRequest:
    heads, head_dim, block_size = SHAPES[shape]
    return IndexLogitsRequest(
        phase=phase,
        num_heads=heads,
        head_dim=head_dim,
        key_format=key_format,
        block_size=block_size,
        dtype=dtype,
        compress_ratio=ratio,
    )


def check(
    request: IndexLogitsRequest, lengths: list[tuple[int, int]], arch: str, magnitude: float = 1.0
) -> None:
    """Compares one batch of (context with the new tokens, new tokens)."""
    entries = [length // request.compress_ratio for length, _ in lengths]
    cache, table = paged_rows(
        request.key_format, entries, request.head_dim, request.block_size, magnitude
    )
    meta = metadata(lengths, table)
    tokens = sum(new for _, new in lengths)
    q = torch.randn(tokens, request.num_heads * request.head_dim + 32)[:, 16:-16]
    is_fp8 = request.dtype == "float8_e4m3fn"
    q = encode_fp8(q, "fp8_e4m3fn") if is_fp8 else q.to(getattr(torch, request.dtype))
    weights = torch.randn(tokens, request.num_heads)
    found = triton_index_logits.bind(request, gpu(arch), scale=0.3)(q, weights, cache, meta)
    exact = reference(request, scale=0.3)(q.double(), weights, cache, meta)
    assert found.dtype == torch.float32
    assert torch.equal(found == float("-inf"), exact == float("-inf"))
    # Against the sum of the magnitudes, which is what float32 sums are exact to.
    most = reference(request, scale=0.3)(q.double(), weights.abs(), cache, meta)
    seen = exact > float("-inf")
    error = (found.double() - exact)[seen].abs()
    assert (error <= 1e-5 * most[seen].abs() + 1e-5 * magnitude).all()


@pytest.mark.parametrize(
    ("shape", "key_format", "dtype", "arch"),
    [
        ("h32-d128", "bf16", "bfloat16", "sm_90"),
        ("h5-d40", "bf16", "bfloat16", "gfx1100"),
        ("h32-d128", "fp16", "float16", "sm_90"),
        ("h5-d40", "fp16", "float16", "gfx1100"),
        ("h32-d128", "fp8_132", "bfloat16", "sm_80"),
        ("h32-d128", "fp8_132", "float8_e4m3fn", "sm_120"),
        ("h32-d128", "fp8_132", "float8_e4m3fn", "gfx942"),  # e4m3fnuz
        ("h32-d128", "fp8_132", "float8_e4m3fn", "gfx90a"),  # widened
        ("h32-d128", "fp4_68", "bfloat16", "sm_100"),
        ("h5-d128", "fp4_68", "float8_e4m3fn", "sm_120"),
        ("h5-d128", "fp4_68", "float8_e4m3fn", "gfx942"),  # e4m3fnuz
        ("h5-d128", "fp4_68", "float8_e4m3fn", "gfx90a"),  # widened
    ],
)
def test_scores(shape: str, key_format: str, dtype: str, arch: str) -> None:
    for phase, lengths, ratio in (
        ("decode", [(1, 1), (130, 1), (3, 1)], 1),
        ("prefill", [(5, 5), (150, 19), (2, 0), (33, 2)], 1),
        ("prefill", [(41, 7), (3, 3)], 4),
    ):
        check(request_of(shape, key_format, dtype, phase, ratio), lengths, arch)


@pytest.mark.parametrize("magnitude", [1e-3, 1e4])
def test_large_and_tiny_keys(magnitude: float) -> None:
    for key_format in ("bf16", "fp8_132", "fp4_68"):
        request = request_of("h32-d128", key_format, "bfloat16", "decode", 1)
        check(request, [(70, 1)], "sm_90", magnitude)
    request = request_of("h5-d128", "fp4_68", "float8_e4m3fn", "decode", 1)
    check(request, [(70, 1)], "sm_90", magnitude)


def test_a_key_that_is_not_a_number_is_seen_in_its_own_score_only() -> None:
    request = request_of("h32-d128", "fp8_132", "bfloat16", "decode", 1)
    cache, table = paged_rows("fp8_132", [20], 128, 16, 1.0)
    row = torch.full((1, 128), float("nan"))
    write_rows("fp8_132", cache, 16, table[0, :1] * 16 + 3, row)
    q, weights = torch.randn(1, 32 * 128).bfloat16(), torch.randn(1, 32)
    kernel = triton_index_logits.bind(request, gpu("sm_90"), scale=1.0)
    found = kernel(q, weights, cache, metadata([(20, 1)], table))
    assert found.isnan().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx90a"])
def test_every_value_and_scale_of_four_bits_is_exact_for_an_fp8_query(arch: str) -> None:
    """One value of a row and one of the query at a time, so that a score is a product of two."""
    request = request_of("h5-d128", "fp4_68", "float8_e4m3fn", "decode", 1)
    cache = torch.zeros(1, KV_FORMATS["fp4_68"].page_bytes(64), dtype=torch.uint8)
    for code in range(16):
        cache[0, code * 64 + 40] = code << 4  # column 81 of row `code`
        cache[0, 64 * 64 + code * 4 + 2] = 120 + code  # of columns 64 to 95
    cache[0, 64 * 64 + 16 * 4 + 3] = 255  # NaN, of columns 96 to 127 of row 16
    meta = metadata([(18, 1)], torch.zeros(1, 1, dtype=torch.int32))
    q = torch.zeros(1, 5 * 128)
    q[0, [81, 128 + 81]] = torch.tensor([3.5, -0.0625])
    q = encode_fp8(q, "fp8_e4m3fn")
    weights = torch.tensor([[1.0, 100.0, 0.5, 0.5, 0.5]])
    kernel = triton_index_logits.bind(request, gpu(arch), scale=1.0)
    found, exact = (
        f(x, weights, cache, meta)
        for f, x in ((kernel, q), (reference(request, scale=1.0), q.double()))
    )
    assert torch.equal(found.double()[:, :16], exact[:, :16])
    assert (exact[:, [1, 2, 3, 4, 5, 6, 7, 9, 15]] > 0).all()
    assert found.isnan().nonzero().tolist() == [[0, 16]]


def test_nothing_to_score() -> None:
    request = request_of("h32-d128", "fp8_132", "bfloat16", "decode", 1)
    cache = torch.zeros(1, KV_FORMATS["fp8_132"].page_bytes(16), dtype=torch.uint8)
    none = torch.zeros(1, dtype=torch.int32)
    meta = AttentionMetadata(none, none[:0], none[:0, None], 0, 0)
    kernel = triton_index_logits.bind(request, gpu("sm_90"), scale=1.0)
    found = kernel(torch.empty(0, 32 * 128).bfloat16(), torch.empty(0, 32), cache, meta)
    assert found.shape == (0, 0)
