"""The survey: every installed plug-in with what its probe found. Nothing is imported here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hal.device import MissingDependency
from hal.errors import DeviceClaimError, PluginError, PluginRejectedError
from hal.host import LocalHost, TransferableHost
from hal.plugins.listing import PluginEntry, list_plugins
from hal.plugins.probe import DEFAULT_DEADLINE_S, DEFAULT_MEMORY_MB, ProbeReport, probe_plugins
from hal.plugins.states import PluginState, PluginStatus
from hal.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class PluginSurvey:
    """What is installed and what it found on `host`; sorted by (distribution, name).

    Attributes:
        host: the host that was looked at.
        reports: the probes, of every plug-in that was probed.
        states: the state of every plug-in; a sound one is idle as long as nothing loads it.
    """

    host: TransferableHost
    reports: tuple[ProbeReport, ...]
    states: tuple[PluginState, ...]

    @property
    def entries(self) -> tuple[PluginEntry, ...]:
        """The entries that can be named: all but shadowed copies."""
        return tuple(
            state.entry for state in self.states if state.status is not PluginStatus.SHADOWED
        )

    def report(self, entry: PluginEntry) -> ProbeReport | None:
        """The probe of one plug-in; None if it was not probed."""
        return next((report for report in self.reports if report.entry == entry), None)

    def missing_dependencies(self) -> tuple[tuple[PluginEntry, MissingDependency], ...]:
        """Hardware seen whose software is missing, with the plug-in that says so."""
        return tuple(
            (report.entry, missing) for report in self.reports for missing in report.missing
        )

    def claims(self) -> dict[str, tuple[PluginEntry, ...]]:
        """Device id -> the plug-ins that claim it."""
        claims: dict[str, tuple[PluginEntry, ...]] = {}
        for report in self.reports:
            for device in report.devices:
                claims[device.device_id] = (*claims.get(device.device_id, ()), report.entry)
        return dict(sorted(claims.items()))

    def claim_conflict(self) -> DeviceClaimError | None:
        """The error for every device that more than one plug-in claims; None if there is none."""
        contested = {device: owners for device, owners in self.claims().items() if len(owners) > 1}
        if not contested:
            return None
        found = "; ".join(
            f"{device} by {' and by '.join(str(owner) for owner in owners)}"
            for device, owners in contested.items()
        )
        rivals = sorted({owner.key for owners in contested.values() for owner in owners})
        choices = " or ".join(f'plugins.disable = ["{key}"]' for key in rivals)
        return DeviceClaimError(
            f"device {', '.join(contested)}",
            "one plug-in that claims it",
            f"claimed {found}",
            f"disable all but one in the settings: {choices}",
        )


def survey_plugins(
    host: TransferableHost | None = None,
    *,
    disabled: Iterable[str] = (),
    deadline_s: float = DEFAULT_DEADLINE_S,
    memory_mb: int = DEFAULT_MEMORY_MB,
    entries: Sequence[PluginEntry] | None = None,
) -> PluginSurvey:
    """List and probe the plug-ins.

    Args:
        host: where to look for devices; this machine by default.
        disabled: plug-ins not to touch, by name or by `distribution:name`.
        deadline_s: the longest one probe may take.
        memory_mb: the most memory that one probe may take, in MiB.
        entries: the plug-ins, in any order; those installed by default.

    Raises:
        PluginError: `disabled` names no installed plug-in, or an ambiguous one.
    """
    host = LocalHost() if host is None else host
    listed = sorted(list_plugins() if entries is None else entries)
    named = [entry for entry in listed if not entry.shadowed_by]
    off = {find_entry(name, named, "setting plugins.disable") for name in disabled}
    probed = [entry for entry in named if entry not in off and not entry.problem]
    reports = probe_plugins(probed, host, deadline_s=deadline_s, memory_mb=memory_mb)
    return survey_of(host, listed, off, reports)


def survey_of(
    host: TransferableHost,
    listed: Iterable[PluginEntry],
    disabled: Iterable[PluginEntry],
    reports: Iterable[ProbeReport],
) -> PluginSurvey:
    """The survey that follows from a listing and its probes, whatever order they are in."""
    by_entry = {report.entry: report for report in reports}
    off = set(disabled)
    states = [_state(entry, entry in off, by_entry.get(entry)) for entry in sorted(listed)]
    ordered = tuple(by_entry[entry] for entry in sorted(by_entry))
    return PluginSurvey(host, ordered, tuple(states))


def find_entry(name: str, entries: Iterable[PluginEntry], who: str) -> PluginEntry:
    """The plug-in called `name` or `distribution:name`.

    Raises:
        PluginError: there is none, or several distributions have one of that name.
    """
    entries = list(entries)
    found = [entry for entry in entries if name in (entry.key, entry.name)]
    if len(found) == 1:
        return found[0]
    if not found:
        known = {entry.name for entry in entries} | {entry.key for entry in entries}
        raise PluginError(
            who, "the name of an installed plug-in", repr(name), did_you_mean(name, known)
        )
    keys = ", ".join(entry.key for entry in found)
    raise PluginError(
        who, "a name that one plug-in has", f"{name!r}, which {keys} share", f"write one of {keys}"
    )


def _state(entry: PluginEntry, is_disabled: bool, report: ProbeReport | None) -> PluginState:
    if entry.shadowed_by:
        reason = f"{entry.shadowed_by} comes first on the import path; remove one of the two"
        return PluginState(entry, PluginStatus.SHADOWED, reason)
    if is_disabled:
        return PluginState(entry, PluginStatus.IDLE, "disabled by the setting plugins.disable")
    if entry.problem:
        error = PluginRejectedError(
            str(entry), "a usable entry point", entry.problem, f"reinstall {entry.distribution}"
        )
        return PluginState(entry, PluginStatus.REJECTED, error.one_line())
    if report is None:
        return PluginState(entry, PluginStatus.IDLE, "not probed")
    if report.error is not None:
        is_rejection = isinstance(report.error, PluginRejectedError)
        status = PluginStatus.REJECTED if is_rejection else PluginStatus.FAILED
        return PluginState(entry, status, report.error.one_line(), report.detail)
    return PluginState(entry, PluginStatus.IDLE, _why_idle(report))


def _why_idle(report: ProbeReport) -> str:
    provides = report.info.provides if report.info is not None else frozenset()
    if report.devices:
        return "has devices, not loaded yet"
    if "candidates" in provides:
        return "offers implementations for any device, not loaded yet"
    if provides == {"commands"}:
        return "offers commands only, loaded when one of them is used"
    return "none of its devices is on this host"
