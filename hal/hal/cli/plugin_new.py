"""`hal plugin new`: a working skeleton of a plug-in."""

from pathlib import Path
from typing import Annotated

import typer

from hal.cli.output import print_text


def register(app: typer.Typer) -> None:
    """Add the group `plugin` to `app`."""
    group = typer.Typer(no_args_is_help=True, help="Write plug-ins for accelerators.")
    group.callback()(_group)
    group.command("new")(_new)
    app.add_typer(group, name="plugin")


def _group() -> None:
    """Write plug-ins for accelerators."""


def _new(
    name: Annotated[str, typer.Argument(help="Name of the backend: a-z, 0-9 and _.")],
    directory: Annotated[
        Path, typer.Option("--directory", help="Where the new folder is made.")
    ] = Path(),
) -> None:
    """Write a plug-in that works: packaging, detection, one kernel, self-test, tests.

    The folder is `hal-NAME`. Nothing that exists is changed.
    """
    from hal.plugin_skeleton import write_skeleton

    written = write_skeleton(name, directory)
    root = directory / f"hal-{name.replace('_', '-')}"
    for path in written:
        typer.echo(str(path))
    print_text(
        f"Its tests pass as they are: cd {root} && python -m pytest. "
        "docs/plugins.md says what to put in their place."
    )
