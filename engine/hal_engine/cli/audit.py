"""`hal audit MODEL`: run the model and prove what ran, against the plan and down to the leaf.

`hal audit run PROGRAM` audits any PyTorch program, and `hal audit show REPORT` shows a stored
report; a folder or file of one of those names is reached as ./run or ./show.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hal.auditing.gate import AuditOutputs, finish_audit, parse_fail_on
from hal.cli import audit_options as gate
from hal.cli.option_groups import takes
from hal.errors import UsageError
from hal.text_files import read_regular_text
from hal.violations import violation_error
from hal_engine.cli import arguments as args
from hal_engine.planning import PlannedModel, plan_model

if TYPE_CHECKING:
    from hal.auditing.audit_waivers import AuditWaivers
    from hal.plugins.registry import BackendRegistry

Prompts = Annotated[
    Path | None,
    typer.Option(help="Prompts, one a line, in place of a synthetic load for every range."),
]
Mode = Annotated[
    Literal["full", "light"],
    typer.Option(help="full runs each batch twice, watched and timed; light samples steps."),
]
Verify = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE", help="Compare so many calls with the reference, e.g. 1% or 100%."
    ),
]


@takes(choices=args.read_model_choices, outputs=gate.read_outputs)
def audit(
    choices: args.ModelChoices,
    outputs: AuditOutputs,
    prompts: Prompts = None,
    mode: Mode = "full",
    verify: Verify = None,
    fail_on: gate.FailOn = None,
) -> None:
    """Run a model and prove which implementations ran; or `hal audit run PROGRAM`, any program.

    Exit code 1 if a finding of a class of --fail-on is there and no waiver allows it; by default
    lost-fast-path, unrouted, semantic and leaf-mismatch.
    """
    classes = parse_fail_on(fail_on)
    share = parse_share(verify)
    texts = [] if prompts is None else read_prompts(prompts)
    session = choices.session("hal audit")
    planned, registry, allowed = plan_audit(session)
    from hal_engine.audit.report import audit_model  # torch takes seconds: not for a user's mistake
    from hal_engine.audit.running import AuditOptions
    from hal_engine.worker_starting import WorkerOrder

    options = AuditOptions(mode=mode, verify=share, prompts=texts)
    shared = session.shared
    order = WorkerOrder(
        model=planned.config.source,
        options=planned.options.model_dump(mode="json"),
        use=dict(shared.use),
        waivers=str(shared.selection_settings.waivers or ""),
        disabled_plugins=shared.plugin_settings.disable,
    )
    report = audit_model(planned, registry, options, allowed, order)
    raise typer.Exit(finish_audit(report, outputs, classes))


def plan_audit(session: args.Session) -> tuple[PlannedModel, BackendRegistry, AuditWaivers]:
    """Plans what is to be audited. A lost fast path is planned as it would run: the gate is what
    fails for it, with a report of what it costs; an expired waiver is in the report, too.

    Raises what `plan_model` does; PlanError where nothing serves a call, and for lost fast paths of
    several ranks, which plan for themselves.
    """
    from hal.auditing.audit_waivers import read_audit_waivers

    shared = session.shared
    allowed = read_audit_waivers(shared.selection_settings.waivers)
    registry, use = shared.backends, shared.use
    shared.settings.check_consumed(["engine", "selection", "plugins"])
    planned = plan_model(
        session.model,
        session.options,
        registry,
        allowed.planning_book(),
        use,
        is_strict=False,
        must_run=True,
    )
    violations = planned.plan.violations
    if any(v.unserved for v in violations) or (violations and planned.options.tp > 1):
        raise violation_error(planned.plan.device_label, violations)
    return planned, registry, allowed


def parse_share(text: str | None) -> float:
    """0 to 1 from "1%", "100%" or "0.01". Raises UsageError."""
    if text is None:
        return 0.0
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise UsageError(
            "option --verify", "a share above 0 and at most 100%", repr(text), "e.g. --verify 1%"
        )
    return value


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not blank. Raises UsageError."""
    try:
        text = read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "option --prompts", "a readable text file", f"{path}: {error}", "correct the path"
        ) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError("option --prompts", "a prompt a line", f"{path}: no line", "write one")
    return lines
