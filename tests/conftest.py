"""Fixtures that several packages' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal_engine.fetch_smollm2 import fetch_smollm2

MODEL_CACHE = Path(__file__).resolve().parent.parent / "models"  # the folder `make serve` uses


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct (Q4_1), downloaded once; the tests fail without it."""
    return fetch_smollm2(MODEL_CACHE)
