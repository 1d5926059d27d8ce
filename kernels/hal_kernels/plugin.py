"""The kernels as a plug-in: they add `hal kernels`. Hook implementations only."""

from __future__ import annotations

import typer

from hal import hookimpl
from hal.hookspecs import BackendInfo


@hookimpl
def hal_backend_info() -> BackendInfo:
    return BackendInfo(
        name="kernels",
        vendor="halstack",
        api_range=">=1.0,<2",
        provides=frozenset({"commands"}),
    )


@hookimpl
def hal_register_commands(cli: typer.Typer) -> None:
    from hal_kernels.aot.cli import register_commands

    register_commands(cli)
