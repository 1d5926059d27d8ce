"""`hal devices`: what was detected, what it can do, and how each value is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hal.cli.context import cli_context
from hal.cli.output import format_bytes, format_rate, print_json, print_table, print_text
from hal.measurements import save_measurements, with_measurements

if TYPE_CHECKING:
    from hal.device import DeviceSpec


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("devices")(_devices)


def _devices(
    ctx: typer.Context,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure bandwidth and rates; plans use them.")
    ] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Show how each value is known.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The devices of this host, as their plug-ins describe them. Exit code 1 if there is none."""
    registry = cli_context(ctx).backends
    specs = [registry.describe(device.device_id) for device in registry.devices]
    if measure:
        specs = [registry.measure(spec) for spec in specs]
        for spec in specs:
            save_measurements(spec)
    else:
        specs = [with_measurements(spec) for spec in specs]
    if as_json:
        print_json([spec.to_dict() for spec in specs])
    elif specs:
        _print_specs(specs)
        if evidence:
            for spec in specs:
                _print_evidence(spec)
    else:
        print_text("No device was detected; `hal doctor` shows what each plug-in found.")
    if not specs:
        raise typer.Exit(1)


def _print_specs(specs: Sequence[DeviceSpec]) -> None:
    rows = [
        (
            spec.device_id,
            spec.name,
            spec.arch,
            spec.backend,
            str(spec.num_cores or ""),
            format_bytes(spec.memory_bytes),
            format_rate(spec.memory_bandwidth, "B/s"),
            ", ".join(
                f"{dtype} {format_rate(rate, 'OP/s')}"
                for dtype, rate in sorted(spec.peak_flops.items())
            ),
        )
        for spec in specs
    ]
    columns = ("device", "name", "arch", "backend", "cores", "memory", "reads", "peak rates")
    used = [n for n, _ in enumerate(columns) if any(row[n] for row in rows)]
    print_table([columns[n] for n in used], [[row[n] for n in used] for row in rows])


def _print_evidence(spec: DeviceSpec) -> None:
    rows = [
        (field, item.found, item.source, item.confidence.value)
        for field, item in sorted(spec.evidence.items())
    ]
    print_table(
        ("field", "found", "source", "confidence"), rows, title=f"{spec.device_id}: evidence"
    )
