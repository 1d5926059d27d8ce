"""Golden plans: what a plan of DeepSeek-V4.1-Flash says on seven groups of accelerators."""

from __future__ import annotations

import difflib
import re

import pytest

from golden_plans import DEVICES, FOLDER, WORLD_SIZE, golden_path, golden_text


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_is_as_it_was_reviewed(device: str) -> None:
    path = golden_path(device)
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    now = golden_text(device)
    difference = "\n".join(
        difflib.unified_diff(
            stored.splitlines(), now.splitlines(), "reviewed", "now", "", "", n=0, lineterm=""
        )
    )
    assert stored == now, f"{difference}\nreview it, then: python tests/support/golden_plans.py"


def test_goldens_are_reviewable_and_free_of_what_changes_by_itself() -> None:
    assert set(FOLDER.iterdir()) == {golden_path(device) for device in DEVICES}
    for device in DEVICES:
        text = golden_path(device).read_text(encoding="utf-8")
        head, _, sites = text.rpartition("\n\n")
        assert head.startswith(f"deepseek-v4.1-flash on {WORLD_SIZE} × ")
        assert len(sites.splitlines()) > 60
        # Every line of a site has its tier, and what is lost names a better one.
        for line in sites.splitlines():
            assert re.search(r"  (native|tuned|portable|reference) \S+", line), line
            assert "<" not in line or re.search(r"< (any )?(native|tuned|portable)", line), line
        assert not re.search(r"[0-9a-f]{16}", text), "a hash"
        assert "2.13.0" not in text, "a version"
