"""What `hal serve` shows while a model is checked and loaded: bars, or lines on a pipe."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from hal_engine.cli.serve import _progress


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_bars_on_a_terminal_and_lines_on_a_pipe(is_terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=80, legacy_windows=False)
    with _progress(console) as report:
        for done in range(4):
            report("check", done, 3)
        report("load", 1, 30)
        if not is_terminal:
            assert written.getvalue() == "checking weights: done\n"
        report("load", 30, 30)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    if not is_terminal:
        assert text == "checking weights: done\npacking layers: done\n"
        return
    assert re.search(r"checking weights\s+━+ 100% 3/3 ", text)
    assert re.search(r"packing layers\s+━+ 100% 30/30 ", text)
