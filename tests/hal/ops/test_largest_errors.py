"""How far kernels may be from the exact result, as the ops say it."""

from __future__ import annotations

import pytest
import torch

from hal.ops import CATALOGUE
from kernel_errors import assert_exact


def test_a_kernel_is_at_least_as_close_as_any_implementation_has_to_be() -> None:
    for name, family in CATALOGUE.items():
        assert set(family.largest_errors) == {"float32", "bfloat16", "float16"}, name
        for dtype, share in family.largest_errors.items():
            assert share > 0.0, name
            if dtype in family.tolerances:
                assert share <= family.tolerances[dtype].rtol, f"{name} {dtype}"


def test_each_row_is_judged_by_its_own_size() -> None:
    exact = torch.randn(4, 64, dtype=torch.float64) * torch.logspace(-4, 4, 4).double()[:, None]
    step = CATALOGUE["attention"].largest_errors["bfloat16"]
    assert_exact("attention", exact.bfloat16(), exact)
    for row in range(4):
        off = exact.clone()
        off[row, 3] += 2 * step * exact[row].abs().max()
        with pytest.raises(
            AssertionError, match=f"attention, bfloat16: error .* at {row * 64 + 3}"
        ):
            assert_exact("attention", off.bfloat16(), exact)
    assert_exact("attention", off.bfloat16(), exact, times=4.0)
    lost = exact.bfloat16()
    lost[1, 2] = float("nan")
    with pytest.raises(AssertionError, match="not finite"):
        assert_exact("attention", lost, exact)
    with pytest.raises(AssertionError, match=r"\[3, 64\], exact \[4, 64\]"):
        assert_exact("attention", lost[:3], exact)
