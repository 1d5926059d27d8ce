"""Findings out of an earlier result: of peers, whose wheels and compiler are the same, or of the
cells that are not compiled now."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hal_kernels.aot.evidence import Evidence
from kernel_peers.compiling import Finding


def load_earlier(path: Path, triton: str) -> tuple[dict[str, str], list[Finding]]:
    """Versions and peers' findings of a result in JSON.

    Raises ValueError if it was made with another Triton than the one that compiles ours now.
    """
    document, versions = _read(path, triton)
    return versions, [found for cell in document["cells"] for found in _findings_of(cell)[1:]]


def load_others(
    path: Path, triton: str, patterns: Sequence[str], targets: Container[str]
) -> tuple[dict[str, str], list[Finding]]:
    """Date by problem, and all findings, ours included, of the cells of a result that are not of
    these targets or whose problem matches no pattern. Raises ValueError as `load_earlier`."""
    document, _ = _read(path, triton)
    cells = [
        cell
        for cell in document["cells"]
        if cell["target"] not in targets
        or not any(fnmatchcase(cell["problem"], pattern) for pattern in patterns)
    ]
    kept = {cell["problem"] for cell in cells}
    dates = {name: str(document.get("kept", {}).get(name, document["date"])) for name in kept}
    return dates, [found for cell in cells for found in _findings_of(cell)]


def _read(path: Path, triton: str) -> tuple[dict[str, Any], dict[str, str]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    versions = dict(document["versions"])
    if versions["triton"] != triton:
        raise ValueError(
            f"{path}: required a result made with triton {triton}, found {versions['triton']}; "
            "compile the peers' kernels again: leave --peers and --beside out"
        )
    return document, versions


def check_complete(own: list[Finding], peers: list[Finding], path: Path) -> None:
    """Raises ValueError if a problem was compared with nobody then: it would read as level."""
    compared = {(found.problem, found.evidence.target) for found in peers}
    for found in own:
        if (found.problem, found.evidence.target) not in compared:
            raise ValueError(
                f"{path}: required peers of {found.problem!r} on {found.evidence.target}, found "
                "none; compile the peers' kernels again: leave --peers out"
            )


def _findings_of(cell: Mapping[str, Any]) -> list[Finding]:
    """Ours first."""
    return [
        Finding(
            **{k: v for k, v in document.items() if k not in ("resident_warps", "evidence")},
            evidence=Evidence(**document["evidence"]),
        )
        for document in cell["findings"]
    ]
