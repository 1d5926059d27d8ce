"""Probe plug-ins in child processes, so that none of them can harm this one or hide another."""

from collections.abc import Callable, Sequence

from hal.host import TransferableHost
from hal.host_recording import RecordingHost
from hal.plugins.listing import PluginEntry
from hal.plugins.probe_report import ProbeReport, read_report
from hal.plugins.probe_serving import (
    DEFAULT_DEADLINE_S,
    DEFAULT_MEMORY_MB,
    ProbeLimits,
    serve_probes,
)

__all__ = [
    "DEFAULT_DEADLINE_S",
    "DEFAULT_MEMORY_MB",
    "Probe",
    "ProbeReport",
    "probe_plugin",
    "probe_plugins",
]

Probe = Callable[[PluginEntry], ProbeReport]


def probe_plugins(
    entries: Sequence[PluginEntry],
    host: TransferableHost,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    memory_mb: int = DEFAULT_MEMORY_MB,
) -> tuple[ProbeReport, ...]:
    """Probe each plug-in in a child process of its own, forked from one server process.

    The reports come in the order of `entries`; none depends on another. Never raises for what a
    plug-in does: that is in its report. What a `RecordingHost` was asked is added to it.

    Args:
        entries: the plug-ins.
        host: what they are asked about.
        deadline_s: the longest one probe may take.
        memory_mb: the most memory that one probe may take, in MiB.
    """
    limits = ProbeLimits(deadline_s, memory_mb)
    reports = _probe(entries, host, limits)
    if isinstance(host, RecordingHost):
        for report in reports:
            if report.recorded is None:
                host.add_gap(f"what {report.entry} asked the host: its probe failed, or too much")
            else:
                host.add(report.recorded)
    return reports


def probe_plugin(
    entry: PluginEntry,
    host: TransferableHost,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    memory_mb: int = DEFAULT_MEMORY_MB,
) -> ProbeReport:
    """Probe one plug-in."""
    return probe_plugins([entry], host, deadline_s=deadline_s, memory_mb=memory_mb)[0]


def _probe(
    entries: Sequence[PluginEntry], host: TransferableHost, limits: ProbeLimits
) -> tuple[ProbeReport, ...]:
    if not entries:
        return ()
    served = serve_probes(entries, host, limits)
    reports: list[ProbeReport] = []
    for index, entry in enumerate(entries):
        outcome = served.outcomes.get(index)
        if outcome is None and len(entries) > 1:
            # A plug-in took the server down. Alone with a server, it takes nobody along.
            reports += _probe([entry], host, limits)
        else:
            reports.append(read_report(entry, outcome or served.lone_outcome(), limits))
    return tuple(reports)
