"""Load plug-ins into this process, one at a time, and answer for the devices they have."""

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

from hal.device import DetectedDevice
from hal.errors import PluginError, PluginRejectedError, SettingsError
from hal.host import TransferableHost
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import import_plugin, register_plugin
from hal.plugins.probe import DEFAULT_DEADLINE_S, ProbeReport
from hal.plugins.registry import BackendRegistry
from hal.plugins.states import PluginState, PluginStatus
from hal.plugins.survey import PluginSurvey, find_entry, survey_plugins
from hal.plugins.watchdog import HookWatchdog


class PluginLoader:
    """Imports plug-ins of a survey into this process and keeps every plug-in's state."""

    def __init__(self, survey: PluginSurvey, watchdog: HookWatchdog | None = None) -> None:
        """watchdog: watches the hooks of what is loaded; None for nobody does."""
        self.survey = survey
        self._watchdog = watchdog
        self._states = {state.entry: state for state in survey.states}
        self._plugins: dict[PluginEntry, Plugin] = {}

    @property
    def states(self) -> tuple[PluginState, ...]:
        """Every plug-in's state by now, sorted by (distribution, name)."""
        return tuple(self._states[entry] for entry in sorted(self._states))

    def load(self, entry: PluginEntry) -> Plugin:
        """Import and register one plug-in; a second call returns the same object.

        Raises:
            PluginError: its probe failed, or it fails here; the state says so from then on.
        """
        if entry in self._plugins:
            return self._plugins[entry]
        report = self.survey.report(entry)
        if report is None or report.error is not None:
            raise self._unusable(entry, report)
        before = dict(os.environ)
        watch = nullcontext() if self._watchdog is None else self._watchdog.watch(entry, "import")
        try:
            with watch:
                registered = register_plugin(entry, import_plugin(entry))
            plugin = Plugin(registered, self._watchdog)
        except PluginError as error:
            self.record_failure(entry, error)
            raise
        finally:
            changed = _restore_environment(before)
        self._plugins[entry] = plugin
        note = f"changed {', '.join(changed)} at import; undone" if changed else ""
        self._states[entry] = PluginState(entry, PluginStatus.LOADED, note)
        return plugin

    def load_providing(self, what: str) -> tuple[Plugin, ...]:
        """Load every sound plug-in that provides `what`; one that fails gets its state."""
        loaded = []
        for report in self.survey.reports:
            if report.error is None and report.info is not None and what in report.info.provides:
                loaded += self.try_load(report.entry)
        return tuple(loaded)

    def try_load(self, entry: PluginEntry) -> list[Plugin]:
        """The plug-in, or nothing if it fails, which its state then explains."""
        try:
            return [self.load(entry)]
        except PluginError as error:
            self.record_failure(entry, error)
            return []

    def record_failure(self, entry: PluginEntry, error: PluginError) -> None:
        """Remember that a plug-in failed after its probe."""
        is_rejection = isinstance(error, PluginRejectedError)
        status = PluginStatus.REJECTED if is_rejection else PluginStatus.FAILED
        self._states[entry] = replace(self._states[entry], status=status, reason=error.one_line())

    def _unusable(self, entry: PluginEntry, report: ProbeReport | None) -> PluginError:
        if report is not None and report.error is not None:
            return report.error
        state = self._states[entry]
        return PluginError(
            str(entry),
            "a plug-in that was probed",
            f"{state.status.value}: {state.reason}",
            "enable it in the settings (plugins.disable) or reinstall its distribution",
        )


def load_backends(
    host: TransferableHost | None = None,
    selected: Iterable[str] = (),
    *,
    disabled: Iterable[str] = (),
    deadline_s: float = DEFAULT_DEADLINE_S,
    survey: PluginSurvey | None = None,
    loader: PluginLoader | None = None,
) -> BackendRegistry:
    """Probe every plug-in, then load those with something to do.

    Loaded are: a plug-in whose probe found devices; one that provides "candidates" (for any
    device); one that `selected` names. All others stay idle and are never imported here.

    Args:
        host: where to look for devices; this machine by default.
        selected: plug-ins to load even without devices (to plan for a device that is not here),
            by name or `distribution:name`. One that cannot be loaded is an error.
        disabled: plug-ins not to touch.
        deadline_s: the longest one probe may take.
        survey: an earlier survey to use instead of probing again.
        loader: an earlier loader, with its survey, so that nothing is loaded twice.

    Raises:
        DeviceClaimError: two plug-ins claim one device.
        PluginError: a plug-in in `selected` is unknown or cannot be loaded.
        SettingsError: a plug-in is both selected and disabled.
    """
    selected, disabled = tuple(selected), tuple(disabled)
    if loader is None:
        survey = survey or survey_plugins(host, disabled=disabled, deadline_s=deadline_s)
        loader = PluginLoader(survey)
    survey = loader.survey
    named = {find_entry(name, survey.entries, "selected plug-ins") for name in selected}
    off = {find_entry(name, survey.entries, "setting plugins.disable") for name in disabled}
    if named & off:
        both = ", ".join(entry.key for entry in sorted(named & off))
        raise SettingsError(
            "plug-ins", "a plug-in either selected or disabled", f"both for {both}", "drop one"
        )
    conflict = survey.claim_conflict()
    if conflict is not None:
        raise conflict
    plugins: list[Plugin] = []
    for state in survey.states:
        if state.entry in named:
            plugins.append(loader.load(state.entry))
        elif _has_work(survey.report(state.entry)):
            plugins += loader.try_load(state.entry)
    return BackendRegistry(survey.host, loader, plugins, _owners(survey, plugins))


def _has_work(report: ProbeReport | None) -> bool:
    if report is None or report.error is not None or report.info is None:
        return False
    return bool(report.devices) or "candidates" in report.info.provides


def _owners(
    survey: PluginSurvey, plugins: Iterable[Plugin]
) -> dict[str, tuple[DetectedDevice, Plugin]]:
    by_entry = {plugin.entry: plugin for plugin in plugins}
    owners = {
        device.device_id: (device, by_entry[report.entry])
        for report in survey.reports
        if report.entry in by_entry
        for device in report.devices
    }
    return dict(sorted(owners.items()))


def _restore_environment(before: dict[str, str]) -> list[str]:
    """Undo what an import did to the environment; the names that it had changed, sorted.

    A plug-in sets what its device needs in `hal_create_runtime`; at import, it would change the
    behaviour of every other plug-in.
    """
    after = dict(os.environ)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return changed
