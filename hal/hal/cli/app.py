"""The root command: core commands at once, commands of plug-ins only when one is asked for."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from hal.cli import devices, diff, doctor, ops, plugin_new, settings, version
from hal.cli.context import CliContext
from hal.cli.output import print_error
from hal.errors import PluginError, UsageError, UserError
from hal.suggestions import did_you_mean
from hal.variables import CONFIG_VARIABLE, DEBUG_VARIABLE, PREFIX

_USER_INTERRUPT_EXIT = 130
_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
AUTOLOAD_IS_OURS = _AUTOLOAD_VARIABLE not in os.environ
"""Whether `main` sets that variable: a program that `hal` runs is not to see it."""


class LazyGroup(TyperGroup):
    """A group that loads command-providing plug-ins only for a name that is not a core one.

    Its methods take the context as `Any`: typer carries its own copy of click, or uses click's,
    by version.
    """

    _plugin_commands: dict[str, Any] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        """The core commands, then those of plug-ins, each part sorted."""
        return [*sorted(self.commands), *sorted(self._of_plugins(ctx))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A core command, or else a plug-in's.

        Raises:
            UsageError: nobody has a command of that name.
        """
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        found = self._of_plugins(ctx)
        if cmd_name in found:
            return found[cmd_name]
        if ctx.resilient_parsing:
            return None
        troubles = [
            f"{state.entry} is {state.status.value}"
            for state in _shared(ctx).loader.states
            if state.status.is_trouble
        ]
        hint = f" ({'; '.join(troubles)}: see `hal doctor`)" if troubles else ""
        raise UsageError(
            f"hal {cmd_name}",
            "a known command",
            f"no command {cmd_name!r}{hint}",
            did_you_mean(cmd_name, [*self.commands, *found]),
        )

    def _of_plugins(self, ctx: Any) -> dict[str, Any]:
        if self._plugin_commands is None:
            self._plugin_commands = _load_plugin_commands(_shared(ctx), set(self.commands))
        return self._plugin_commands


def _shared(ctx: Any) -> CliContext:
    if not isinstance(ctx.obj, CliContext):
        ctx.obj = _create_context(ctx.params.get("config"), bool(ctx.params.get("debug")))
    shared: CliContext = ctx.obj
    return shared


def _create_context(config: Path | None, is_debug: bool) -> CliContext:
    """The context of this process, whose plug-ins and children read the same configuration."""
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config.absolute())
    return CliContext(config, is_debug)


def _load_plugin_commands(shared: CliContext, core: set[str]) -> dict[str, Any]:
    commands: dict[str, Any] = {}
    owners: dict[str, str] = dict.fromkeys(core, "hal itself")
    for plugin in shared.loader.load_providing("commands"):
        part = typer.Typer(pretty_exceptions_enable=False)
        try:
            plugin.register_commands(part)
        except PluginError as error:
            shared.loader.record_failure(plugin.entry, error)
            continue
        for name, command in get_group(part).commands.items():
            if name in owners:
                raise PluginError(
                    str(plugin.entry),
                    f"a command name of its own for {name!r}",
                    f"{name!r} belongs to {owners[name]}",
                    f'disable one of them: plugins.disable = ["{plugin.entry.key}"]',
                )
            owners[name] = str(plugin.entry)
            commands[name] = command
    return commands


def _root(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file (TOML); default: $HAL_CONFIG.")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; also by HAL_DEBUG=1.")
    ] = False,
) -> None:
    """Detect accelerators, plan how a model runs on them, serve it; nothing falls back silently."""
    if not isinstance(ctx.obj, CliContext):
        ctx.obj = _create_context(config, debug)
    _check_variables(ctx.obj)


def _check_variables(shared: CliContext) -> None:
    """Whatever the command, also one that reads no setting: a `HAL_*` variable that nothing knows
    is an error. Costs nothing where there is none. Raises SettingsError."""
    own = (CONFIG_VARIABLE, DEBUG_VARIABLE)
    if any(name.startswith(PREFIX) and name not in own for name in os.environ):
        shared.settings.check_known_variables()


def create_app() -> typer.Typer:
    """The application with its core commands."""
    app = typer.Typer(
        name="hal",
        cls=LazyGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for module in (devices, diff, doctor, ops, plugin_new, settings, version):
        module.register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `hal`. Exit codes: 0 fine, 1 something found wrong, 2 a user's error, 130 interrupted;
    `hal diff` has more, see `hal.auditing.changes`."""
    # Vendors' torch extensions are loaded by their plug-ins, never by `import torch` itself.
    os.environ.setdefault(_AUTOLOAD_VARIABLE, "0")
    words = list(sys.argv[1:] if arguments is None else arguments)
    shared = CliContext(is_debug="--debug" in words)
    command = get_command(create_app())
    configured = os.environ.get(CONFIG_VARIABLE)
    try:
        command.main(args=words, prog_name="hal")
    except UserError as error:
        print_error(error, is_debug=shared.is_debug)
        sys.exit(error.exit_code)
    except ExceptionGroup as group:
        if group.split(UserError)[1] is not None:
            raise
        print_error(group, is_debug=shared.is_debug)
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        sys.exit(_USER_INTERRUPT_EXIT)
    finally:
        # `--config` sets it for this command and its children, not for what runs next in here.
        if configured is None:
            os.environ.pop(CONFIG_VARIABLE, None)
        else:
            os.environ[CONFIG_VARIABLE] = configured
    sys.exit(0)
