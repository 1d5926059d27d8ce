"""Fresh random numbers for every test, and one thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> torch.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")  # shown when a test fails
    return torch.Generator().manual_seed(seed)
