"""Runs many programs of the zoo one after the other, each under an audit of its own, and writes
what was found: `python zoo_process.py REPORTS.json PROGRAM…`. Torch starts once for all of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

from hal.auditing.program import audit


def _hal_audited_program(path: str) -> None:
    """The frames outside of this function are nobody's: the observer stops here."""
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(path, run_name="__main__")


def main(target: str, programs: list[str]) -> None:
    reports = {}
    for program in programs:
        with audit(subject=program) as seen:
            _hal_audited_program(program)
        reports[program] = json.loads(seen.result.to_json())
    Path(target).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
