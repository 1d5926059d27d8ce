"""`hal devices`: what was detected, what it can do, and how each value is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal.cli.context import CliContext, cli_context
from hal.cli.output import (
    format_bytes,
    format_rate,
    picture_columns,
    print_error,
    print_json,
    print_lines,
    print_table,
    print_text,
)
from hal.cli.verify_links import check_links, with_kept_links
from hal.errors import PluginError, UsageError

if TYPE_CHECKING:
    from hal.device import DeviceSpec
    from hal.topology import Topology


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("devices")(_devices)


def _devices(
    ctx: typer.Context,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure bandwidth and rates; plans use them.")
    ] = False,
    verify_links: Annotated[
        bool,
        typer.Option(
            "--verify-links",
            help="Write and compare between each two devices; plans then trust what was verified.",
        ),
    ] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Show how each value is known.")
    ] = False,
    topology: Annotated[
        bool,
        typer.Option("--topology", help="Show where the devices are, their links and distances."),
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Write the topology as an SVG picture to this file.")
    ] = None,
    host: Annotated[
        Path | None, typer.Option(help="Look at a recorded host instead of this one.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record this host to a file, without serial numbers, addresses and names."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The devices of this host, as their plug-ins describe them. Exit code 1 if there is none, or
    if one cannot be described."""
    shared = cli_context(ctx)
    if host is not None:
        from hal.host import load_recorded_host

        _refuse_measuring("--measure", measure)
        _refuse_measuring("--verify-links", verify_links)
        shared.host = load_recorded_host(host)
    if record is None:
        specs, undescribed = _describe(shared, measure)
    else:
        specs, undescribed = _record(shared, measure, record)
    outcomes = check_links(shared, specs, is_quiet=as_json) if verify_links else ()
    specs = with_kept_links(shared, specs)
    found = _topology(shared, specs) if topology or svg is not None else None
    if svg is not None and found is not None:
        _write_svg(found, svg)
    if as_json:
        devices = [spec.to_dict() for spec in specs]
        more: dict[str, Any] = {"topology": found.to_dict()} if topology and found else {}
        if verify_links:
            more["links"] = [asdict(outcome) for outcome in outcomes]
        print_json({"devices": devices, **more} if more else devices)
    else:
        _print(specs, found if topology else None, evidence, has_table=not verify_links)
    for error in undescribed:
        print_error(error, is_debug=shared.is_debug)
    if undescribed or not specs or any(outcome.is_trouble for outcome in outcomes):
        raise typer.Exit(1)


def _refuse_measuring(option: str, is_given: bool) -> None:
    if is_given:
        raise UsageError(
            f"hal devices {option}",
            "this machine",
            "--host, another one as data",
            f"leave out --host or {option}",
        )


def _describe(shared: CliContext, measure: bool) -> tuple[list[DeviceSpec], list[PluginError]]:
    """What can be described, and the errors of what cannot: one strange card hides no other."""
    from hal.measurements import save_measurements, with_measurements

    registry = shared.backends
    specs: list[DeviceSpec] = []
    undescribed: list[PluginError] = []
    for device in registry.devices:
        try:
            specs.append(registry.describe(device.device_id))
        except PluginError as error:
            undescribed.append(error)
    if measure:
        specs = [registry.measure(spec) for spec in specs]
        for spec in specs:
            save_measurements(spec)
        return specs, undescribed
    return [with_measurements(spec) for spec in specs], undescribed


def _record(
    shared: CliContext, measure: bool, path: Path
) -> tuple[list[DeviceSpec], list[PluginError]]:
    """Describe the devices and write what the host was asked meanwhile, also if that fails: then
    the recording is needed most."""
    from hal.host import RecordingHost
    from hal.host_capture import ask_usual_questions, save_recording

    recorder = RecordingHost(shared.host)
    shared.host = recorder
    try:
        described = _describe(shared, measure)
    finally:
        ask_usual_questions(recorder)
        saved = save_recording(recorder, path)
        typer.echo(
            f"Recorded to {path}: {len(saved.files)} files, {len(saved.commands)} commands, "
            "without serial numbers, addresses and names. Look through it before you share it.",
            err=True,
        )
        for gap in recorder.gaps:
            typer.echo(f"Not recorded: {gap}.", err=True)
    return described


def _topology(shared: CliContext, specs: Sequence[DeviceSpec]) -> Topology:
    from hal.topology import detect_topology
    from hal.topology.obstacles import obstacles_of

    return detect_topology(shared.host, specs, obstacles_of(shared.survey))


def _write_svg(topology: Topology, path: Path) -> None:
    from hal.text_files import write_user_text
    from hal.topology.svg import draw_svg

    try:
        write_user_text(path, draw_svg(topology))
    except OSError as error:
        raise UsageError(
            f"hal devices --svg {path}",
            "a file that can be written",
            f"{type(error).__name__}: {error.strerror or error}",
            "name another file",
        ) from error


def _print(
    specs: Sequence[DeviceSpec], topology: Topology | None, evidence: bool, *, has_table: bool
) -> None:
    """The picture where it was asked for, else the table, which has little that the picture has
    not."""
    if not specs:
        print_text("No device was detected; `hal doctor` shows what each plug-in found.")
    elif topology is None and has_table:
        _print_specs(specs)
    if topology is not None:
        from hal.topology.terminal import draw_topology

        print_lines(draw_topology(topology, picture_columns()))
    if evidence:
        for spec in specs:
            _print_evidence(spec)


def _print_specs(specs: Sequence[DeviceSpec]) -> None:
    rows = [
        (
            spec.device_id,
            spec.name,
            spec.arch,
            spec.backend,
            str(spec.num_cores or ""),
            format_bytes(spec.memory_bytes),
            format_rate(spec.memory_bandwidth, "B/s") + _doubt(spec, "memory_bandwidth"),
        )
        for spec in specs
    ]
    columns = ("device", "name", "arch", "backend", "cores", "memory", "reads")
    whole = ("device", "memory", "reads")
    used = [n for n, _ in enumerate(columns) if any(row[n] for row in rows)]
    shown = [
        (row[0], "as above", *("" for _ in row[2:])) if n and row[1:] == rows[n - 1][1:] else row
        for n, row in enumerate(rows)
    ]
    print_table([columns[n] for n in used], [[row[n] for n in used] for row in shown], whole=whole)
    _print_rates(specs)


def _print_rates(specs: Sequence[DeviceSpec]) -> None:
    """Peak rates, once for each kind of device."""
    kinds = {(spec.name, spec.arch): spec for spec in specs if spec.peak_flops}
    if kinds:
        rows = [
            (
                name,
                ", ".join(
                    f"{dtype} {format_rate(rate, '')}{_doubt(spec, f'peak_flops.{dtype}')}"
                    for dtype, rate in sorted(spec.peak_flops.items())
                ),
            )
            for (name, _), spec in kinds.items()
        ]
        print_table(("name", "peak rates, OP/s (? unverified)"), rows)


def _doubt(spec: DeviceSpec, key: str) -> str:
    """A question mark behind a value that only an unverified source states."""
    from hal.device import Confidence

    found = spec.evidence.get(key)
    return "?" if found is not None and found.confidence is Confidence.UNVERIFIED else ""


def _print_evidence(spec: DeviceSpec) -> None:
    rows = [
        (field, item.found, item.source, item.confidence.value)
        for field, item in sorted(spec.evidence.items())
    ]
    print_table(
        ("field", "found", "source", "confidence"), rows, title=f"{spec.device_id}: evidence"
    )
