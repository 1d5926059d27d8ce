"""The Triton filter of logits keeps what the reference keeps, of equal logits the same ones."""

from __future__ import annotations

import pytest
import torch

import hal_kernels.sampling.triton as triton_sampling
from gpu_devices import gpu
from hal.ops.sampling import TopKTopPRequest, reference

INF, NAN = float("inf"), float("nan")
ARCHS = ("sm_80", "sm_90")  # a thread's logits all at a time, and two after two


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_same(
    arch: str, logits: torch.Tensor, top_k: list[int], top_p: list[float]
) -> torch.Tensor:
    request = TopKTopPRequest(vocab_size=logits.shape[1])
    given = (logits, torch.tensor(top_k), torch.tensor(top_p))
    found = triton_sampling.bind(request, gpu(arch))(*given)
    want = reference(request)(*given)
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(neginf=-1e30), want.nan_to_num(neginf=-1e30))
    return found


@pytest.mark.parametrize("vocabulary", [1, 37, 1024, 2500])
def test_top_k_of_many_equal_logits(arch: str, vocabulary: int) -> None:
    coarse = torch.randint(-3, 4, (4, vocabulary)) / 2.0
    coarse[0] = 0.0
    coarse[1] *= -0.0  # zeros of both signs are equal
    found = assert_same(arch, coarse, [1, vocabulary // 2, 7, vocabulary + 3], [1.0] * 4)
    assert int((found[0] > -INF).sum()) == 1
    wide = torch.randn(3, vocabulary + 9) * 1e3
    assert_same(arch, wide[:, 9:], [0, 3, max(vocabulary - 1, 1)], [1.0, 1.0, 1.0])


def test_top_p_alone_and_after_top_k(arch: str) -> None:
    # Powers of two: probabilities and their sums are exact but for the common factor.
    steps = torch.tensor([3.0, 1.0, 2.0, 0.0, 2.0, 1.0]) * 0.6931471805599453
    rows = steps.repeat(6, 1)
    # Of weights 8 2 4 1 4 2 the sum is 21: bounds between the steps, never at one.
    shares = [7.5 / 21, 9.0 / 21, 14.0 / 21, 17.0 / 21, 20.5 / 21, 0.0]
    found = assert_same(arch, rows, [100] * 6, shares)
    assert (found > -INF).sum(dim=1).tolist() == [1, 2, 3, 4, 6, 1]
    # After k = 4 the weights are 8 4 4 2.
    shares = [7.5 / 18, 9.0 / 18, 13.0 / 18, 17.0 / 18, 0.999, -1.0]
    found = assert_same(arch, rows, [4] * 6, shares)
    assert (found > -INF).sum(dim=1).tolist() == [1, 2, 3, 4, 4, 1]
    assert found[3].isfinite().tolist() == [True, True, True, False, True, False]


def test_top_p_that_ends_among_equals(arch: str) -> None:
    flat = torch.zeros(4, 1500)
    found = assert_same(arch, flat, [1500, 1500, 40, 40], [10.5 / 1500, 0.5001, 3.5 / 40, 0.99])
    assert (found > -INF).sum(dim=1).tolist() == [11, 751, 4, 40]


def test_random_rows_keep_a_share_that_reaches_top_p_and_no_more(arch: str) -> None:
    logits = torch.randn(3, 2100) * torch.tensor([[0.1], [2.0], [9.0]])
    request = TopKTopPRequest(vocab_size=2100)
    top_k, top_p = torch.tensor([2100, 300, 50]), torch.tensor([0.9, 0.7, 0.95])
    found = triton_sampling.bind(request, gpu(arch))(logits, top_k, top_p)
    for row, k, p, kept in zip(logits.double(), top_k, top_p.double(), found, strict=True):
        values, order = row.sort(descending=True, stable=True)
        share = values[:k].softmax(dim=0).cumsum(dim=0)
        count = int((kept > -INF).sum())
        # Every sum in float32 is of at most 2100 terms: its border may move by what it rounds.
        assert share[count - 1] >= p - 1e-5
        assert count == 1 or share[count - 2] < p + 1e-5
        assert torch.equal(kept[order[:count]].double(), values[:count])


def test_rows_without_a_distribution(arch: str) -> None:
    rows = torch.randn(5, 20)
    rows[0, 4], rows[1, 3:9], rows[2, 5], rows[3] = NAN, INF, -INF, -INF
    rows[4] = torch.where(torch.arange(20) == 13, 0.0, -200.0)  # exp of the rest is zero
    assert_same(arch, rows, [3, 4, 6, 2, 20], [0.5, 0.5, 0.5, 0.5, 0.999])
    assert_same(arch, rows, [20] * 5, [1.0] * 5)
    assert triton_sampling.bind(TopKTopPRequest(vocab_size=20), gpu(arch))(
        rows[:0], torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    ).shape == (0, 20)
