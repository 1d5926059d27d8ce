"""Arguments that the engine's commands share, and how they become settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.cli.context import CliContext, cli_context
from hal.errors import SettingsError
from hal.host_recorded import load_recorded_host
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.model_source import resolve_model
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model

Model = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face folder (config.json, safetensors), a .gguf file, or, for plans, the "
        "name of a preset (`hal models`)."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a command works with once its arguments are read."""

    shared: CliContext
    options: EngineOptions
    model: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoices:
    """A model and how it is to run, as the command line has it. flags: setting -> value, None
    where it was not given."""

    ctx: typer.Context
    model: str
    use: Sequence[str] | None = None
    assignments: Sequence[str] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def session(
        self, consumer: str, *, flags: Mapping[str, Any] | None = None, host: Path | None = None
    ) -> Session:
        """Settings of all sources under these options. flags: more of them, which come first.

        Raises SettingsError, ModelNotFoundError.
        """
        shared = cli_context(self.ctx)
        if host is not None:
            shared.host = load_recorded_host(host)
        given = _given(self.assignments, self.use, {**(flags or {}), **self.flags})
        shared.settings = shared.settings.with_flags(given)
        return Session(
            shared=shared,
            options=shared.settings.section("engine", EngineOptions, consumer=consumer),
            model=resolve_model(self.model),
        )


def read_model_choices(
    ctx: typer.Context,
    model: Model,
    precision: Annotated[
        str | None,
        typer.Option(help="auto (weights as stored), fp32, bf16, w8, w8a8, w4, w4a8."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device id, e.g. cpu:0; see `hal devices`. For plans also a device that is known "
            '(`hal db list`), "all" of this host, or a group, "NAME x8".'
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks.")] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            "--use",
            help="Explicit choice OP=NAME, e.g. attention.decode=NAME. Works or is an error.",
        ),
    ] = None,
    waivers: Annotated[Path | None, typer.Option(help="Waiver file (TOML).")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting, SECTION.KEY=VALUE, e.g. engine.max_num_seqs=16. See `hal settings`.",
        ),
    ] = None,
) -> ModelChoices:
    """What every command that plans or runs a model takes (for `takes`)."""
    return ModelChoices(
        ctx=ctx,
        model=model,
        use=use,
        assignments=set_,
        flags={
            "engine.precision": precision,
            "engine.device": device,
            "engine.tp": tp,
            "selection.waivers": waivers,
        },
    )


def _given(
    assignments: Sequence[str] | None, use: Sequence[str] | None, flags: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """section.key -> (option as written, value)."""
    given: dict[str, tuple[str, Any]] = {}
    for text in assignments or ():
        key, value = _split(text, "--set", "SECTION.KEY=VALUE")
        given[key] = (f"--set {key}", value)
    if use:
        chosen = dict(_split(text, "--use", "OP=NAME") for text in use)
        given["selection.use"] = ("--use", chosen)
    for key, value in flags.items():
        if value is not None:
            option = "--" + key.partition(".")[2].replace("_", "-")
            given[key] = (option, str(value) if isinstance(value, Path) else value)
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBackends:
    """The loaded back-ends and what the user says about choosing."""

    registry: BackendRegistry
    waivers: WaiverBook
    use: Mapping[str, str]


def load_session_backends(session: Session) -> SessionBackends:
    """Loads the back-ends; a key of the settings that nothing reads is an error."""
    shared = session.shared
    # The plug-ins' and selection's own keys are read here, so that an unfit one is said first.
    found = SessionBackends(use=shared.use, waivers=shared.waivers, registry=shared.backends)
    shared.settings.check_consumed(["engine", "selection", "plugins"])
    return found


def plan_session(session: Session) -> tuple[PlannedModel, BackendRegistry]:
    """Loads the back-ends and plans for a device that is here. Raises what they raise."""
    backends = load_session_backends(session)
    planned = plan_model(
        session.model,
        session.options,
        backends.registry,
        backends.waivers,
        backends.use,
        must_run=True,
    )
    return planned, backends.registry


def _split(text: str, option: str, form: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip() or not value.strip():
        raise SettingsError(f"option {option}", form, repr(text), f"write {option} {form}")
    return key.strip(), value.strip()
