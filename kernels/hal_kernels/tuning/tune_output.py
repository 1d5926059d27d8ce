"""What a tuning shows: a bar while it runs, then the fastest of each class against the default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hal.cli.output import create_console, print_table, print_text
from hal_kernels.tuning.configuration_files import ShapeEntry, Trial
from hal_kernels.tuning.session import Report, TuningSession, TuningTask
from hal_kernels.tuning.tunable import configuration_name
from hal_kernels.tuning.tune_device import INTERPRETER

MODEL_NOTE = (
    "These times are of a model, not measured: they rank configurations by what their machine code "
    "takes (occupancy, bytes, waves, operations) and by the device's rates; those that could not "
    "win whatever their code are left out, and a default stays where less than a tenth is gained. "
    "Measure on the device: the same command there."
)


@contextlib.contextmanager
def progress(tasks: Sequence[TuningTask], *, is_quiet: bool) -> Iterator[Report]:
    """A bar over all trials; on a pipe one line per class, with `is_quiet` nothing."""
    console = create_console()
    if is_quiet or not console.is_terminal:

        def tell(task: TuningTask, entry: ShapeEntry, total: int) -> None:
            if not is_quiet and entry.is_complete:
                count = f"{len(entry.trials)} of {total} configurations"
                console.print(f"{task.tunable.kernel} {task.shape}: {count} tried")

        yield tell
        return
    with _bars(console) as bars:
        totals = {id(task): len(task.configurations) for task in tasks}
        bar = bars.add_task("", total=sum(totals.values()))
        tried: dict[int, int] = {}

        def show(task: TuningTask, entry: ShapeEntry, total: int) -> None:
            tried[id(task)] = total if entry.is_complete else min(total, len(entry.trials))
            best = entry.best()
            told = "" if best is None else f", best {best.us:,.1f} µs"
            bars.update(
                bar,
                completed=sum(tried.values()),
                description=f"{task.basis} {task.tunable.kernel} rows {task.shape.rows}{told}",
            )

        yield show


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def print_results(
    tasks: Sequence[TuningTask], entries: Sequence[ShapeEntry], session: TuningSession
) -> None:
    """A row per class."""
    rows = []
    for task, entry in zip(tasks, entries, strict=True):
        best, default = entry.best(), _default_trial(task, entry)
        rows.append(
            (
                task.tunable.kernel,
                str(task.shape).replace(",", " "),
                "nothing launches" if best is None else configuration_name(best.configuration),
                "" if best is None else f"{best.us:,.1f}",
                _gain(best, default),
                "" if best is None else f"{best.tier}, {best.registers} registers",
            )
        )
    basis = tasks[0].basis if tasks else "modelled"
    print_table(
        ("kernel", "class", f"best ({basis})", "µs", "default", "code"),
        rows,
        whole=("µs", "default"),
    )
    if basis == "modelled":
        print_text(MODEL_NOTE)
    if any(task.key.startswith(INTERPRETER) for task in tasks):
        print_text("These times are of Triton's interpreter on this host: no device is like them.")
    for kernel, count in session.dropped.items():
        print_text(f"{kernel}: {count} trials of another source or Triton were made anew")
    for path in dict.fromkeys(session.path_of(task) for task in tasks):
        print_text(f"kept in {path}")


def _default_trial(task: TuningTask, entry: ShapeEntry) -> Trial | None:
    wanted = task.configurations[0]
    return next((trial for trial in entry.trials if trial.configuration == wanted), None)


def _gain(best: Trial | None, default: Trial | None) -> str:
    """How much longer the default takes."""
    if best is None or default is None or best.us is None or default.us is None:
        return "fails" if default is not None and default.error else ""
    return "same" if best is default else f"+{default.us / best.us - 1.0:.0%}"
