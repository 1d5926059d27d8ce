"""What the commands of one `hal` process share, made on demand: settings, host, plug-ins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hal.errors import SettingsError
from hal.variables import DEBUG_VARIABLE

# The modules behind these take most of the start-up time: `hal version` needs none of them.
if TYPE_CHECKING:
    from hal.host import TransferableHost
    from hal.plugins.manager import PluginLoader
    from hal.plugins.registry import BackendRegistry
    from hal.plugins.survey import PluginSurvey
    from hal.settings import Settings
    from hal.settings_sections import PluginSettings, SelectionSettings
    from hal.waivers import WaiverBook


class CliContext:
    """Shared by all commands as `ctx.obj`. Nothing happens before a property is asked for."""

    def __init__(self, config: Path | None = None, is_debug: bool = False) -> None:
        self.config = config
        self.is_debug = is_debug or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
        self._settings: Settings | None = None
        self._host: TransferableHost | None = None

    @property
    def settings(self) -> Settings:
        """The settings of file, environment and, inside a command, its options.

        Raises:
            SettingsError: an unknown section or variable, an unreadable file.
        """
        from hal.settings import Settings

        if self._settings is None:
            self._settings = Settings.read(config=self.config)
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def plugin_settings(self) -> PluginSettings:
        """Section `plugins`."""
        from hal.settings_sections import PluginSettings

        return self.settings.section("plugins", PluginSettings, consumer="plug-in loading")

    @property
    def selection_settings(self) -> SelectionSettings:
        """Section `selection`."""
        from hal.settings_sections import SelectionSettings

        return self.settings.section("selection", SelectionSettings, consumer="selection")

    @property
    def host(self) -> TransferableHost:
        """The host that devices are looked for on."""
        from hal.host import LocalHost

        if self._host is None:
            self._host = LocalHost()
        return self._host

    @host.setter
    def host(self, host: TransferableHost) -> None:
        """Another host: what was found on the one before it, as a command of a plug-in was looked
        for, is forgotten."""
        self._host = host
        for name in ("survey", "loader", "backends"):
            self.__dict__.pop(name, None)

    @cached_property
    def survey(self) -> PluginSurvey:
        """Every plug-in, probed once per process."""
        from hal.plugins.survey import survey_plugins

        wanted = self.plugin_settings
        return survey_plugins(
            self.host,
            disabled=wanted.disable,
            deadline_s=wanted.probe_deadline_s,
            memory_mb=wanted.probe_memory_mb,
        )

    @cached_property
    def loader(self) -> PluginLoader:
        """Loads plug-ins of the survey into this process, each once."""
        from hal.plugins.manager import PluginLoader
        from hal.plugins.watchdog import HookWatchdog

        deadline_s = self.plugin_settings.hook_deadline_s
        return PluginLoader(self.survey, HookWatchdog(deadline_s, backstop=sys.__stderr__))

    @cached_property
    def backends(self) -> BackendRegistry:
        """The devices and the plug-ins that answer for them.

        Raises:
            DeviceClaimError, PluginError: see `hal.plugins.load_backends`.
        """
        from hal.plugins.manager import load_backends

        wanted = self.plugin_settings
        return load_backends(selected=wanted.select, disabled=wanted.disable, loader=self.loader)

    @property
    def use(self) -> Mapping[str, str]:
        """The explicit choices, op or op.phase -> candidate name."""
        return self.selection_settings.use

    @cached_property
    def waivers(self) -> WaiverBook:
        """The waivers of the file that `selection.waivers` names; none without one.

        Raises:
            WaiverError: the file is malformed, or has an expired or over-broad waiver.
        """
        from hal.waivers import WaiverBook, load_waivers

        path = self.selection_settings.waivers
        return WaiverBook() if path is None else load_waivers(path)


def cli_context(ctx: typer.Context) -> CliContext:
    """The shared context of a command.

    Raises:
        SettingsError: the command was not started by `hal`.
    """
    shared = ctx.find_root().obj
    if not isinstance(shared, CliContext):
        raise SettingsError(
            "command line", "a command started by `hal`", repr(shared), "start it with `hal`"
        )
    return shared
