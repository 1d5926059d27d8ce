"""The support matrix and its answers, made once for the tests that sweep it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hal.device import DeviceSpec
from hal.ops import CATALOGUE

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.fixture(scope="session")
def matrix() -> Iterator[ModuleType]:
    import importlib

    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("support_matrix")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="session")
def requests(matrix: ModuleType) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = matrix.REQUESTS
    return found


@pytest.fixture(scope="session")
def answers(matrix: ModuleType) -> Sequence[tuple[DeviceSpec, str, str]]:
    """(device with all software, candidate, letters); policies apart, which are no predicates."""
    found = []
    for plain in matrix.devices():
        device = matrix.with_software(plain)
        for op in CATALOGUE:
            for candidate in matrix.candidates(device, op):
                letters = "".join(
                    matrix.letter(
                        candidate.not_supported_reasons(r),
                        is_disabled=False,
                        changes_meaning=bool(candidate.semantic_notes(r)),
                    )
                    for r in matrix.REQUESTS[op].values()
                )
                found.append((device, candidate.name, letters))
    return found
