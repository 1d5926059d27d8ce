"""What `hal plan` and `hal lock` plan for: a model on a device or a group, here or known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hal.cli.option_groups import takes
from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal.measurements import with_measurements
from hal.plan import Plan
from hal_engine.cli import arguments as args
from hal_engine.device_choice import (
    check_software,
    device_or_profile,
    parse_count,
    parse_group,
    parse_software,
    present_group,
)
from hal_engine.planning import plan_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """As the command line has it. group: number of devices, "x8". software: NAME=VERSION each."""

    choices: args.ModelChoices
    group: str | None
    host: Path | None
    software: Sequence[str]

    @property
    def names_device(self) -> bool:
        """Whether a device or a number of them was given."""
        return self.group is not None or self.choices.flags["engine.device"] is not None

    def resolve(self, consumer: str) -> ResolvedTarget:
        """The words read, as settings. Raises SettingsError, ModelNotFoundError."""
        flags = self.choices.flags
        name, count = parse_group(flags["engine.device"] or "")
        count = one_count(
            count, None if self.group is None else parse_count(self.group), flags["engine.tp"]
        )
        flags = {**flags, "engine.device": name or None, "engine.tp": count}
        choices = dataclasses.replace(self.choices, flags=flags)
        session = choices.session(consumer, host=self.host)
        return ResolvedTarget(session=session, count=count, software=parse_software(self.software))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTarget:
    """count: number of devices, None where nobody gave one. software: distribution -> version."""

    session: args.Session
    count: int | None
    software: Mapping[str, str]

    def plans(self, groups: Sequence[tuple[str, int | None]] | None = None) -> list[Plan]:
        """The plan for each device or group, as reports; of the target's own by default.

        Raises SettingsError for software that nobody asks about, and what planning raises.
        """
        if groups is None:
            groups = [(self.session.options.device, self.count)]
        self._check_software([name for name, _ in groups])
        return [_plan_device(self.session, *group, self.software) for group in groups]

    def _check_software(self, names: Sequence[str]) -> None:
        """Software that no implementation for any of the absent devices asks about is an error."""
        registry = args.load_session_backends(self.session).registry
        here = {device.device_id for device in registry.devices} | {"", "all"}
        if self.software and not here.intersection(names):
            check_software(registry, [registry.profile(name) for name in names], self.software)


@takes(choices=args.read_model_choices)
def read_plan_target(
    choices: args.ModelChoices,
    group: Annotated[
        str | None, typer.Argument(help="Number of devices, as x8: tensor-parallel ranks.")
    ] = None,
    host: Annotated[
        Path | None,
        typer.Option(help="A recorded host (`hal devices --record FILE`) in place of this one."),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help="Software on a device that is not here, NAME=VERSION."),
    ] = None,
) -> PlanTarget:
    """The options that `hal plan` and `hal lock` share (for `takes`)."""
    return PlanTarget(choices=choices, group=group, host=host, software=with_ or ())


def one_count(*counts: int | None) -> int | None:
    """The number of devices, however it was given. Raises SettingsError for two different ones."""
    given = {count for count in counts if count is not None}
    if len(given) > 1:
        found = " and ".join(str(count) for count in sorted(given))
        raise SettingsError("number of devices", "one number", found, "give it once")
    return given.pop() if given else None


def _plan_device(
    session: args.Session, name: str, count: int | None, software: Mapping[str, str]
) -> Plan:
    """The plan for one device or group, as a report."""
    backends = args.load_session_backends(session)
    spec: DeviceSpec
    if name == "all":
        spec, size = present_group(backends.registry)
        count = size if count is None else count
        if count > size:
            raise SettingsError(
                "number of devices",
                f"at most the {size} of this host",
                f"x{count}",
                "name a device instead of all: a group of it need not be here",
            )
    else:
        spec = device_or_profile(backends.registry, name, software)
    options = session.options
    if count is not None:
        options = options.model_copy(update={"tp": count})
    planned = plan_model(
        session.model,
        options.model_copy(update={"device": name}),
        backends.registry,
        backends.waivers,
        backends.use,
        device=with_measurements(spec),
        is_strict=False,
    )
    return planned.plan
