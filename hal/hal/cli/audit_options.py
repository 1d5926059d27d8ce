"""Options that every audit command has: the gate, and the files of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hal.auditing.gate import AuditOutputs, create_outputs

FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="CLASSES",
        help="Classes of findings that end in exit code 1, comma separated: lost-fast-path, "
        "unrouted, semantic, leaf-mismatch, unverified, ignored-setting; or none.",
    ),
]
Waivers = Annotated[
    Path | None, typer.Option("--waivers", metavar="FILE", help="Waiver file (TOML).")
]


def read_outputs(
    as_json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the report as JSON; - is standard output."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the report as JUnit XML.")
    ] = None,
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", metavar="FILE", help="Write the report as SARIF 2.1.0."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Write a comment for a pull request; - is standard output.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained page."),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(
            "--previous",
            metavar="FILE",
            help="An older report (--json): Markdown and page say what changed since.",
        ),
    ] = None,
) -> AuditOutputs:
    """The outputs that were asked for (for `takes`). Raises what `create_outputs` does."""
    return create_outputs(
        json=as_json, junit=junit, sarif=sarif, markdown=markdown, html=html, previous=previous
    )
