"""Triton attention in the interpreter against float64, over shuffled blocks with NaN around."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hal_kernels.attention.triton as triton_attention
from gpu_devices import gpu
from hal.ops.attention import AttentionRequest, reference
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS
from hal_kernels.attention.triton_limits import not_supported_reasons, rows_of
from hal_kernels.attention.triton_variants import decode_tiles
from kernel_errors import assert_exact

SHAPES = {
    "gqa3-d64": ((9, 3), 64, 16),
    "mha-d40": ((2, 2), 40, 16),  # not a power of two
    "mqa-d128": ((5, 1), 128, 32),
    "mqa24-d128": ((24, 1), 128, 32),  # tiles of more heads, all but full or not
    "gqa29-d64": ((58, 2), 64, 16),
    "mqa64-d40": ((64, 1), 40, 16),
    "mqa71-d64": ((71, 1), 64, 16),
    "mqa128-d32": ((128, 1), 32, 16),
}
MANY = ("mqa24-d128", "gqa29-d64", "mqa64-d40", "mqa71-d64", "mqa128-d32")


def request_of(shape: str, phase: str, dtype: str, **fields: Any) -> AttentionRequest:
    (heads, kv_heads), head_dim, block_size = SHAPES[shape]
    defaults: dict[str, Any] = {
        "phase": phase,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "block_size": block_size,
        "dtype": dtype,
        "kv_dtype": dtype,
    }
    return AttentionRequest(**(defaults | fields))


def check(
    cases: SimpleNamespace, shape: str, dtype: str, lengths: list[tuple[int, int]], **fields: Any
) -> None:
    """Compares one batch of (context with the new tokens, new tokens)."""
    (heads, kv_heads), head_dim, block_size = SHAPES[shape]
    torch_dtype: torch.dtype = getattr(torch, dtype)
    q, k, v, meta = cases.paged(
        [length for length, _ in lengths],
        [new for _, new in lengths],
        (heads, kv_heads),
        head_dim,
        block_size,
        torch_dtype,
    )
    phase = "decode" if all(new == 1 for _, new in lengths) else "prefill"
    request = request_of(shape, dtype=dtype, **({"phase": phase} | fields))
    sinks = torch.randn(heads).to(torch_dtype) if request.has_sinks else None
    scale = head_dim**-0.5
    kernel = triton_attention.bind(request, gpu("sm_120"), scale=scale, sinks=sinks)
    found = kernel(q, k, v, meta)
    exact = reference(request, scale=scale, sinks=None if sinks is None else sinks.double())(
        q.double(), k.double(), v.double(), meta
    )
    assert found.dtype == torch_dtype
    assert_exact("attention", found, exact)


FORMS = pytest.mark.parametrize(
    ("shape", "dtype", "fields"),
    [
        ("gqa3-d64", "bfloat16", {}),
        ("gqa3-d64", "float16", {"window": 20, "has_sinks": True}),
        ("gqa3-d64", "bfloat16", {"softcap": 5.0}),
        ("mha-d40", "float16", {}),
        ("mha-d40", "bfloat16", {"window": 7}),
        ("mqa-d128", "float16", {"has_sinks": True, "softcap": 2.0}),
        ("mqa-d128", "bfloat16", {"window": 20}),
        ("gqa3-d64", "float16", {"window": 20, "softcap": 3.0}),
        ("gqa3-d64", "bfloat16", {"window": 33, "softcap": 5.0, "has_sinks": True}),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else value,
)


@FORMS
def test_prefill(
    attention_cases: SimpleNamespace, shape: str, dtype: str, fields: dict[str, Any]
) -> None:
    check(attention_cases, shape, dtype, [(5, 5), (70, 67), (33, 2), (1, 1)], **fields)


@FORMS
def test_decode(
    attention_cases: SimpleNamespace, shape: str, dtype: str, fields: dict[str, Any]
) -> None:
    lengths = [(1, 1), (17, 1), (512, 1), (530, 1)]  # one and two splits
    check(attention_cases, shape, dtype, lengths, **fields)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", MANY)
@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 50, "has_sinks": True}, {"softcap": 5.0}, {"window": 20, "softcap": 3.0}],
    ids=["plain", "window-sinks", "softcap", "window-softcap"],
)
def test_decode_of_many_heads_over_a_cached_one(
    attention_cases: SimpleNamespace, shape: str, dtype: str, fields: dict[str, Any]
) -> None:
    check(attention_cases, shape, dtype, [(1, 1), (515, 1), (37, 1)], **fields)


def test_more_heads_a_cached_head_than_a_decode_is_compiled_for_are_refused() -> None:
    def found(phase: str, heads: int, **fields: Any) -> list[str]:
        request = request_of(
            "gqa3-d64", phase, "bfloat16", num_heads=heads, num_kv_heads=2, **fields
        )
        return [reason.found for reason in not_supported_reasons(request, gpu("sm_90"))]

    assert found("decode", 258) == ["129"]
    assert found("decode", 256) == found("decode", 34) == found("prefill", 258) == []
    for form in ({"window": 64}, {"has_sinks": True}, {"softcap": 30.0}):
        assert found("decode", 258, **form) == ["129"]
        assert found("decode", 256, **form) == found("prefill", 258, **form) == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("heads", [*range(1, 6), 16, 17, 24, 32, 33, 48, 64, 71, 128])
def test_a_decode_is_judged_by_the_rows_it_is_launched_with(target: Any, heads: int) -> None:
    """The variant that limits ask for holds the heads, in the tiles of the launch."""
    request = request_of("gqa3-d64", "decode", "bfloat16", num_heads=heads, num_kv_heads=1)
    asked = evidence_asked(not_supported_reasons, request, gpu(target.arch))
    assert [query.kernel for query in asked] == ["attention.decode", "attention.merge"]
    compiled = {(v.dtype, v.config): v for v in CATALOGUE["attention.decode"].variants(target)}[
        asked[0].dtype, asked[0].config
    ]
    rows = compiled.constants["BLOCK_H"]
    assert heads <= rows == rows_of(request)
    assert rows == 16 or rows < 2 * heads
    launched = decode_tiles(target, 64, rows)
    assert launched["BLOCK_N"] == compiled.constants["BLOCK_N"]
    assert launched["num_warps"] == compiled.num_warps
    assert launched["num_stages"] == compiled.num_stages


def test_attention_that_is_not_causal(attention_cases: SimpleNamespace) -> None:
    check(attention_cases, "gqa3-d64", "float16", [(40, 40), (3, 3)], is_causal=False)


def test_a_sequence_alone_and_in_a_batch_is_the_same_to_the_bit(
    attention_cases: SimpleNamespace,
) -> None:
    q, k, v, meta = attention_cases.paged([900, 40], [1, 1], (9, 3), 64, 16, torch.float16)
    request = request_of("gqa3-d64", "decode", "float16")
    kernel = triton_attention.bind(request, gpu("sm_90"), scale=0.125)
    together = kernel(q, k, v, meta)
    meta.query_start_loc, meta.seq_lens = meta.query_start_loc[1:], meta.seq_lens[1:]
    meta.block_table, meta.max_seq_len = meta.block_table[1:], 40
    assert torch.equal(kernel(q, k, v, meta)[1], together[1])


def test_no_sequences(attention_cases: SimpleNamespace) -> None:
    q, k, v, meta = attention_cases.paged([3], [1], (9, 3), 64, 16, torch.float16)
    meta.query_start_loc, meta.seq_lens = meta.query_start_loc[:1], meta.seq_lens[:0]
    for phase in ("decode", "prefill"):
        kernel = triton_attention.bind(
            request_of("gqa3-d64", phase, "float16"), gpu("sm_90"), scale=0.125
        )
        assert kernel(q[:0], k, v, meta).shape == (0, 9 * 64)


MIXED = [(40, 1), (0, 0), (1, 1), (30, 0), (17, 1)]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("fields", [{}, {"window": 20, "has_sinks": True}], ids=["plain", "window"])
def test_sequences_without_tokens_beside_others(
    attention_cases: SimpleNamespace, phase: str, fields: dict[str, Any]
) -> None:
    """Neither keys nor a query, and keys without a query: no row of theirs, and no other's lost."""
    lengths = MIXED if phase == "decode" else [*MIXED, (33, 20)]
    check(attention_cases, "gqa3-d64", "bfloat16", lengths, phase=phase, **fields)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_magnitudes(attention_cases: SimpleNamespace, phase: str, dtype: str) -> None:
    """Queries of 1e-4 to 1e3, so that a row's weights are equal or all on one key, and values of
    1e-4 to 1e4, each query's result judged by its own size."""
    count = 5
    new = [1] * count if phase == "decode" else [3] * count
    case = attention_cases.paged([40] * count, new, (9, 3), 64, 16, getattr(torch, dtype))
    q, k, v, meta = case
    q *= torch.logspace(-4, 3, count)[:, None].repeat_interleave(new[0], 0).to(q.dtype)
    sizes = torch.logspace(-4, 4, count).to(v.dtype)
    for row, blocks in enumerate(meta.block_table[:, :3].long()):
        v[blocks] *= sizes[row]
    request = request_of("gqa3-d64", phase, dtype)
    found = triton_attention.bind(request, gpu("sm_90"), scale=0.125)(q, k, v, meta)
    exact = reference(request, scale=0.125)(q.double(), k.double(), v.double(), meta)
    assert_exact("attention", found, exact)
