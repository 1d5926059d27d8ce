"""`hal serve MODEL`: plan, load, and answer OpenAI's API."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hal.cli.option_groups import takes
from hal.cli.output import VisibleConsole
from hal_engine.cli import arguments as args
from hal_engine.cli.plan_table import print_plan, terminal

if TYPE_CHECKING:
    from hal_engine.building import Progress as Report

# The engine's thread takes the interpreter lock back after each kernel; Python's default lets the
# server's thread keep it for 5 ms, as long as half a decode step.
SWITCH_INTERVAL_S = 0.0002


@takes(choices=args.read_model_choices)
def serve(
    choices: args.ModelChoices,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key clients must send.")
    ] = None,
) -> None:
    """Serve a model with an OpenAI-compatible API, after printing the plan it runs by."""
    from hal_engine.server.config import ServerConfig
    from hal_engine.server.run import bind_listener, check_exposure, run_server
    from hal_engine.server.signals import end_process_within, ignore_signals
    from hal_engine.serving import start_engine

    flags = {"serve.host": host, "serve.port": port, "serve.api_key_file": api_key_file}
    session = choices.session("hal serve", flags=flags)
    server = session.shared.settings.section("serve", ServerConfig, consumer="hal serve")
    check_exposure(server)
    listener = bind_listener(server)  # a port that is taken is said before the model loads
    planned, registry = args.plan_session(session)
    console = terminal()
    print_plan(planned.plan, console=console)
    with _progress(VisibleConsole(stderr=True)) as report:
        engine = start_engine(
            planned,
            registry,
            use=session.shared.use,
            waivers=session.shared.selection_settings.waivers or "",
            disabled_plugins=session.shared.plugin_settings.disable,
            progress=report,
            audit_every=server.audit_every,
        )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    freeze_loaded_objects()
    status = run_server(engine, server, listener=listener)
    ignore_signals()
    end_process_within(server.abort_deadline_s, status)
    raise typer.Exit(status)


def freeze_loaded_objects() -> None:
    """Spares requests the collector's look at all that loading made: a third of a million objects
    where kernels were compiled, a quarter of a second that would fall into one of the first."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """Bars for checking and loading; on a pipe nothing but the end of each is printed."""
    titles = {"check": "checking weights", "load": "packing layers", "compile": "kernels by size"}
    if not console.is_terminal:

        def tell(what: str, done: int, total: int) -> None:
            if done == total:
                console.print(f"{titles.get(what, what)}: done")

        yield tell
        return
    with Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(titles.get(what, what), total=total)
            bars.update(tasks[what], completed=done)

        yield show
