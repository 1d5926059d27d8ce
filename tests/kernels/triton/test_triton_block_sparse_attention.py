"""Triton attention over listed blocks in the interpreter against float64, with NaN around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hal_kernels.block_sparse_attention.triton as triton_block_sparse
from block_lists import list_metadata, paged_heads, random_lists
from gpu_devices import gpu
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest, reference
from hal_kernels.block_sparse_attention.triton_limits import not_supported_reasons
from kernel_errors import assert_exact


def request_of(**fields: Any) -> BlockSparseAttentionRequest:
    defaults: dict[str, Any] = {
        "phase": "prefill",
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 24,
        "v_head_dim": 20,
        "query_block": 16,
        "key_block": 32,
        "num_selected": 3,
        "block_size": 16,
        "dtype": "bfloat16",
    }
    return BlockSparseAttentionRequest(**(defaults | fields))


def run(
    request: BlockSparseAttentionRequest,
    lengths: list[tuple[int, int]],
    *,
    arch: str = "sm_90",
    magnitude: float = 1.0,
    lists: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, exact) of one batch of (context with the new tokens, new tokens)."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    every = [length for length, _ in lengths]
    k, table = paged_heads(every, request.num_kv_heads, request.head_dim, request.block_size, dtype)
    # Another cache of the same pages.
    wide = torch.randn(*k.shape[:3], request.v_head_dim + 8).to(dtype)
    wide[k[..., 0].isnan()] = float("nan")
    v = wide[..., 4:-4]
    k *= magnitude
    tokens, width = sum(new for _, new in lengths), request.num_heads * request.head_dim
    q = torch.randn(tokens, width + 16).to(dtype)[:, 8:-8]
    meta = list_metadata(lengths, table, request.query_block)
    if lists is None:
        lists = random_lists(
            lengths,
            request.num_kv_heads,
            request.num_selected,
            request.query_block,
            request.key_block,
        )
    found = triton_block_sparse.bind(request, gpu(arch), scale=0.2)(q, k, v, lists, meta)
    exact = reference(request, scale=0.2)(q.double(), k.double(), v.double(), lists, meta)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    return found, exact


def check(
    request: BlockSparseAttentionRequest, lengths: list[tuple[int, int]], **more: Any
) -> torch.Tensor:
    found, exact = run(request, lengths, **more)
    assert_exact("block_sparse_attention", found, exact)
    return found


BATCH = [(5, 5), (70, 19), (40, 0), (1, 1)]


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("query_block", [1, 16, 24])
def test_lists_of_query_blocks(query_block: int, window: int) -> None:
    kv_heads = 1 if query_block == 1 else 2
    check(request_of(query_block=query_block, window=window, num_kv_heads=kv_heads), BATCH)


@pytest.mark.parametrize(
    ("fields", "arch"),
    [
        ({"num_heads": 5, "num_kv_heads": 1, "dtype": "float16"}, "gfx1100"),
        ({"num_heads": 3, "num_kv_heads": 3, "head_dim": 72, "v_head_dim": 72}, "gfx942"),
        ({"num_heads": 16, "num_kv_heads": 1, "query_block": 64}, "sm_80"),
        ({"num_heads": 8, "num_kv_heads": 2, "key_block": 48, "num_selected": 5}, "sm_120"),
        ({"key_block": 64, "block_size": 48, "window": 1}, "gfx1201"),
    ],
)
def test_heads_blocks_and_pages(fields: dict[str, Any], arch: str) -> None:
    check(request_of(**fields), [(70, 35), (1, 1)], arch=arch)


@pytest.mark.parametrize("magnitude", [1e-4, 30.0])
def test_scores_of_any_size(magnitude: float) -> None:
    check(request_of(), [(50, 50)], magnitude=magnitude)


def test_rows_that_see_no_key_are_zero() -> None:
    request = request_of(num_selected=2)
    lists = torch.tensor([[[-1, -1], [5, -1]]], dtype=torch.int32)  # nothing, and the future
    found = check(request, [(40, 3)], lists=lists)
    assert not found.any()


def test_blocks_that_begin_within_the_window_and_after_the_query() -> None:
    lists = torch.tensor([[[2, 0], [1, 9]]], dtype=torch.int32)
    check(request_of(num_selected=2, window=30), [(80, 7)], lists=lists)


def test_whole_lists_are_plain_attention() -> None:
    """Against torch's own attention, not our reference."""
    lists = torch.arange(4, dtype=torch.int32).flip(0).expand(4, 4, 4)
    k, table = paged_heads([90], 4, 24, 16, torch.bfloat16)
    v = torch.randn_like(k)
    pages = table[0, :6].long()
    keys, values = (c[pages].flatten(0, 1)[:90].double().transpose(0, 1) for c in (k, v))
    q = torch.randn(4, 4 * 24).bfloat16()
    request = request_of(num_heads=4, num_kv_heads=4, num_selected=4, query_block=1, v_head_dim=24)
    meta = list_metadata([(90, 4)], table, 1)
    found = triton_block_sparse.bind(request, gpu("sm_90"), scale=0.2)(q, k, v, lists, meta)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.view(4, 4, 24).double().transpose(0, 1),
        keys,
        values,
        attn_mask=torch.ones(90, 90, dtype=torch.bool).tril()[-4:],
        scale=0.2,
    )
    assert_exact("block_sparse_attention", found, exact.transpose(0, 1).flatten(1))


@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    """Lists to slots: any blocks, pages and lengths, of which few are powers of two."""
    request = request_of(
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        v_head_dim=16,
        query_block=data.draw(st.integers(1, 6)),
        key_block=16 * data.draw(st.integers(1, 3)),
        num_selected=data.draw(st.integers(1, 2)),
        block_size=data.draw(st.integers(1, 40)),
        window=data.draw(st.integers(0, 30)),
    )
    lengths = []
    for _ in range(data.draw(st.integers(1, 2))):
        length = data.draw(st.integers(1, 90))
        lengths.append((length, data.draw(st.integers(0, min(length, 3)))))
    if sum(new for _, new in lengths):
        check(request, lengths)


def test_no_queries() -> None:
    found, _ = run(request_of(), [(9, 0)])
    assert found.shape == (0, 6 * 20)


def test_lists_of_another_width() -> None:
    lists = torch.zeros(1, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\[L, 2, 3\], found \[1, 2, 4\]"):
        run(request_of(), [(9, 3)], lists=lists)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"phase": "decode"}, "phase"),
        ({"head_dim": 257}, "head_dim"),
        ({"v_head_dim": 257}, "head_dim"),
        ({"num_heads": 34}, "heads of a cached head"),
        ({"key_block": 24}, "key_block"),
        ({"num_selected": 4097}, "num_selected"),
    ],
)
def test_what_the_kernel_does_not_take(fields: dict[str, Any], what: str) -> None:
    reasons = not_supported_reasons(request_of(**fields), gpu("sm_90"))
    assert any(what in reason.what for reason in reasons)
    assert not not_supported_reasons(request_of(num_heads=32), gpu("sm_90"))
