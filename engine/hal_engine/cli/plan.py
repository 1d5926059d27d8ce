"""`hal plan MODEL`: what would run, chosen from config.json alone, here or on other hardware."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.cli.option_groups import takes
from hal.errors import SettingsError
from hal.plan import Plan
from hal.text_files import write_user_text
from hal.violations import violation_error, waiver_stanzas
from hal.visible_text import visible_json
from hal_engine.cli.plan_compare import comparison_document, print_comparison
from hal_engine.cli.plan_kernels import print_kernels
from hal_engine.cli.plan_report import print_report
from hal_engine.cli.plan_table import print_plan, terminal
from hal_engine.cli.plan_target import PlanTarget, read_plan_target
from hal_engine.device_choice import parse_group


@takes(target=read_plan_target)
def plan(
    target: PlanTarget,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help='Two devices or groups ("NAME x8") side by side.'),
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write the plan as JSON; - is standard output.")
    ] = None,
    waiver_template: Annotated[
        Path | None,
        typer.Option(help="Write a waiver for each lost fast path, to fill in and pass back."),
    ] = None,
    losers: Annotated[
        bool, typer.Option("--losers", help="Show every candidate that was not chosen, and why.")
    ] = False,
) -> None:
    """Show every op of a model with its implementation, tier, and why better ones lost.

    Reads config.json or a GGUF header, never a weight. Fails if a fast path is lost.
    """
    if compare is not None and target.names_device:
        raise SettingsError(
            "option --compare", "two devices, and no other choice of a device", "both",
            "leave --device and x8 out",
        )  # fmt: skip
    resolved = target.resolve("hal plan")
    groups = None if compare is None else [_one_group(text, resolved.count) for text in compare]
    plans = resolved.plans(groups)
    if json_ is not None:
        _write(plans[0].to_dict() if compare is None else comparison_document(plans), json_)
    elif compare is not None:
        print_comparison(plans, terminal())
    else:
        print_plan(plans[0], with_losers=losers)
        print_kernels(plans[0], terminal())
        print_report(plans[0], terminal())
    if waiver_template is not None:
        _write_waivers(plans, waiver_template)
    _fail_for_violations(plans)


def _write_waivers(plans: Sequence[Plan], path: Path) -> None:
    """Raises SettingsError rather than write over a file."""
    stanzas = [stanza for plan in plans for stanza in waiver_stanzas(plan.violations)]
    try:
        write_user_text(path, "\n\n".join(dict.fromkeys(stanzas)) + "\n", may_replace=False)
    except FileExistsError as error:
        raise SettingsError(
            "option --waiver-template", "a new file", f"{path}, which exists", "name another"
        ) from error
    except OSError as error:
        raise _unwritable("--waiver-template", path, error) from error


def _one_group(text: str, count: int | None) -> tuple[str, int | None]:
    name, own = parse_group(text)
    return name, count if own is None else own


def _write(document: Mapping[str, Any], path: Path) -> None:
    text = visible_json(json.dumps(document, indent=1, ensure_ascii=False)) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        write_user_text(path, text)
    except OSError as error:
        raise _unwritable("--json", path, error) from error


def _unwritable(option: str, path: Path, error: OSError) -> SettingsError:
    found = f"{path}: {error.strerror or error}"
    return SettingsError(f"option {option}", "a file that can be written", found, "name another")


def _fail_for_violations(plans: Sequence[Plan]) -> None:
    """Raises PlanError for the first plan that may not be used."""
    sys.stdout.flush()
    for plan in plans:
        if plan.violations:
            raise violation_error(plan.device_label, plan.violations)
