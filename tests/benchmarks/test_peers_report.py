"""The report of a run beside other engines says who was not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "title": "t",
        "date": "2026-01-01",
        "method": "m",
        "machine": {"cpu": "c", "flags": ["avx2"], "cores": 2},
        "threads": 2,
        "contenders": {
            "ours": {"rounds": [], "versions": {"a": "1"}},
            "theirs": {"rounds": [], "error": "no wheel for this Python"},
        },
    }


def test_who_failed_and_who_was_left_out_is_said(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from contenders.report import markdown

    text = markdown(document, [], "tokens/s")
    assert "- theirs: no wheel for this Python" in text
    assert "by choice" not in text
    text = markdown({**document, "left_out": ["third", "fourth"]}, [], "tokens/s")
    assert "Known and not in this run, by choice: third, fourth." in text
