"""The gate in the sample workflow: green as it is, red when a candidate is removed, and the comment
that the pull request gets."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from audit_ci import EXAMPLE, REMOVED, Checkout, green_and_red, steps, use_as_base, without_figures

# Five processes that load a model or plan it, on a machine that may be busy.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, Checkout, dict[str, int]]:
    """Both trees after the steps of the workflow, and the steps' exit codes."""
    green, red = green_and_red(tmp_path_factory.mktemp("audit-ci"))
    audit, lock = steps()["audit"]["run"], steps()["lock"]["run"]
    codes = {"green audit": green.run(audit), "green lock": green.run(lock)}
    use_as_base(green.folder / "audit.json", red)
    codes |= {"red audit": red.run(audit), "red lock": red.run(lock)}
    return green, red, codes


def test_green_as_it_is_and_red_without_a_candidate(
    ran: tuple[Checkout, Checkout, dict[str, int]],
) -> None:
    green, red, codes = ran
    said = "\n".join(green.output + red.output)
    assert codes == {"green audit": 0, "green lock": 0, "red audit": 1, "red lock": 1}, said


def test_every_file_that_later_steps_take_is_there(
    ran: tuple[Checkout, Checkout, dict[str, int]],
) -> None:
    for checkout, count in zip(ran[:2], (0, 1), strict=True):
        folder = checkout.folder
        sarif = json.loads((folder / "audit.sarif").read_text())
        errors = [r for r in sarif["runs"][0]["results"] if r["level"] == "error"]
        assert len(errors) == count
        root = ElementTree.parse(folder / "audit.xml").getroot()
        assert root.attrib["failures"] == str(count)
        assert "<html" in (folder / "audit.html").read_text()
        report = json.loads((folder / "audit.json").read_text())
        lost = [f for f in report["findings"] if f["gate"] == "lost-fast-path"]
        assert len(lost) == count
    assert lost[0]["op"] == "attention.decode"
    assert lost[0]["time_us"] > 0


def test_the_comment_is_the_one_that_is_kept(
    ran: tuple[Checkout, Checkout, dict[str, int]],
) -> None:
    """A wanted change: `python tests/support/audit_ci.py` writes it anew."""
    comment = ran[1].comment()
    kept = (EXAMPLE / "comment.md").read_text(encoding="utf-8")
    assert without_figures(comment) == without_figures(kept)
    assert "### hal audit: failed" in comment
    assert "1 new finding, 0 gone" in comment
    assert "### hal diff: slower" in comment
    assert REMOVED in comment
    green = ran[0].comment()
    assert "### hal audit: passed" in green
    assert "### hal diff: nothing differs" in green


def test_the_workflow_is_well_formed() -> None:
    workflow = yaml.safe_load((EXAMPLE / "audit.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"]["security-events"] == "write"
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[a-z-]+/[a-z-]+(/[a-z-]+)?@v\d+", use) for use in uses)
    for step in job["steps"]:
        assert {"run", "uses"} & set(step)
    by_id = steps()
    assert by_id["lock"]["if"] == "always()"  # a failed audit does not hide a changed plan
    assert Path(EXAMPLE / "prompts.txt").read_text().splitlines()
