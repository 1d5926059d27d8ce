"""`hal devices --verify-links`: peer access of each two devices, written and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from hal.cli.context import CliContext
from hal.cli.output import format_rate, print_table, print_text

if TYPE_CHECKING:
    from hal.device import DeviceSpec
    from hal.peer_links.outcome import PairOutcome
    from hal.plugins.listing import PluginEntry


def check_links(
    shared: CliContext, specs: Sequence[DeviceSpec], *, is_quiet: bool
) -> tuple[PairOutcome, ...]:
    """Checks every pair, keeps what came out for plans, and prints it unless `is_quiet`."""
    from hal.peer_links.store import save_links
    from hal.peer_links.verification import device_pairs, verify_pairs

    pairs = device_pairs(specs)
    if not pairs:
        if not is_quiet:
            print_text(
                "No pairs: links are checked between accelerators of one plug-in, and this host "
                f"has {_counted(specs)}. Nothing was verified."
            )
        return ()

    def entry_of(spec: DeviceSpec) -> PluginEntry:
        return shared.backends.plugin_for(spec).entry

    outcomes = []
    for outcome in verify_pairs(pairs, entry_of):
        outcomes.append(outcome)
        if not is_quiet:
            text = f"{len(outcomes)} of {len(pairs)}: {outcome.first} – {outcome.second}"
            typer.echo(f"{text} {outcome.verdict}", err=True)
    file = save_links(outcomes, specs, shared.host)
    if not is_quiet:
        _print(outcomes)
        print_text(
            "Not kept: this host cannot be told from others."
            if file is None
            else "Kept for plans on this host; a new kernel or driver needs a new check."
        )
    return tuple(outcomes)


def with_kept_links(shared: CliContext, specs: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    """The devices with what was found of their pairs before, on this host."""
    from hal.peer_links.store import with_links

    return with_links(specs, shared.host)


def _counted(specs: Sequence[DeviceSpec]) -> str:
    accelerators = [spec for spec in specs if spec.torch_device != "cpu"]
    if not accelerators:
        return "none but its CPU" if specs else "none"
    return ", ".join(f"{spec.device_id} ({spec.backend})" for spec in accelerators)


def _print(outcomes: Sequence[PairOutcome]) -> None:
    rows = [
        (
            f"{outcome.first} – {outcome.second}",
            outcome.verdict,
            format_rate(outcome.bytes_per_s, "B/s"),
            outcome.detail,
        )
        for outcome in outcomes
    ]
    print_table(("pair", "peer access", "copies", "how"), rows, whole=("peer access", "copies"))
