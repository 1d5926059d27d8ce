"""The engine's commands: plan, models, serve, audit."""

from __future__ import annotations

import typer

from hal_engine.cli.audit import audit
from hal_engine.cli.audit_forms import AuditCommand
from hal_engine.cli.lock import lock
from hal_engine.cli.models import models
from hal_engine.cli.plan import plan
from hal_engine.cli.serve import serve


def register_commands(cli: typer.Typer) -> None:
    """Adds them to `hal`."""
    cli.command()(plan)
    cli.command()(lock)
    cli.command()(models)
    cli.command()(serve)
    cli.command(cls=AuditCommand)(audit)
