"""How far a result is from the exact one."""

from __future__ import annotations

from typing import Any

import torch

LEAST = 1e-9  # a row whose largest value is smaller is compared with this


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, which may be one, a tuple with None in it, or nothing."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for one in result for tensor in tensors_of(one)]
    return []


def error_of(found: Any, exact: Any) -> float:
    """The largest error of any value, relative to the largest value of its row; infinite where
    shapes, infinities or integers differ, NaN where a value is not a number.

    Raises ValueError if there is nothing to compare: a check of nothing must not pass.
    """
    got, want = tensors_of(found), tensors_of(exact)
    if not want or len(got) != len(want):
        raise ValueError(f"required as many results as the exact ones, found {len(got)}")
    return max(_error(a, b) for a, b in zip(got, want, strict=True))


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    if found.numel() != exact.numel():
        return float("inf")
    found = found.view_as(exact) if found.is_contiguous() else found.reshape(exact.shape)
    if not exact.is_floating_point():
        return 0.0 if bool((found == exact).all()) else float("inf")
    if not exact.numel():
        return 0.0
    got, want = found.double(), exact.double()
    if bool(got.isnan().any()):
        return float("nan")
    if not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    got, want = got.masked_fill(got.isinf(), 0.0), want.masked_fill(want.isinf(), 0.0)
    peak = want.abs().amax(dim=-1, keepdim=True) if want.dim() else want.abs()
    return float(((got - want).abs() / (peak + LEAST)).max())


def is_within(error: float, tolerance: float) -> bool:
    """NaN is not."""
    return error <= tolerance


def decoded_error(found: Any, exact: Any) -> float:
    """Of (values, scales) that were rounded: relative to the largest value of a row, after both
    are floating. A tie may fall to either side, so bits need not be equal."""
    return max(
        _error(a.float(), b.double())
        for a, b in zip(tensors_of(found), tensors_of(exact), strict=True)
    )


def differing_bytes(found: Any, exact: Any) -> float:
    """The share of bytes that differ: of packed rows, of which a tie may fall to either side."""
    pairs = list(zip(tensors_of(found), tensors_of(exact), strict=True))
    different = sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in pairs)
    return different / sum(_bytes(b).numel() for _, b in pairs)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
