"""Triton attention over window and compressed entries in the interpreter against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.compressed_attention.triton as triton_compressed
from gpu_devices import gpu
from hal.ops.compressed_attention import (
    CompressedAttentionMetadata,
    CompressedAttentionRequest,
    reference,
)
from hal.ops.kv_formats import PLAIN_FORMATS
from hal_kernels.compressed_attention.triton_limits import not_supported_reasons
from kernel_errors import assert_exact
from sparse_cases import index_lists, metadata, paged_rows


def request_of(name: str, phase: str, **fields: Any) -> CompressedAttentionRequest:
    defaults: dict[str, Any] = {
        "phase": phase,
        "num_heads": 5,
        "head_dim": 32 if name in PLAIN_FORMATS else 512,
        "rope_dim": 64 if name == "v4_584" else 16,
        "window": 20,
        "top_k": 64,
        "compress_ratio": 4,
        "has_sinks": True,
        "window_format": name,
        "main_format": name,
        "block_size": 16,
        "dtype": "float16" if name == "fp16" else "bfloat16",
    }
    return CompressedAttentionRequest(**(defaults | fields))


def run(
    request: CompressedAttentionRequest,
    lengths: list[tuple[int, int]],
    sinks: torch.Tensor | None,
    arch: str = "sm_90",
    magnitudes: tuple[float, float] = (1.0, 1.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, exact) of one batch of (context with the new tokens, new tokens); queries and rows
    are of the two magnitudes."""
    name, dim, size = request.main_format, request.head_dim, request.block_size
    of_q, of_rows = magnitudes
    window, window_table = paged_rows(
        request.window_format, [n for n, _ in lengths], dim, size, of_rows
    )
    ratio = request.compress_ratio
    main, main_table = None, None
    if ratio:
        main, main_table = paged_rows(name, [n // ratio for n, _ in lengths], dim, size, of_rows)
    plain = metadata(lengths, window_table)
    meta = CompressedAttentionMetadata(
        query_start_loc=plain.query_start_loc,
        seq_lens=plain.seq_lens,
        window_block_table=window_table,
        main_block_table=main_table,
        max_query_len=plain.max_query_len,
        max_seq_len=plain.max_seq_len,
    )
    tokens = sum(new for _, new in lengths)
    dtype = getattr(torch, request.dtype)
    q = (torch.randn(tokens, request.num_heads * dim + 32) * of_q).to(dtype)[:, 16:-16]
    lists = index_lists(lengths, request.top_k, ratio) if request.top_k else None
    kernel = triton_compressed.bind(request, gpu(arch), scale=0.1, sinks=sinks)
    found = kernel(q, window, main, meta, lists)
    is_plain = name in PLAIN_FORMATS
    wide = [None if c is None else c.double() if is_plain else c for c in (window, main)]
    exact_sinks = None if sinks is None else sinks.double()
    exact = reference(request, scale=0.1, sinks=exact_sinks)(q.double(), *wide, meta, lists)
    return found, exact


def check(
    request: CompressedAttentionRequest, lengths: list[tuple[int, int]], arch: str = "sm_90"
) -> None:
    sinks = torch.randn(request.num_heads) if request.has_sinks else None
    found, exact = run(request, lengths, sinks, arch)
    assert found.dtype == getattr(torch, request.dtype)
    assert_exact("compressed_attention", found, exact)


DECODE = [(1, 1), (3, 1), (67, 1), (300, 1)]
PREFILL = [(5, 5), (70, 2), (4, 0), (1, 1)]


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", PLAIN_FORMATS)
def test_decode_and_prefill(name: str, top_k: int, has_sinks: bool) -> None:
    check(request_of(name, "decode", top_k=top_k, has_sinks=has_sinks), DECODE)
    check(request_of(name, "prefill", top_k=top_k, has_sinks=has_sinks), PREFILL, "gfx1100")


@pytest.mark.parametrize(
    ("dtype", "name"), [("float16", "v4_584"), ("float16", "bf16"), ("bfloat16", "fp16")]
)
def test_rows_of_another_dtype_are_refused(dtype: str, name: str) -> None:
    (reason,) = not_supported_reasons(request_of(name, "decode", dtype=dtype), gpu("sm_90"))
    assert reason.what == f"compressed_attention.paged: rows for {dtype} queries"
    assert reason.found == name


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_packed_rows(phase: str) -> None:
    check(request_of("v4_584", phase, num_heads=3), DECODE if phase == "decode" else PREFILL)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_packed_rows_in_chunks_of_columns(arch: str) -> None:
    for phase in ("decode", "prefill"):
        check(request_of("v4_584", phase, num_heads=3), [(37, 1), (3, 1)], arch)


@pytest.mark.parametrize("main", ["v41_528", "fp4_288"])
@pytest.mark.parametrize("arch", ["sm_90", "gfx1100"])
def test_rows_of_v41(main: str, arch: str) -> None:
    fields = {"num_heads": 3, "window_format": "v41_528"}
    for phase, lengths in (("decode", [(1, 1), (67, 1), (300, 1)]), ("prefill", [(70, 2), (5, 3)])):
        check(request_of(main, phase, **fields), lengths, arch)
    check(request_of(main, "decode", **fields, top_k=0), [(90, 1), (3, 1)], arch)


def test_the_window_alone_in_rows_of_v41() -> None:
    fields = {"num_heads": 3, "top_k": 0, "compress_ratio": 0}
    for phase in ("decode", "prefill"):
        check(request_of("v41_528", phase, **fields), [(40, 1), (2, 1)])


def test_the_window_alone() -> None:
    for phase in ("decode", "prefill"):
        check(request_of("bf16", phase, top_k=0, compress_ratio=0), [(40, 1), (2, 1), (30, 1)])


def test_more_than_one_split() -> None:
    check(request_of("bf16", "decode", top_k=0, compress_ratio=1), [(1030, 1), (3, 1)])
    check(request_of("bf16", "decode", top_k=576, compress_ratio=1), [(700, 1), (30, 1)])


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_sinks_that_outweigh_every_key_and_sinks_that_are_none(phase: str) -> None:
    sinks = torch.tensor([1e4, -1e4, float("-inf"), 0.0, 50.0])
    found, exact = run(request_of("bf16", phase), [(50, 1), (2, 1)], sinks)
    assert_exact("compressed_attention", found, exact)
    assert not found.view(2, 5, 32)[:, 0].any()


@pytest.mark.parametrize("magnitudes", [(1e-4, 1e4), (1e3, 1e-4), (1e4, 1e-2)])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", PLAIN_FORMATS)
def test_magnitudes(name: str, phase: str, magnitudes: tuple[float, float]) -> None:
    """Of queries and of rows: weights that are equal, and all on one entry."""
    request = request_of(name, phase, has_sinks=False)
    found, exact = run(request, [(37, 1), (5, 1)], None, magnitudes=magnitudes)
    assert_exact("compressed_attention", found, exact)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("top_k", [0, 64])
def test_packed_rows_on_rdna_3_spill_nothing(phase: str, top_k: int) -> None:
    """A row is unpacked once for both products there."""
    request = request_of("v4_584", phase, top_k=top_k)
    assert not not_supported_reasons(request, gpu("gfx1100"))
