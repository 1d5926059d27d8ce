"""`hal version`: runs nothing of a plug-in."""

import platform
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from hal.cli.output import print_json, print_table
from hal.plugins.loading import API_VERSION

_SHOWN = ("halstack", "torch", "numba", "numpy", "tokenizers", "pluggy", "pydantic")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("version")(_version)


def _version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions of halstack, its plug-in API and what it builds on."""
    versions = {name: distribution_version(name) for name in _SHOWN}
    versions |= {"plug-in API": API_VERSION, "python": platform.python_version()}
    if as_json:
        print_json(versions)
    else:
        print_table(("what", "version"), versions.items())
