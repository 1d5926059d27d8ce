"""The command `hal`. Other packages join it by `hal_register_commands`."""

from hal.cli.app import main
from hal.cli.context import CliContext, cli_context

__all__ = ["CliContext", "cli_context", "main"]
