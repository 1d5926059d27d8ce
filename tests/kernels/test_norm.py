"""CPU RMS norm and int8 rounding against float64 torch."""

from __future__ import annotations

import math

import pytest
import torch

from hal_kernels.norm.cpu import bind_rms_norm
from hal_kernels.quantize.cpu import bind_quantize_rows

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.double()
    return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


@DTYPES
@pytest.mark.parametrize("hidden", [576, 64, 16, 37, 5])
@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, hidden + 7) * 3).to(dtype)[:, 3 : 3 + hidden]
    weight = torch.rand(hidden) + 0.5
    kernel = bind_rms_norm(hidden_size=hidden, dtype=dtype, weight=weight, eps=EPS)
    assert_close(kernel(x), exact_norm(x, weight), TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("hidden", [576, 37])
@pytest.mark.parametrize("tokens", [1, 130])
def test_norm_with_residual(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, tokens, hidden).to(dtype)
    weight = torch.rand(hidden) + 0.5
    total = x + residual
    kernel = bind_rms_norm(
        hidden_size=hidden, dtype=dtype, weight=weight, eps=EPS, has_residual=True
    )
    y, new_residual = kernel(x, residual)
    assert torch.equal(new_residual, total)
    assert_close(y, exact_norm(total, weight), TOLERANCE[dtype])


def test_norm_over_heads() -> None:
    x = torch.randn(11, 5 * 48 + 32)[:, 16 : 16 + 5 * 48]
    weight = torch.rand(48) + 0.5
    kernel = bind_rms_norm(
        hidden_size=48, dtype=torch.float32, weight=weight, eps=EPS, rows_per_token=5
    )
    expected = exact_norm(x.reshape(11, 5, 48), weight).flatten(1)
    assert_close(kernel(x), expected, TOLERANCE[torch.float32])


def test_norm_rows_do_not_depend_on_their_neighbours() -> None:
    x = torch.randn(200, 576)
    kernel = bind_rms_norm(hidden_size=576, dtype=torch.float32, weight=torch.ones(576), eps=EPS)
    assert torch.equal(kernel(x)[77:78], kernel(x[77:78].clone()))


@DTYPES
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
def test_norm_with_int8_rounding(has_residual: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 50, 576).to(dtype)
    weight = torch.rand(576) + 0.5
    total = x + residual if has_residual else x
    expected = exact_norm(total, weight)
    kernel = bind_rms_norm(
        hidden_size=576,
        dtype=dtype,
        weight=weight,
        eps=EPS,
        has_residual=has_residual,
        quantize="int8_per_token",
    )
    result = kernel(x, residual) if has_residual else kernel(x)
    (q, scale) = result[0] if has_residual else result
    if has_residual:
        assert torch.equal(result[1], total)
    assert q.dtype == torch.int8
    assert_close(scale, expected.abs().amax(-1, keepdim=True) / 127, 1e-5)
    # Half a step, and a little for values on the border between two.
    assert ((q.double() * scale.double() - expected).abs() <= 0.501 * scale.double()).all()


@DTYPES
@pytest.mark.parametrize("zero_point", [0, 128])
def test_quantize_rows(zero_point: int, dtype: torch.dtype) -> None:
    x = (torch.randn(40, 1536 + 16) * torch.rand(40, 1) * 10).to(dtype)[:, :1536]
    x[5] = 0
    q, scale = bind_quantize_rows(features=1536, dtype=dtype, zero_point=zero_point)(x)
    peak = x.float().abs().amax(-1, keepdim=True)
    expected_scale = torch.where(peak > 0, peak / 127, torch.ones_like(peak))
    expected = torch.round(x.float() / expected_scale).to(torch.int32) + zero_point
    assert q.dtype == (torch.uint8 if zero_point else torch.int8)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q.to(torch.int32), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_shows_values_that_are_not_finite(bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 17] = bad
    _, scale = bind_quantize_rows(features=64, dtype=torch.float32)(x)
    assert scale.isnan().flatten().tolist() == [False, True, False]


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="weight needs shape"):
        bind_rms_norm(hidden_size=8, dtype=torch.float32, weight=torch.ones(7), eps=EPS)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        bind_rms_norm(hidden_size=8, dtype=torch.float16, weight=torch.ones(8), eps=EPS)
    with pytest.raises(ValueError, match="features % 16"):
        bind_quantize_rows(features=20, dtype=torch.float32)
    with pytest.raises(ValueError, match="zero_point"):
        bind_quantize_rows(features=32, dtype=torch.float32, zero_point=1)
