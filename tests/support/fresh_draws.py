"""Numbers that are new in every run, and the same in all processes of one: pytest's workers must
collect the same tests. `HALSTACK_TEST_SEED` repeats a run; its head says which number it had."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

VARIABLE = "HALSTACK_TEST_SEED"
_T = TypeVar("_T")


def run_seed() -> str:
    """Set by the first process of a run, inherited by its workers."""
    return os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(10**9)))


def fresh_seeds(count: int, salt: str = "") -> list[int]:
    """So many different seeds. salt: another one draws others."""
    return random.Random(f"{run_seed()}/{salt}").sample(range(10**6), count)


def fresh_choice(options: Sequence[_T], count: int = 1) -> list[_T]:
    """So many of the options."""
    return random.Random(run_seed()).sample(list(options), count)
