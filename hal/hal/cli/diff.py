"""`hal diff OLD NEW`: what changed between two plans, two locks or two audit reports."""

from __future__ import annotations

import json as json_library
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hal.errors import DocumentError, UsageError
from hal.visible_text import visible_json

if TYPE_CHECKING:
    from hal.auditing.changes import Diff

_KINDS = ("plan", "lock", "audit report")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("diff")(_diff)


def _diff(
    old: Annotated[Path, typer.Argument(help="A plan (hal plan --json), lock or audit report.")],
    new: Annotated[Path, typer.Argument(help="Another one of the same kind.")],
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="KINDS",
            help="Exit code 1 if one of these was found, else 0; comma separated, or none.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write it as JSON; - is standard output."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write it for a pull request; - as above."),
    ] = None,
) -> None:
    """Classify each change; the exit code is that of the worst.

    0 nothing; 10 renamed; 11 reasons; 12 faster; 13 version; 14 environment; 15 setting; 16
    kernel-source; 17 profile; 18 implementation; 19 site-added; 20 site-removed; 21 model; 22
    device; 23 slower; 24 semantics. With --fail-on: 1 or 0.
    """
    from hal.auditing.changes import parse_change_kinds

    kinds = parse_change_kinds(fail_on)
    if json is not None and json == markdown:
        raise UsageError("hal diff", "a place each", f"{json} twice", "name another file")
    found = diff_files(old, new)
    write_diff(found, json, markdown)
    raise typer.Exit(found.exit_code(kinds))


def diff_files(old: Path, new: Path) -> Diff:
    """The changes from one file to the other.

    Raises:
        DocumentError: one cannot be read, is of no known kind, or of another kind than the other.
    """
    from hal.auditing.document import SCHEMA
    from hal.auditing.lock_diff import diff_locks, diff_plans
    from hal.auditing.plan_documents import LOCK_SCHEMA, lock_from, plan_from
    from hal.auditing.report_diff import diff_reports
    from hal.auditing.report_files import parse_document, read_document_text, read_report, shown
    from hal.plan import SCHEMA as PLAN_SCHEMA

    schemas = {PLAN_SCHEMA: "a plan", LOCK_SCHEMA: "a lock", SCHEMA: "an audit report"}
    documents = [parse_document(read_document_text(path), path) for path in (old, new)]
    found = []
    for path, document in zip((old, new), documents, strict=True):
        schema = document.get("schema")
        if schema not in schemas:
            raise DocumentError(
                f"{path}, key schema",
                " or ".join(f'"{known}"' for known in schemas),
                shown(schema) if "schema" in document else "no schema",
                "write it with `hal plan --json`, `hal lock` or `hal audit --json`",
            )
        found.append(schema)
    if found[0] != found[1]:
        raise DocumentError(
            "hal diff",
            "two files of one kind",
            f"{old} is {schemas[found[0]]}, {new} {schemas[found[1]]}",
            f"name two of {', '.join(_KINDS)}",
        )
    if found[0] == PLAN_SCHEMA:
        return diff_plans(plan_from(documents[0], old), plan_from(documents[1], new))
    if found[0] == LOCK_SCHEMA:
        return diff_locks(lock_from(documents[0], old), lock_from(documents[1], new))
    return diff_reports(read_report(old), read_report(new))


def write_diff(found: Diff, json: Path | None, markdown: Path | None) -> None:
    """As tables, unless standard output has one of the others; and the files.

    Raises:
        DocumentError: a file that cannot be written.
    """
    from hal.auditing.diff_text import print_diff, render_diff_markdown
    from hal.auditing.gate import STANDARD_OUTPUT
    from hal.auditing.report_files import write_report_file
    from hal.cli.output import create_console

    if STANDARD_OUTPUT not in (json, markdown):
        print_diff(found, create_console())
    for path, option in ((json, "--json"), (markdown, "--markdown")):
        if path is None:
            continue
        if path is json:
            text = json_library.dumps(found.to_dict(), indent=1, ensure_ascii=False)
            text = visible_json(text) + "\n"
        else:
            text = render_diff_markdown(found)
        if path == STANDARD_OUTPUT:
            sys.stdout.write(text)
        else:
            write_report_file(path, text, who=f"option {option}")
