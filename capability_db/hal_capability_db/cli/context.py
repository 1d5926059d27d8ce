"""Which database a command of `hal db` works on: the built-in one under the user's overlays."""

from __future__ import annotations

from pathlib import Path

import typer

from hal.cli.context import cli_context
from hal_capability_db.database import Database
from hal_capability_db.loader import load_database
from hal_capability_db.settings import DatabaseSettings

CONSUMER = "hal db"


def overlays_of(ctx: typer.Context) -> tuple[Path, ...]:
    """The overlays of the settings, `--config` included."""
    settings = cli_context(ctx).settings
    return settings.section("database", DatabaseSettings, consumer=CONSUMER).overlays


def database_of(ctx: typer.Context) -> Database:
    """The database under the overlays of the settings.

    Raises:
        DatabaseError: a file is refused.
    """
    return load_database(overlays_of(ctx))
