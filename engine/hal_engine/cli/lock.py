"""`hal lock MODEL`: the plan with everything that it depends on, to be kept and checked later."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.auditing.changes import ChangeKind, parse_change_kinds
from hal.auditing.lock import create_lock, distributions_of
from hal.auditing.lock_diff import diff_locks
from hal.auditing.plan_documents import LockDocument, lock_from, read_lock
from hal.auditing.report_files import check_writable, write_report_file
from hal.cli.diff import write_diff
from hal.cli.option_groups import takes
from hal.errors import UsageError
from hal.plan import Plan
from hal.plugins.registry import BackendRegistry
from hal.plugins.states import PluginStatus
from hal.violations import violation_error
from hal.visible_text import visible_json
from hal_engine.cli.plan_target import PlanTarget, read_plan_target

_STANDARD_OUTPUT = Path("-")


@takes(target=read_plan_target)
def lock(
    target: PlanTarget,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where it is written; - is output."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Plan again and compare with this lock."),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="KINDS",
            help="With --check: kinds of changes that fail (see `hal diff`); default: all.",
        ),
    ] = None,
    json_: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="With --check: the differences as JSON."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="With --check: for a pull request."),
    ] = None,
) -> None:
    """Write what a model's plan is, and what it depends on: versions, variables, the devices'
    profiles, the source of its kernels. With --check: exit code 1 if any of it has changed.
    """
    if (output is None) == (check is None):
        found = "neither" if output is None else "both"
        raise UsageError("hal lock", "-o FILE or --check FILE", found, "give one of them")
    if check is None and any(option is not None for option in (fail_on, json_, markdown)):
        raise UsageError(
            "hal lock", "--check", "--fail-on, --json or --markdown without it", "leave them out"
        )
    kinds = parse_change_kinds(fail_on)
    older = None if check is None else read_lock(check)
    if output is not None and output != _STANDARD_OUTPUT:
        check_writable(output, "option --output")
    resolved = target.resolve("hal lock")
    (planned,) = resolved.plans()
    session = resolved.session
    document = lock_document(planned, session.model, session.shared.backends)
    if older is not None:
        raise typer.Exit(_compare(older, document, kinds, json_, markdown))
    _refuse_violations(planned)
    text = visible_json(json.dumps(document, indent=1, ensure_ascii=False)) + "\n"
    if output == _STANDARD_OUTPUT:
        sys.stdout.write(text)
    elif output is not None:
        write_report_file(output, text, who="option --output")
        typer.echo(f"{output}: plan {document['plan_hash']}")


def lock_document(plan: Plan, model: Path, registry: BackendRegistry) -> dict[str, Any]:
    """The lock of a plan that was made with these plug-ins."""
    loaded = (s.entry for s in registry.states if s.status is PluginStatus.LOADED)
    distributions = distributions_of((entry.distribution, entry.version) for entry in loaded)
    return create_lock(plan, model=model.name, distributions=distributions)


def _compare(
    older: LockDocument,
    document: dict[str, Any],
    kinds: frozenset[ChangeKind] | None,
    json_path: Path | None,
    markdown: Path | None,
) -> int:
    """Prints what changed since the lock; 1 if it is of a kind that fails, which all are by
    default."""
    newer = lock_from(json.loads(json.dumps(document)), Path("the plan made now"))
    found = diff_locks(older, newer)
    write_diff(found, json_path, markdown)
    return found.exit_code(frozenset(ChangeKind) if kinds is None else kinds)


def _refuse_violations(plan: Plan) -> None:
    """A plan that may not be used is not locked. Raises PlanError."""
    if plan.violations:
        raise violation_error(plan.device_label, plan.violations)
