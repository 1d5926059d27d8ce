"""The forms of `hal audit` besides MODEL: `hal audit run PROGRAM…` and `hal audit show REPORT`.

The first word tells them apart, because all that follows `run` belongs to the program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from hal.auditing.gate import AuditOutputs
from hal.cli import audit_options as gate
from hal.cli.option_groups import takes

_FORMS = ("run", "show")
_WORDS = "hal.audit.words"


class AuditCommand(TyperCommand):
    """A command whose first word may name another form, whose words are not options of this."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click's `Command.parse_args`."""
        if args and args[0] in _FORMS:
            ctx.meta[_WORDS] = list(args)
            return []
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """See click's `Command.invoke`."""
        words = ctx.meta.get(_WORDS)
        if words is None:
            return super().invoke(ctx)
        if words[0] == "run":
            from hal.cli.audit_run import run_program

            raise typer.Exit(run_program(words[1:]))
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(_show)
        return get_command(app).main(args=words[1:], prog_name="hal audit show")


@takes(outputs=gate.read_outputs)
def _show(
    report: Annotated[Path, typer.Argument(help="A report that --json wrote.")],
    outputs: AuditOutputs,
    fail_on: gate.FailOn = None,
) -> None:
    """Show a stored report again, or write it as another kind of file."""
    from hal.cli.audit_show import show_report

    raise typer.Exit(show_report(report, outputs, fail_on))
