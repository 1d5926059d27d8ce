"""Findings of peers out of an earlier result: their wheels and the compiler are the same, so they
are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hal_kernels.aot.evidence import Evidence
from kernel_peers.compiling import Finding


def load_earlier(path: Path, triton: str) -> tuple[dict[str, str], list[Finding]]:
    """Versions and peers' findings of a result in JSON.

    Raises ValueError if it was made with another Triton than the one that compiles ours now.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    versions = dict(document["versions"])
    if versions["triton"] != triton:
        raise ValueError(
            f"{path}: required a result made with triton {triton}, found {versions['triton']}; "
            "compile the peers' kernels again: leave --peers out"
        )
    return versions, [found for cell in document["cells"] for found in _peers_of(cell)]


def check_complete(own: list[Finding], peers: list[Finding], path: Path) -> None:
    """Raises ValueError if a problem was compared with nobody then: it would read as level."""
    compared = {(found.problem, found.evidence.target) for found in peers}
    for found in own:
        if (found.problem, found.evidence.target) not in compared:
            raise ValueError(
                f"{path}: required peers of {found.problem!r} on {found.evidence.target}, found "
                "none; compile the peers' kernels again: leave --peers out"
            )


def _peers_of(cell: Mapping[str, Any]) -> Iterator[Finding]:
    for document in cell["findings"][1:]:
        fields = {k: v for k, v in document.items() if k not in ("resident_warps", "evidence")}
        yield Finding(**fields, evidence=Evidence(**document["evidence"]))
