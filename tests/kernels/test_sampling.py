"""CPU top-k / top-p filter against a stable float64 sort."""

from __future__ import annotations

import math

import pytest
import torch

from hal_kernels.sampling.cpu import bind_top_k_top_p

VOCAB = 5003


def exact_filter(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """One row [V]: indices in descending order, cut at k, then at the cumulative probability."""
    order = sorted(range(logits.numel()), key=lambda i: (-float(logits[i]), i))
    order = order[: max(top_k, 1)]
    if top_p < 1:
        probabilities = logits.double()[order].softmax(-1).cumsum(-1)
        order = order[: int((probabilities < top_p).sum()) + 1]
    out = torch.full_like(logits, -math.inf)
    out[order] = logits[order]
    return out


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    logits = torch.randn(9, VOCAB) * 3 + 2
    logits[1] = (logits[1] * 4).round() / 4  # many equal values
    logits[2, 40:] = -math.inf  # masked by a grammar
    logits[3] = 1.25  # all equal
    logits[4, ::2] = -0.0
    logits[4, 1::2] = 0.0
    logits[5] *= 100
    logits[6] *= 1e-3
    logits[7, 100] = math.inf
    return logits


@pytest.mark.parametrize("top_k", [1, 50, 2000, VOCAB])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.95, 1.0])
def test_filter_matches_a_stable_sort(rows: torch.Tensor, top_k: int, top_p: float) -> None:
    kernel = bind_top_k_top_p(vocab_size=VOCAB)
    padded = torch.full((rows.shape[0], VOCAB + 5), math.nan)
    padded[:, :VOCAB] = rows
    count = rows.shape[0]
    out = kernel(padded[:, :VOCAB], torch.full((count,), top_k), torch.full((count,), top_p))
    for index in range(count):
        if top_p < 1 and rows[index].isinf().any() and rows[index].max() == math.inf:
            continue  # a softmax of infinity is no number
        expected = exact_filter(rows[index], top_k, top_p)
        differing = int((out[index] != expected).sum())
        # A float64 sum in another order may move the border by one of many equal steps.
        assert differing <= (1 if top_p < 1 else 0), index


def test_rows_have_their_own_limits(rows: torch.Tensor) -> None:
    logits = rows[[0, 8, 5]]
    top_k, top_p = torch.tensor([7, VOCAB, VOCAB]), torch.tensor([1.0, 0.5, 1.0])
    out = bind_top_k_top_p(vocab_size=VOCAB)(logits, top_k, top_p)
    assert torch.equal(out[0], exact_filter(logits[0], 7, 1.0))
    # A float64 sum in another order may move the border by one.
    assert int((out[1] != exact_filter(logits[1], VOCAB, 0.5)).sum()) <= 1
    assert torch.equal(out[2], logits[2])


def test_a_nan_stays_visible(rows: torch.Tensor) -> None:
    logits = rows[:1].clone()
    logits[0, 1234] = math.nan
    out = bind_top_k_top_p(vocab_size=VOCAB)(logits, torch.tensor([5]), torch.tensor([0.9]))
    assert out[0, 1234].isnan()
    assert 1 <= int(out[0].isfinite().sum()) <= 5


def test_a_row_of_minus_infinity_is_kept() -> None:
    logits = torch.full((1, 64), -math.inf)
    out = bind_top_k_top_p(vocab_size=64)(logits, torch.tensor([5]), torch.tensor([0.9]))
    assert torch.equal(out, logits)
    with pytest.raises(ValueError, match="vocabulary"):
        bind_top_k_top_p(vocab_size=0)
