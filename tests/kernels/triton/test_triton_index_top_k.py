"""Triton index lists in the interpreter: the very set that a stable sort chooses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal_kernels.index_top_k.triton as triton_top_k
from gpu_devices import gpu
from hal.ops.index_top_k import IndexTopKRequest, reference
from hal_kernels.index_top_k.wide_rows import (
    WIDE_COLUMNS,
    readable_columns,
    rows_for_wide_loads,
)
from op_inputs import UNTIMED

INF, NAN = float("inf"), float("nan")


def check(request: IndexTopKRequest, logits: torch.Tensor, visible: list[int]) -> None:
    seen = torch.tensor(visible, dtype=torch.int32)
    found = triton_top_k.bind(request, gpu("sm_90"))(logits, seen)
    exact = reference(request)(logits, seen)
    assert found.dtype == torch.int32
    assert torch.equal(found.sort(dim=1).values, exact.sort(dim=1).values)
    # Padding is behind what was chosen, and pools are whole and in order.
    chosen = found[:, : request.top_k]
    counts = (chosen >= 0).sum(dim=1)
    for row, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        assert row[:count] == sorted(row[:count])
        assert set(row[count:]) <= {-1}


@pytest.mark.parametrize("magnitude", [1e-40, 1.0, 1e38])
def test_random_scores(magnitude: float) -> None:
    request = IndexTopKRequest(phase="decode", top_k=64)
    logits = torch.randn(5, 3000)[:, :2500] * magnitude
    check(request, logits, [2500, 64, 63, 0, 1300])


def test_equal_scores_and_those_that_are_none() -> None:
    request = IndexTopKRequest(phase="decode", top_k=64)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.0**-149, -(2.0**-149)])
    logits = values[torch.randint(len(values), (6, 700))]
    check(request, logits, [700, 650, 80, 10, 1, 0])
    check(request, torch.zeros(2, 700), [700, 90])
    check(request, torch.full((2, 700), -INF), [700, 90])
    check(request, torch.full((1, 700), -0.0).where(torch.arange(700) % 3 > 0, 0.0), [700])


def test_bits_that_differ_in_one_digit_only() -> None:
    request = IndexTopKRequest(phase="decode", top_k=16)
    for shift in (0, 8, 16):
        bits = 0x3F800000 + (torch.randint(200, (4, 300), dtype=torch.int32) << shift)
        logits = bits.to(torch.int32).view(torch.float32)
        check(request, torch.cat((logits, -logits)), [300] * 8)


def test_pools_with_the_open_one() -> None:
    for size, top_k in ((16, 64), (3, 30)):
        request = IndexTopKRequest(phase="decode", top_k=top_k, pool_size=size)
        logits = torch.randn(6, 40)
        check(request, logits, [40 * size, size * 20 + 1, size * 4, size - 1, 0, 5])


def test_no_queries() -> None:
    request = IndexTopKRequest(phase="decode", top_k=64)
    kernel = triton_top_k.bind(request, gpu("sm_90"))
    assert kernel(torch.empty(0, 9), torch.empty(0, dtype=torch.int32)).shape == (0, 64)


@pytest.mark.parametrize("has_ties", [False, True])
def test_candidate_blocks(has_ties: bool) -> None:
    logits = torch.randn(6, 700)
    if has_ties:
        logits = logits.round()
        logits[0, ::5] = NAN
    visible = torch.tensor([700, 640, 400, 9, 1, 0], dtype=torch.int32)
    publishing = IndexTopKRequest(
        phase="decode", top_k=64, candidate_blocks=20, publishes_candidates=True
    )
    found, blocks = triton_top_k.bind(publishing, gpu("sm_90"))(logits, visible)
    exact, exact_blocks = reference(publishing)(logits, visible)
    assert torch.equal(found.sort(dim=1).values, exact.sort(dim=1).values)
    assert torch.equal(blocks.sort(dim=1).values, exact_blocks.sort(dim=1).values)
    limited = IndexTopKRequest(phase="decode", top_k=64, candidate_blocks=20)
    later = torch.randn(6, 700).round() if has_ties else torch.randn(6, 700)
    blocks = blocks[:, torch.randperm(20)]  # in no order, with padding between
    found = triton_top_k.bind(limited, gpu("sm_90"))(later, visible, blocks)
    exact = reference(limited)(later, visible, blocks)
    assert torch.equal(found.sort(dim=1).values, exact.sort(dim=1).values)


def padded(rows: int, columns: int) -> torch.Tensor:
    """Random scores in rows that may be loaded further, where the largest of all stand."""
    held = torch.full((rows, -(-columns // WIDE_COLUMNS) * WIDE_COLUMNS), INF)
    held[:, :columns] = torch.randn(rows, columns)
    assert readable_columns(held[:, :columns]) == held.shape[1]
    return held[:, :columns]


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 701, 2051])
def test_what_is_loaded_behind_a_row_is_left_out(columns: int) -> None:
    visible = [columns, columns - 1, columns // 2, 1, 0]
    for request in (
        IndexTopKRequest(phase="decode", top_k=64),
        IndexTopKRequest(phase="decode", top_k=64, pool_size=4),
    ):
        check(request, padded(5, columns), [request.pool_size * count for count in visible])


@pytest.mark.parametrize("columns", [9, 200, 701])
def test_blocks_that_end_behind_a_row_have_their_entries_alone(columns: int) -> None:
    visible = torch.tensor([columns, columns - 1, columns // 2, 1, 0], dtype=torch.int32)
    publishing = IndexTopKRequest(
        phase="decode", top_k=16, candidate_blocks=12, publishes_candidates=True
    )
    logits = padded(5, columns)
    found, blocks = triton_top_k.bind(publishing, gpu("sm_90"))(logits, visible)
    exact, exact_blocks = reference(publishing)(logits, visible)
    assert torch.equal(found.sort(dim=1).values, exact.sort(dim=1).values)
    assert torch.equal(blocks.sort(dim=1).values, exact_blocks.sort(dim=1).values)
    limited = IndexTopKRequest(phase="decode", top_k=16, candidate_blocks=12)
    later = padded(5, columns)
    found = triton_top_k.bind(limited, gpu("sm_90"))(later, visible, blocks)
    exact = reference(limited)(later, visible, blocks)
    assert torch.equal(found.sort(dim=1).values, exact.sort(dim=1).values)


@UNTIMED
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 70), before=st.integers(0, 40),
    behind=st.integers(0, 40), after=st.integers(0, 40),
)  # fmt: skip
def test_no_column_is_readable_that_lies_behind_the_memory(
    rows: int, columns: int, before: int, behind: int, after: int
) -> None:
    """before, behind: columns of the memory beside those of the scores; after: behind all rows."""
    stride = before + columns + behind
    memory = torch.zeros(before + rows * stride + after)
    scores = memory.as_strided((rows, columns), (stride, 1), before)
    readable = readable_columns(scores)
    assert readable >= columns
    assert before + (rows - 1) * stride + readable <= memory.numel()
    if readable > columns:
        assert readable == -(-columns // WIDE_COLUMNS) * WIDE_COLUMNS
    wide = rows_for_wide_loads(rows, columns, torch.device("cpu"))
    assert wide.shape == (rows, columns)
    assert readable_columns(wide) % WIDE_COLUMNS == 0


def test_candidates_that_the_request_does_not_have() -> None:
    request = IndexTopKRequest(phase="decode", top_k=64, candidate_blocks=8)
    logits, visible = torch.randn(1, 70), torch.tensor([70], dtype=torch.int32)
    with pytest.raises(ValueError, match="candidates"):
        triton_top_k.bind(request, gpu("sm_80"))(logits, visible)
