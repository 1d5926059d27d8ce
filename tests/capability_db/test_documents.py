"""docs/devices.md: its Python runs, its table of devices is whole, its example is an overlay."""

from __future__ import annotations

import pytest

from document_blocks import ROOT, blocks_of
from hal_capability_db import CONFIDENCES, load_database

DOCUMENT = ROOT / "docs" / "devices.md"
PYTHON = [block for block in blocks_of(DOCUMENT) if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_of_the_document(block: object) -> None:
    exec(compile(block.text, block.name, "exec"), {})  # type: ignore[attr-defined]


def test_everything_is_listed() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    database = load_database(())
    for name in (*database.devices, *database.architectures, *database.families):
        assert f"`{name}`" in text
    for confidence in CONFIDENCES:
        assert f"| `{confidence}` |" in text


def test_the_example_is_a_valid_overlay() -> None:
    database = load_database((ROOT / "examples" / "own-devices",))
    card = database.device("rtx-pro-5000-lab")
    assert not card.peak["fp8"].is_verified
    assert database.device("rtx-4090").measured["memory_bandwidth"].value == 941e9
    assert "fp8" in database.device("rtx-4090").peak
