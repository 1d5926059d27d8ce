"""The Python of docs/integrations.md runs as printed, one block after the other."""

from __future__ import annotations

from typing import Any

from document_blocks import ROOT, blocks_of
from routed_models import MODELS

DOCUMENT = ROOT / "docs" / "integrations.md"


def test_the_blocks_run() -> None:
    blocks = [b for b in blocks_of(DOCUMENT) if b.language == "python"]
    assert all(b.directive == ("python",) for b in blocks)
    names: dict[str, Any] = {}
    for block in blocks:
        # As printed: the document is ours, and a reader runs it too.
        exec(compile(block.text, block.name, "exec"), names)
    assert len(blocks) == 2


def test_every_tested_class_is_named() -> None:
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").partition("## What was seen")[2].split())
    listed = text.partition(": Llama")[2].partition(". Activations")[0]
    assert len(("Llama" + listed).split(",")) == len(MODELS)
