"""`hal doctor`: every plug-in's state with its reason; `--list` runs no code of a plug-in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal.cli.context import CliContext, cli_context
from hal.cli.output import print_json, print_table, print_text, print_variables
from hal.errors import UsageError
from hal.plugins.listing import list_plugins

if TYPE_CHECKING:
    from hal.device import SelfTestResult
    from hal.errors import DeviceClaimError
    from hal.plugins.registry import BackendRegistry
    from hal.plugins.states import PluginState
    from hal.plugins.survey import PluginSurvey
    from hal.topology import PciFunction

    Check = tuple[str, SelfTestResult]  # device id, result


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor")(_doctor)


def _doctor(
    ctx: typer.Context,
    list_only: Annotated[
        bool, typer.Option("--list", help="Only list the plug-ins; no code of theirs is run.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show tracebacks and output of plug-ins.")
    ] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Also run each device's golden-value checks.")
    ] = False,
    host: Annotated[
        Path | None, typer.Option(help="Look at a recorded host instead of this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Probe every plug-in and load those with devices.

    Exit code 1 if one failed or was rejected, if software for hardware that is here is missing, if
    two plug-ins claim one device, or if a check fails; else 0. Variables of others that decide
    something or make it slow are listed; they change no exit code.
    """
    if list_only:
        _list(as_json)
        return
    from hal.auditing.foreign_variables import foreign_variables

    shared = cli_context(ctx)
    if host is not None:
        _look_at(shared, host, self_test)
    conflict = shared.survey.claim_conflict()
    states = shared.survey.states if conflict is not None else shared.backends.states
    missing = shared.survey.missing_dependencies()
    unclaimed = _unclaimed(shared, states)
    checks = _self_test(shared.backends) if self_test and conflict is None else []
    variables = [] if host is not None else list(foreign_variables())
    is_healthy = (
        conflict is None
        and not missing
        and not any(state.status.is_trouble for state in states)
        and all(result.passed for _, result in checks)
    )
    if as_json:
        print_json(
            _document(shared, states, conflict, checks)
            | {
                "unclaimed": [asdict(item) for item in unclaimed],
                "variables": [variable.model_dump() for variable in variables],
                "healthy": is_healthy,
            }
        )
    else:
        _print(shared.survey, states, conflict, verbose)
        _print_unclaimed(unclaimed)
        _print_checks(checks)
        print_variables(variables)
        print_text("All is well." if is_healthy else "Something needs attention: see above.")
    if not is_healthy:
        raise typer.Exit(1)


def _look_at(shared: CliContext, recording: Path, self_test: bool) -> None:
    from hal.host import load_recorded_host

    if self_test:
        raise UsageError(
            "hal doctor --self-test",
            "this machine",
            "--host, another one as data",
            "leave out --host or --self-test",
        )
    shared.host = load_recorded_host(recording)


def _unclaimed(shared: CliContext, states: Sequence[PluginState]) -> tuple[PciFunction, ...]:
    """PCI devices that look like accelerators and that no plug-in says anything about."""
    from hal.topology.building import unclaimed_accelerators
    from hal.topology.pci_tree import pci_addresses_in

    texts = [*shared.survey.claims(), *(state.reason for state in states)]
    for _, item in shared.survey.missing_dependencies():
        texts += [item.hardware, *(f"{seen.source} {seen.found}" for seen in item.evidence)]
    return unclaimed_accelerators(shared.host, pci_addresses_in(" ".join(texts)))


def _self_test(registry: BackendRegistry) -> list[Check]:
    checks: list[Check] = []
    for device in registry.devices:
        spec = registry.describe(device.device_id)
        results = registry.self_test(spec, registry.create_runtime(spec))
        checks += [(device.device_id, result) for result in results]
    return checks


def _print_unclaimed(functions: Sequence[PciFunction]) -> None:
    for item in functions:
        print_text(
            f"Note: the accelerator {item.vendor_id}:{item.device_id} at {item.address} "
            f"(class {item.pci_class}, driver {item.driver or 'none'}) is claimed by no plug-in."
        )


def _print_checks(checks: Sequence[Check]) -> None:
    if checks:
        rows = [
            (device, result.name, "passed" if result.passed else "failed", result.detail)
            for device, result in checks
        ]
        print_table(("device", "check", "result", "detail"), rows)


def _list(as_json: bool) -> None:
    entries = list_plugins()
    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "value": entry.value,
                    "location": entry.location,
                    "shadowed_by": entry.shadowed_by,
                    "problem": entry.problem,
                }
                for entry in entries
            ]
        )
        return
    print_table(
        ("plug-in", "distribution", "version", "entry point", "note"),
        [(e.name, e.distribution, e.version, e.value, e.problem or e.shadowed_by) for e in entries],
    )


def _document(
    shared: CliContext,
    states: Sequence[PluginState],
    conflict: DeviceClaimError | None,
    checks: Sequence[Check],
) -> dict[str, Any]:
    claims = shared.survey.claims()
    return {
        "plugins": [
            state.to_document()
            | {"devices": [device for device, owners in claims.items() if state.entry in owners]}
            for state in states
        ],
        "claim_conflict": None if conflict is None else conflict.to_document(),
        "self_test": [
            {
                "device": device,
                "name": result.name,
                "passed": result.passed,
                "detail": result.detail,
            }
            for device, result in checks
        ],
        "missing_dependencies": [
            {
                "plugin": entry.key,
                "hardware": item.hardware,
                "software": item.software,
                "remedy": item.remedy,
            }
            for entry, item in shared.survey.missing_dependencies()
        ],
    }


def _print_idle(states: Iterable[PluginState]) -> None:
    """Plug-ins that have nothing to do here, a line for each reason."""
    names: dict[str, list[str]] = {}
    for state in states:
        entry = state.entry
        name = entry.name if entry.distribution == "halstack" else entry.key
        names.setdefault(state.reason, []).append(name)
    for reason, idle in names.items():
        print_text(f"idle, {reason}: {', '.join(idle)}")


def _print(
    survey: PluginSurvey,
    states: Sequence[PluginState],
    conflict: DeviceClaimError | None,
    verbose: bool,
) -> None:
    from hal.plugins.states import PluginStatus

    claims = survey.claims()
    shown = [state for state in states if verbose or state.status is not PluginStatus.IDLE]
    rows = [
        (
            state.entry.name,
            f"{state.entry.distribution} {state.entry.version}",
            state.status.value,
            ", ".join(device for device, owners in claims.items() if state.entry in owners),
            state.reason,
        )
        for state in shown
    ]
    print_table(("plug-in", "distribution", "state", "devices", "reason"), rows)
    _print_idle(state for state in states if state not in shown)
    for entry, item in survey.missing_dependencies():
        print_text(
            f"{entry}: {item.hardware} is here. Missing: {item.software}. Remedy: {item.remedy}"
        )
    if conflict is not None:
        print_text(str(conflict))
    for state in states:
        if verbose and state.detail:
            print_text(f"{state.entry}:\n{state.detail}")
