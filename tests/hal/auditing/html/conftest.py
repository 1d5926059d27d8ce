"""Pages of reports, and a headless Chromium that opens them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from chromium import Browser, Page, open_browser
from hal.auditing.document import AuditReport
from hal.auditing.html import render_html
from hostile_reports import hostile_report
from layered_reports import changed_report, empty_report, model_report, program_report


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def audited() -> AuditReport:
    return model_report(seed=random.randrange(1 << 30))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, audited: AuditReport) -> dict[str, str]:
    """Addresses of pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "model": render_html(audited),
        "changes": render_html(changed_report(audited), audited),
        "program": render_html(program_report()),
        "empty": render_html(empty_report()),
        "hostile": render_html(hostile_report(), program_report()),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture
def model(browser: Browser, files: dict[str, str]) -> Iterator[Page]:
    page = browser.open_page(files["model"], width=1280, height=900)
    yield page
    assert page.problems == []
    assert page.requests == [files["model"]]
    page.close()
