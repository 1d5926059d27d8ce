"""`hal version`: runs nothing of a plug-in."""

import platform
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from hal.cli.output import print_json, print_table
from hal.hookspecs import PLUGIN_API

_SHOWN = ("halstack", "torch", "numba", "numpy", "tokenizers", "pluggy", "pydantic")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("version")(_version)


def _version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions of halstack, its plug-in API and what it builds on."""
    versions = {name: distribution_version(name) for name in _SHOWN}
    versions |= {"plug-in API": ".".join(map(str, PLUGIN_API)), "python": platform.python_version()}
    if as_json:
        print_json(versions)
    else:
        print_table(("what", "version"), versions.items())
