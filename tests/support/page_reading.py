"""What tests of the audit's page read of it in a browser, and do to it."""

from __future__ import annotations

import json
from typing import Any

from chromium import Page

PAGES = ("model", "changes", "program", "empty", "hostile")
"""Names of the pages that fixtures make."""


def shown_rows(page: Page) -> list[int]:
    """Numbers of the rows that the table shows, in its order."""
    shown: list[int] = page.evaluate("""[...document.querySelectorAll('#row-table tbody tr')]
        .filter((row) => row.checkVisibility()).map((row) => Number(row.dataset.i))""")
    return shown


def set_value(page: Page, selector: str, value: str) -> None:
    page.evaluate(f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
        e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}}));
        e.dispatchEvent(new Event('change', {{bubbles: true}})); }})()""")


def focus_first_cell(page: Page) -> None:
    page.evaluate("document.querySelector('#heat [tabindex=\"0\"]').focus()")


def cell(page: Page) -> Any:
    return page.evaluate("document.activeElement.dataset.find")
