"""`hal db`: look into the capability database, check files of one's own, compare and export."""

from __future__ import annotations

import typer


def register_commands(cli: typer.Typer) -> None:
    """Add the group `db` to the root command."""
    from hal_capability_db.cli import diff, export, listing, show, validate

    group = typer.Typer(
        name="db",
        help="The capability database: what each device is and can do, with sources.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in (listing, show, validate, diff, export):
        module.register(group)
    cli.add_typer(group, name="db")
