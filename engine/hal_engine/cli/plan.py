"""`hal plan MODEL`: what would run, chosen from config.json alone, here or on other hardware."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal.measurements import with_measurements
from hal.plan import Plan
from hal.text_files import write_user_text
from hal.violations import violation_error, waiver_stanzas
from hal.visible_text import visible_json
from hal_engine.cli import arguments as args
from hal_engine.cli.plan_compare import comparison_document, print_comparison
from hal_engine.cli.plan_report import print_report
from hal_engine.cli.plan_table import print_plan, terminal
from hal_engine.device_choice import (
    check_software,
    device_or_profile,
    parse_count,
    parse_group,
    parse_software,
    present_group,
)
from hal_engine.planning import plan_model


def plan(
    ctx: typer.Context,
    model: args.Model,
    group: Annotated[
        str | None, typer.Argument(help="Number of devices, as x8: tensor-parallel ranks.")
    ] = None,
    precision: args.Precision = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="A device of this host (`hal devices`), one that is known (`hal db list`), or "
            '"all" of this host; "NAME x8" is a group.'
        ),
    ] = None,
    host: args.Host = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help='Two devices or groups ("NAME x8") side by side.'),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help="Software on a device that is not here, NAME=VERSION."),
    ] = None,
    tp: args.TensorParallel = None,
    use: args.Use = None,
    waivers: args.Waivers = None,
    set_: args.Set = None,
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
    if compare is not None and (device is not None or group is not None):
        raise SettingsError(
            "option --compare", "two devices, and no other choice of a device", "both",
            "leave --device and x8 out",
        )  # fmt: skip
    name, count = parse_group(device or "")
    count = one_count(count, None if group is None else parse_count(group), tp)
    session = args.read_session(
        ctx,
        model,
        consumer="hal plan",
        assignments=set_,
        use=use,
        host=host,
        flags={
            "engine.precision": precision,
            "engine.device": name or None,
            "engine.tp": count,
            "selection.waivers": waivers,
        },
    )
    software = parse_software(with_ or ())
    if compare is None:
        groups = [(session.options.device, count)]
    else:
        groups = [_one_group(text, count) for text in compare]
    check_absent_software(session, [name for name, _ in groups], software)
    plans = [plan_device(session, *group, software) for group in groups]
    if json_ is not None:
        _write(plans[0].to_dict() if compare is None else comparison_document(plans), json_)
    elif compare is not None:
        print_comparison(plans, terminal())
    else:
        print_plan(plans[0], with_losers=losers)
        print_report(plans[0], terminal())
    if waiver_template is not None:
        _write_waivers(plans, waiver_template)
    _fail_for_violations(plans)


def check_absent_software(
    session: args.Session, names: Sequence[str], software: Mapping[str, str]
) -> None:
    """Software that no implementation for any of the absent devices asks about is an error."""
    registry = args.load_session_backends(session).registry
    here = {device.device_id for device in registry.devices} | {"", "all"}
    if software and not here.intersection(names):
        check_software(registry, [registry.profile(name) for name in names], software)


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


def one_count(*counts: int | None) -> int | None:
    """The number of devices, however it was given. Raises SettingsError for two different ones."""
    given = {count for count in counts if count is not None}
    if len(given) > 1:
        found = " and ".join(str(count) for count in sorted(given))
        raise SettingsError("number of devices", "one number", found, "give it once")
    return given.pop() if given else None


def _one_group(text: str, count: int | None) -> tuple[str, int | None]:
    name, own = parse_group(text)
    return name, count if own is None else own


def plan_device(
    session: args.Session, name: str, count: int | None, software: Mapping[str, str]
) -> Plan:
    """The plan for one device or group, as a report."""
    backends = args.load_session_backends(session)
    spec: DeviceSpec
    if name == "all":
        spec, size = present_group(backends.registry)
        count = size if count is None else count
        if count > size:
            raise SettingsError(
                "number of devices",
                f"at most the {size} of this host",
                f"x{count}",
                "name a device instead of all: a group of it need not be here",
            )
    else:
        spec = device_or_profile(backends.registry, name, software)
    options = session.options
    if count is not None:
        options = options.model_copy(update={"tp": count})
    planned = plan_model(
        session.model,
        options.model_copy(update={"device": name}),
        backends.registry,
        backends.waivers,
        backends.use,
        device=with_measurements(spec),
        is_strict=False,
    )
    return planned.plan


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
