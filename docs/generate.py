"""Writes the generated parts of the documents: `python docs/generate.py`, or `make docs`.

A generated part stands between `<!-- generated: NAME ARGUMENT -->` and `<!-- end generated -->` and
is made from the code: the op catalogue, the candidates, the settings' models, the module
docstrings, the example plug-in. `--check` changes nothing and fails if a document is not current,
and a test does the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import audit_rules
import capability
import kernel_matrix
import older_triton
import pictures
import sources
import support
import support_matrix
import tables

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/support.md",
    "docs/support-matrix.md",
    "docs/plugins.md",
    "docs/serving.md",
    "docs/plan.md",
    "docs/devices.md",
    "docs/kernels.md",
    "docs/audit-rules.md",
)
# Files that are generated as a whole.
FILES: dict[str, Callable[[], str]] = {
    "docs/support-matrix.csv": support_matrix.csv,
    "docs/topology.svg": pictures.topology,
}
_PART = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+)(?: (?P<argument>[^>]*?))? -->\n)"
    r"(?P<text>.*?)(<!-- end generated -->)",
    re.DOTALL,
)

Maker = Callable[[str], str]
MAKERS: dict[str, Maker] = {
    "ops-by-backend": lambda _: support.ops_by_backend(),
    "candidates": lambda _: support.candidates(),
    "matrix": lambda _: support_matrix.page(),
    "matrix-letters": lambda _: support_matrix.legend(),
    "matrix-requests": lambda _: support_matrix.columns(),
    "op-arguments": lambda _: support.op_arguments(),
    "families": lambda _: tables.families(),
    "planned-families": lambda _: tables.planned_families(),
    "weight-formats": lambda _: tables.weight_formats(),
    "precisions": lambda _: tables.precisions(),
    "endpoints": lambda _: tables.endpoints(),
    "settings": tables.settings,
    "metrics": lambda _: tables.metrics(),
    "tiers": lambda _: tables.tiers(),
    "reason-kinds": lambda _: tables.reason_kinds(),
    "files": sources.files,
    "example": sources.example,
    "opencl": sources.opencl,
    "text": sources.whole_file,
    "kernel-matrix": lambda _: kernel_matrix.matrix(),
    "kernel-reasons": lambda _: kernel_matrix.reasons(),
    "kernel-narrow-loads": lambda _: kernel_matrix.narrow_load_reasons(),
    "older-triton": lambda _: older_triton.differences(),
    "kernel-limits": lambda _: kernel_matrix.limits(),
    "kernel-tunable": lambda _: kernel_matrix.tunable(),
    "audit-gates": lambda _: audit_rules.gates(),
    "audit-rules": lambda _: audit_rules.rules(),
    "db-devices": lambda _: capability.devices(),
    "db-architectures": lambda _: capability.architectures(),
    "db-families": lambda _: capability.families(),
    "db-tells": lambda _: capability.tells(),
    "db-forced": lambda _: capability.forced(),
    "db-schema": capability.schema,
    "db-units": lambda _: capability.units(),
    "db-rates": lambda _: capability.rates(),
    "db-sources": lambda _: capability.sources(),
}


def render(text: str, document: str) -> str:
    """`text` with every generated part made anew.

    Raises ValueError for a part that nobody makes or that does not end.
    """
    starts = re.findall(r"<!-- generated: ([\w-]+)", text)
    parts = list(_PART.finditer(text))
    if len(parts) != len(starts) or len(parts) != text.count("<!-- end generated -->"):
        raise ValueError(f"{document}: required one end per generated part, found {starts}")
    unknown = sorted(set(starts) - MAKERS.keys())
    if unknown:
        raise ValueError(f"{document}: required parts {sorted(MAKERS)}, found {unknown}")

    def make(match: re.Match[str]) -> str:
        made = MAKERS[match["name"]]((match["argument"] or "").strip())
        return f"{match[1]}{made.strip()}\n{match[5]}"

    return _PART.sub(make, text)


def main() -> int:
    """Writes, or with --check compares. Exit code 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not current")
    check = parser.parse_args().check
    outdated = []
    for document in (*DOCUMENTS, *FILES):
        path = ROOT / document
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = FILES[document]() if document in FILES else render(before, document)
        if after != before:
            outdated.append(document)
            if not check:
                path.write_text(after, encoding="utf-8")
    word = "not current" if check else "written"
    for document in outdated:
        sys.stdout.write(f"{document}: {word}\n")
    if outdated and check:
        sys.stdout.write("run `make docs`\n")
    return 1 if outdated and check else 0


if __name__ == "__main__":
    sys.exit(main())
