"""What a document shows of a command's output, compared with what the command prints.

What differs between machines is not compared: numbers with their units, hashes, names of CPUs,
which GEMM of its tier is fastest, and therefore where token ranges are split.
"""

from __future__ import annotations

import re

SHOWN_GAP = "…"


def normalised(line: str) -> str:
    """A line without what may differ from machine to machine."""
    line = re.sub(r"\b[0-9a-f]{16}\b", "HASH", line)
    line = re.sub(r"(\bon\s+)\S.*?\s+\((cpu:\d+)\)", r"\1DEVICE (\2)", line)
    line = re.sub(r"^\s*(cpu:\d+)\s{2,}.*", r"\1 DEVICE", line)
    line = re.sub(r"cpu\.gemm\.\w+", "cpu.gemm.ANY", line)
    line = re.sub(r"\d[\d.,:-]*…?", "N", line)
    line = re.sub(r"<?N ?(?:[kMGTP]i?B?|B|s|ms|µs)\b", "N", line)
    line = re.sub(r"─+", "─", line)
    line = re.sub(
        r"(\b(?:native|tuned|portable|reference))(?:\s+N(?:\s[mc])?)+$", r"\1", line.rstrip()
    )
    return " ".join(line.split())


def is_compared(line: str) -> bool:
    """Not compared: headings, which depend on the widths of cells; deeply indented rows, which are
    further token ranges; remarks that depend on what was measured."""
    blank = not line.strip() or line.startswith(" " * 20)
    varying = r"call site|implementation|\bsites\b|memory$|seen, |Times are|hal devices --measure"
    return not blank and not re.search(varying, line)


def check_shown(shown: tuple[str, ...], printed: str) -> None:
    """Every shown line is among the printed ones, in this order."""
    actual = [normalised(line) for line in printed.splitlines()]
    position = 0
    for line in shown:
        if line.strip() == SHOWN_GAP or not is_compared(line):
            continue
        wanted = normalised(line)
        assert wanted in actual[position:], f"not printed (any more): {line}\n\n{printed}"
        position = actual.index(wanted, position) + 1
