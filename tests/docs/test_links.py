"""Links between the documents lead somewhere, and nothing in them belongs to one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from document_blocks import ROOT, documents

LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(text), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in LINK.findall(_without_code(text)):
        if link.startswith(("https://", "http://127.0.0.1")):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert file.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), link


def test_readme_leads_to_every_document() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(text)}
    wanted = {p for p in documents() if p.parent in (ROOT, ROOT / "docs")} - {ROOT / "README.md"}
    assert wanted <= linked


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_of_one_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"/(?:root|home|work|Users)/\S*", text)
