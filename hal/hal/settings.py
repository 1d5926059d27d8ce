"""Settings: defaults < configuration file < `HAL_*` variables < command line.

Every key, variable and option belongs to a section with a model; an unknown one is an error that
names its source and the nearest known name, and so is one that no component reads.
"""

import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from hal.errors import SettingsError
from hal.model_errors import describe_first_error
from hal.settings_sections import SettingsCatalogue
from hal.settings_text import text_to_value
from hal.suggestions import did_you_mean
from hal.text_files import read_regular_text
from hal.variables import CONFIG_VARIABLE, DEBUG_VARIABLE, PREFIX

_OWN_VARIABLES = (CONFIG_VARIABLE, DEBUG_VARIABLE)
_Section = TypeVar("_Section", bound=BaseModel)


class SourceKind(IntEnum):
    """Where a value can come from; the larger one wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, slots=True)
class Given:
    """One value that somebody set: where it stands, and whether it is text still to be read."""

    kind: SourceKind
    where: str
    value: Any
    is_text: bool


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One effective setting, as `hal settings` shows it. A secret's value is masked."""

    key: str
    value: Any
    source: str
    description: str


class Settings:
    """What was set, and who has read it.

    Components take their section with `section`, which marks it as consumed; a command then calls
    `check_consumed` for what it is responsible for.
    """

    def __init__(
        self, catalogue: SettingsCatalogue, given: Iterable[tuple[str, str, Given]]
    ) -> None:
        self.catalogue = catalogue
        self._given: dict[str, dict[str, Given]] = {}
        self._consumers: dict[str, list[str]] = {}
        for section, key, value in given:
            keys = self._given.setdefault(section, {})
            if key not in keys or keys[key].kind <= value.kind:
                keys[key] = value

    @classmethod
    def read(
        cls,
        *,
        catalogue: SettingsCatalogue | None = None,
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, tuple[str, Any]] | None = None,
    ) -> "Settings":
        """Collect the settings of all sources.

        Args:
            catalogue: the known sections; those of the installed packages by default.
            config: the TOML file; by default the one that HAL_CONFIG names, or none.
            environment: the variables; those of this process by default.
            flags: `section.key` -> (option as the user writes it, value).

        Raises:
            SettingsError: an unreadable file, an unknown section or variable.
        """
        catalogue = SettingsCatalogue.installed() if catalogue is None else catalogue
        environment = os.environ if environment is None else environment
        if config is None and environment.get(CONFIG_VARIABLE):
            config = Path(environment[CONFIG_VARIABLE])
        given = list(_from_file(config, catalogue)) if config is not None else []
        given += _from_environment(environment, catalogue)
        return cls(catalogue, given).with_flags(flags or {})

    def with_flags(self, flags: Mapping[str, tuple[str, Any]]) -> "Settings":
        """These settings under a further layer of command-line options."""
        given = [
            (section, key, value)
            for section, keys in self._given.items()
            for key, value in keys.items()
        ]
        for dotted, (option, value) in flags.items():
            section, _, key = dotted.partition(".")
            is_text = isinstance(value, str)
            given.append((section, key, Given(SourceKind.COMMAND_LINE, option, value, is_text)))
        layered = Settings(self.catalogue, given)
        layered._consumers = self._consumers
        return layered

    def section(self, name: str, model: type[_Section], *, consumer: str) -> _Section:
        """The validated section, marked as read by `consumer`.

        Raises:
            SettingsError: an unknown key or an unfit value, with its source.
        """
        self.catalogue.register(name, model)
        self._consumers.setdefault(name, []).append(consumer)
        given = self._given.get(name, {})
        values: dict[str, Any] = {}
        for key, item in given.items():
            if key not in model.model_fields:
                raise _unknown_key(name, key, item, model)
            values[key] = _plain_value(item, model.model_fields[key])
        try:
            return model.model_validate_json(json.dumps(values, default=str), strict=True)
        except ValidationError as error:
            raise _unfit(name, given, error, model) from error

    def check_consumed(self, sections: Collection[str] = ()) -> None:
        """Refuse what was set and read by no component.

        Every command-line option must have been read; of the file and the environment, the keys of
        `sections` (those the running command is responsible for).

        Raises:
            SettingsError: the first key, sorted, that nobody has read.
        """
        for name in sorted(self._given):
            if name in self._consumers:
                continue
            for key, item in sorted(self._given[name].items()):
                if name not in self.catalogue.names:
                    raise SettingsError(
                        f"setting {name}.{key} ({item.where})",
                        "a known section",
                        f"the unknown section {name!r}",
                        did_you_mean(name, self.catalogue.names),
                    )
                if name in sections or item.kind is SourceKind.COMMAND_LINE:
                    readers = ", ".join(sorted(self._consumers)) or "none"
                    raise SettingsError(
                        f"setting {name}.{key} ({item.where})",
                        "a component that reads it",
                        f"nothing of this command does (sections read: {readers})",
                        "remove it, or run the command it is for",
                    )

    def check_known_variables(self) -> None:
        """Refuse a variable of the environment whose section has no such key, whether the running
        command reads that section or not.

        Raises:
            SettingsError: the first one, sorted, with the nearest known name.
        """
        for name in sorted(self._given):
            for key, item in sorted(self._given[name].items()):
                if item.kind is not SourceKind.ENVIRONMENT:
                    continue
                model = self.catalogue.model(name)
                if key not in model.model_fields:
                    raise _unknown_key(name, key, item, model)

    def rows(self) -> tuple[SettingRow, ...]:
        """Every effective setting of every known section, sorted by key.

        Raises:
            SettingsError: see `section`.
        """
        rows: list[SettingRow] = []
        for name in self.catalogue.names:
            model = self.catalogue.model(name)
            section = self.section(name, model, consumer="hal settings")
            for key, field in model.model_fields.items():
                given = self._given.get(name, {}).get(key)
                rows.append(
                    SettingRow(
                        key=f"{name}.{key}",
                        value=_shown(getattr(section, key)),
                        source="default" if given is None else given.where,
                        description=field.description or "",
                    )
                )
        return tuple(sorted(rows, key=lambda row: row.key))


def _from_file(path: Path, catalogue: SettingsCatalogue) -> Iterable[tuple[str, str, Given]]:
    who = f"configuration file {path}"
    try:
        document = tomllib.loads(read_regular_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            who, "a readable text file", str(error), "correct --config or HAL_CONFIG"
        ) from error
    except (ValueError, RecursionError) as error:  # also of a number too long, of too many levels
        raise SettingsError(who, "TOML", str(error), "correct the syntax") from error
    for section, keys in document.items():
        if section not in catalogue.names:
            raise SettingsError(
                f"{who}, section {section!r}",
                "a known section",
                "an unknown one",
                did_you_mean(section, catalogue.names),
            )
        if not isinstance(keys, dict):
            raise SettingsError(
                f"{who}, {section!r}", f"a table [{section}]", repr(keys)[:80], "write a table"
            )
        for key, value in keys.items():
            yield section, key, Given(SourceKind.FILE, str(path), value, is_text=False)


def _from_environment(
    environment: Mapping[str, str], catalogue: SettingsCatalogue
) -> Iterable[tuple[str, str, Given]]:
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in _OWN_VARIABLES:
            continue
        rest = variable.removeprefix(PREFIX)
        sections = [name for name in catalogue.names if rest.startswith(f"{name.upper()}_")]
        if not sections:
            raise _unknown_variable(variable, catalogue)
        section = max(sections, key=len)
        key = rest[len(section) + 1 :].lower()
        text = environment[variable]
        yield section, key, Given(SourceKind.ENVIRONMENT, variable, text, is_text=True)


def _unknown_variable(variable: str, catalogue: SettingsCatalogue) -> SettingsError:
    known = list(_OWN_VARIABLES)
    for name in catalogue.names:
        known += [_variable(name, key) for key in catalogue.model(name).model_fields]
    return SettingsError(
        f"environment variable {variable}",
        f"a known {PREFIX}* variable",
        "an unknown one",
        did_you_mean(variable, known),
    )


def _variable(section: str, key: str) -> str:
    return f"{PREFIX}{section.upper()}_{key.upper()}"


def _unknown_key(name: str, key: str, item: Given, model: type[BaseModel]) -> SettingsError:
    advice = did_you_mean(key, model.model_fields)
    if item.kind is SourceKind.ENVIRONMENT:
        known = [_variable(name, field) for field in model.model_fields]
        advice = did_you_mean(item.where, known)
    return SettingsError(
        f"setting {name}.{key} ({item.where})",
        f"a key of section {name!r}",
        f"the unknown key {key!r}",
        advice,
    )


def _unfit(
    name: str, given: Mapping[str, Given], error: ValidationError, model: type[BaseModel]
) -> SettingsError:
    key, required, found, remedy = describe_first_error(error, model)
    item = given.get(key.split(".")[0])
    where = item.where if item is not None else ", ".join(sorted({g.where for g in given.values()}))
    return SettingsError(f"setting {name}.{key} ({where or 'default'})", required, found, remedy)


def _plain_value(item: Given, field: FieldInfo) -> Any:
    return text_to_value(field.annotation, item.value) if item.is_text else item.value


def _shown(value: Any) -> Any:
    """A JSON-ready value with secrets masked."""
    if isinstance(value, SecretStr):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _shown(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_shown(item) for item in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
