"""Turn sections of the settings into options of a command."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from hal.cli.context import cli_context
from hal.errors import SettingsError
from hal.settings_text import is_bool, is_mapping, is_sequence

Command = Callable[..., Any]


def settings_options(**sections: type[BaseModel]) -> Callable[[Command], Command]:
    """A decorator that gives a command one option for each key of the sections.

    The command has a parameter `ctx: typer.Context`; it finds the settings, its options included,
    in `cli_context(ctx).settings`. An option is the key with dashes: `max_num_seqs` becomes
    `--max-num-seqs`, true-or-false keys become `--x / --no-x`, lists are given by repeating the
    option, mappings by repeating `KEY=VALUE`. A secret has no option, because a command line can
    be read by every user of the machine: it is set in the file or the environment.

    Raises:
        SettingsError: two keys, or a key and a parameter of the command, have one name.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command)
        hints = typing.get_type_hints(command, include_extras=True)
        options = _options(sections, set(own.parameters))
        names = set(own.parameters)

        @functools.wraps(command)
        def run(**arguments: Any) -> Any:
            shared = cli_context(arguments["ctx"])
            flags = {
                dotted: (f"--{parameter.replace('_', '-')}", _value(arguments[parameter], field))
                for parameter, (dotted, field) in options.items()
                if arguments[parameter] not in (None, [], ())
            }
            shared.settings = shared.settings.with_flags(flags)
            return command(**{name: arguments[name] for name in names})

        added = [_parameter(name, dotted, field) for name, (dotted, field) in options.items()]
        parameters = [
            p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for p in own.parameters.values()
        ]
        run.__signature__ = own.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]  # what inspect reads
        run.__annotations__ = hints | {p.name: p.annotation for p in added}
        return run

    return decorate


def _options(
    sections: Mapping[str, type[BaseModel]], taken: set[str]
) -> dict[str, tuple[str, FieldInfo]]:
    options: dict[str, tuple[str, FieldInfo]] = {}
    for section, model in sections.items():
        for key, field in model.model_fields.items():
            if SecretStr in (field.annotation, *typing.get_args(field.annotation)):
                continue
            if key in options or key in taken:
                rival = options[key][0] if key in options else "a parameter of the command"
                raise SettingsError(
                    f"option --{key.replace('_', '-')}",
                    "one meaning",
                    f"{section}.{key} and {rival}",
                    "rename one of the keys",
                )
            options[key] = (f"{section}.{key}", field)
    return options


def _parameter(name: str, dotted: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    text = field.description or f"setting {dotted}"
    if not field.is_required() and field.default_factory is None and field.default is not None:
        text += f" [default: {field.default}]"
    kind: Any = str | None
    declaration, metavar = flag, None
    if is_bool(field.annotation):
        kind, declaration = bool | None, f"{flag}/--no-{name.replace('_', '-')}"
    elif is_mapping(field.annotation):
        kind, metavar = list[str] | None, "KEY=VALUE"
    elif is_sequence(field.annotation):
        kind = list[str] | None
    option = typer.Option(
        declaration,
        help=text,
        metavar=metavar,
        show_default=False,
        rich_help_panel=dotted.split(".")[0],
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _value(given: Any, field: FieldInfo) -> Any:
    """Repeated options joined into the text form that settings have in the environment."""
    if isinstance(given, list) and (is_mapping(field.annotation) or is_sequence(field.annotation)):
        return ",".join(given)
    return given
