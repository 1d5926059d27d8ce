"""Runs each program of this folder alone and under an audit: are the results the same bits, and
what did the audit find?

    python examples/audited-libraries/audit_all.py [PROGRAM.py …]
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import hal

FOLDER = Path(__file__).parent
LIBRARIES = {
    "dit_sample.py": "diffusers",
    "unet_denoise.py": "diffusers",
    "sentence_embed.py": "sentence_transformers",
}
"""Of the programs that need more than transformers."""


def printed(program: Path) -> str:
    """What a program prints: the hash of its results."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(program), run_name="__main__")
    return text.getvalue()


def compare(program: Path) -> bool:
    """Whether both runs of a program gave the same bits. Prints what was found."""
    alone = printed(program)
    with hal.audit() as report:
        audited = printed(program)
    word = "same bits" if alone == audited else "OTHER RESULTS"
    print(f"{program.name}: {word}, {len(report.findings)} findings")
    for finding in report.findings:
        place = str(finding.where).rpartition("site-packages/")[2]
        print(f"    {finding.gate.value}  {finding.rule}  {place}")
    return alone == audited


def main() -> int:
    """Exit code 1 if a result differs."""
    names = sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.py"))
    is_equal = True
    for name in names:
        library = LIBRARIES.get(name, "transformers")
        if name == Path(__file__).name:
            continue
        if find_spec(library) is None:
            print(f"{name}: left out, {library} is not installed")
            continue
        is_equal &= compare(FOLDER / name)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
