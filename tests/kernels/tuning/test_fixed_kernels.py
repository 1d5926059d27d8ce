"""Every kernel with tiles can be tuned, or says why not."""

from __future__ import annotations

import pytest

from hal.errors import SettingsError
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.tuning.fixed_kernels import BY_ROWS, FIXED, why_fixed
from hal_kernels.tuning.tunable_kernels import TUNABLE, find_tunable


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_kernel_can_be_tuned_or_says_why_not(name: str) -> None:
    """A kernel that is added is to be one of both."""
    if name in TUNABLE:
        assert name not in FIXED
        assert find_tunable(name).kernel == name
        return
    reason = why_fixed(name)
    assert len(reason) > 20
    with pytest.raises(SettingsError) as raised:
        find_tunable(name)
    assert reason in str(raised.value)
    assert name in FIXED or reason == BY_ROWS


def test_reasons_are_of_kernels_that_multiply() -> None:
    multiplying = {name for name, kernel in CATALOGUE.items() if kernel.uses_matrix_unit}
    assert multiplying == (TUNABLE.keys() & multiplying) | FIXED.keys()
    assert TUNABLE.keys() <= CATALOGUE.keys()
