"""The sections that settings may have, and the model of each.

The core has `plugins` and `selection`. Other packages declare theirs as an entry point of the
group `hal.settings` (name: the section, value: `package.module:Model`), so that the section is
known without importing anything, or with `SettingsCatalogue.register`.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hal.errors import SettingsError
from hal.plugins.listing import PluginEntry, list_entries
from hal.plugins.probe import DEFAULT_DEADLINE_S, DEFAULT_MEMORY_MB
from hal.plugins.watchdog import DEFAULT_HOOK_DEADLINE_S
from hal.suggestions import did_you_mean

SETTINGS_GROUP = "hal.settings"
# Importing torch takes seconds on a cold disk: a shorter deadline would fail sound plug-ins.
MIN_PROBE_DEADLINE_S = 15.0
MIN_PROBE_MEMORY_MB = 256


class PluginSettings(BaseModel):
    """Section `plugins`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    disable: tuple[str, ...] = Field(
        default=(), description="plug-ins not to touch, by name or distribution:name"
    )
    select: tuple[str, ...] = Field(
        default=(), description="plug-ins to load even if none of their devices is here"
    )
    probe_deadline_s: float = Field(
        default=DEFAULT_DEADLINE_S,
        ge=MIN_PROBE_DEADLINE_S,
        le=600,
        description="the longest one plug-in's probe may take, in seconds (15 to 600)",
    )
    hook_deadline_s: float = Field(
        default=DEFAULT_HOOK_DEADLINE_S,
        ge=1,
        le=3600,
        description="the longest a hook may take in hal's own process, in seconds (1 to 3600); ten "
        "times that to create a runtime, to measure and for a self-test. The command then ends",
    )
    probe_memory_mb: int = Field(
        default=DEFAULT_MEMORY_MB,
        ge=MIN_PROBE_MEMORY_MB,
        description="the most memory one plug-in's probe may take, in MiB (at least 256)",
    )


class SelectionSettings(BaseModel):
    """Section `selection`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: Mapping[str, str] = Field(
        default_factory=dict,
        description="explicit choices, op or op.phase = candidate name; works or is an error",
    )
    waivers: Path | None = Field(default=None, description="the waiver file")


class SettingsCatalogue:
    """Section name -> its pydantic model, imported only when it is asked for."""

    def __init__(self, entries: Iterable[PluginEntry] = ()) -> None:
        self._models: dict[str, type[BaseModel]] = {
            "plugins": PluginSettings,
            "selection": SelectionSettings,
        }
        self._entries: dict[str, list[PluginEntry]] = {}
        for entry in entries:
            if not entry.problem and not entry.shadowed_by:
                self._entries.setdefault(entry.name, []).append(entry)

    @classmethod
    def installed(cls) -> "SettingsCatalogue":
        """The core's sections and those that installed distributions declare."""
        return cls(list_entries(SETTINGS_GROUP))

    @property
    def names(self) -> tuple[str, ...]:
        """Every known section, sorted."""
        return tuple(sorted(self._models.keys() | self._entries.keys()))

    def register(self, name: str, model: type[BaseModel]) -> None:
        """Declare a section. Declaring it again with the same model is allowed.

        Raises:
            SettingsError: another model has that name.
        """
        rival = self._models.setdefault(name, model)
        if rival is not model:
            raise SettingsError(
                f"settings section {name!r}",
                "one model",
                f"{rival.__module__}.{rival.__qualname__} and "
                f"{model.__module__}.{model.__qualname__}",
                "rename one of the sections",
            )

    def model(self, name: str) -> type[BaseModel]:
        """The model of a section.

        Raises:
            SettingsError: no such section, or the package that declares it cannot provide it.
        """
        if name in self._models and name not in self._entries:
            return self._models[name]
        if name not in self._entries:
            raise SettingsError(
                f"settings section {name!r}",
                "a known section",
                "an unknown one",
                did_you_mean(name, self.names),
            )
        entry = self._only_entry(name)
        if name not in self._models:
            self._models[name] = _import_model(entry)
        return self._models[name]

    def _only_entry(self, name: str) -> PluginEntry:
        entries = self._entries[name]
        owners = [f"{entry.distribution} ({entry.value})" for entry in entries]
        if name in ("plugins", "selection"):
            owners.append("hal itself")
        if len(owners) > 1:
            raise SettingsError(
                f"settings section {name!r}",
                "one package that declares it",
                " and ".join(owners),
                "uninstall all but one of them",
            )
        return entries[0]


def _import_model(entry: PluginEntry) -> type[BaseModel]:
    who = f"settings section {entry.name!r} of {entry.distribution} {entry.version}"
    point = importlib.metadata.EntryPoint(entry.name, entry.value, SETTINGS_GROUP)
    try:
        model = point.load()
    except (Exception, SystemExit) as error:
        raise SettingsError(
            who,
            f"the model {entry.value}",
            f"{type(error).__name__}: {error}",
            f"reinstall {entry.distribution}",
        ) from error
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise SettingsError(
            who,
            f"a pydantic model at {entry.value}",
            type(model).__name__,
            f"upgrade {entry.distribution}",
        )
    return model
