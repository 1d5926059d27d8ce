"""`hal kernels tune`: configurations of kernels, measured on a device or ranked by a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hal.cli.context import cli_context
from hal.cli.output import print_text
from hal.errors import UsageError
from hal_kernels.tuning.candidate_timing import Candidates, time_candidates
from hal_kernels.tuning.configuration_files import Basis, ShapeEntry
from hal_kernels.tuning.measuring import Timer, device_timer
from hal_kernels.tuning.session import TuningSession, TuningTask, make_task
from hal_kernels.tuning.store import user_store
from hal_kernels.tuning.tunable import TunableKernel
from hal_kernels.tuning.tunable_kernels import TUNABLE, find_tunable
from hal_kernels.tuning.tune_device import TuneDevice, interpreted, tune_device
from hal_kernels.tuning.tune_output import print_results, progress
from hal_kernels.tuning.tune_shapes import Classes, classes_of_model, named_classes

_INTERRUPTED = 130


def tune_kernels(
    ctx: typer.Context,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="This kernel; may be repeated.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="A class, as n=4096,k=7168,rows=16; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The classes of a model's plan, as `hal plan`.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="A device of this host or one that is known; NAME x8 for a plan.")
    ] = "",
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--estimate",
            help="Measure, or fail; or rank by the model although the device is here.",
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder to keep them in; by default the user's.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON instead of tables.")
    ] = False,
    interpreter: Annotated[
        bool,
        typer.Option(
            "--interpreter",
            hidden=True,
            help="Debugging: measure in Triton's interpreter, which says nothing of a device.",
        ),
    ] = False,
) -> None:
    """Try the configurations of kernels, and keep the fastest for launches.

    On a live device each is measured; without one a model ranks them by their compiled resources.
    Each trial is kept at once: after an interruption the same command goes on.
    """
    if (shape is None) == (model is None):
        found = "neither" if shape is None else "both"
        raise UsageError(
            "hal kernels tune", "--shape or --model", found, "name one: what is to be tuned"
        )
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    kernels = [find_tunable(name) for name in kernel or TUNABLE]
    name = device.split(" x")[0].strip()
    found_device = tune_device(
        cli_context(ctx).backends, name, is_measured=bool(measure) and not interpreter
    )
    chosen = interpreted(found_device) if interpreter else found_device
    classes = _classes(kernels, shape, model, device or found_device.spec.device_id, chosen)
    basis: Basis = "measured" if chosen.is_live and measure is not False else "modelled"
    tasks = [
        make_task(one, of, chosen.target, chosen.spec, basis=basis, key=chosen.key)
        for one, of in classes
    ]
    session = TuningSession(store or user_store(), _timer(chosen) if basis == "measured" else None)
    _run(session, tasks, is_json=json_)
    if session.timer is not None and not interpreter:
        _time_candidates(session, tasks, cli_context(ctx).backends.candidates, is_quiet=json_)


def _classes(
    kernels: Sequence[TunableKernel],
    shapes: Sequence[str] | None,
    model: str | None,
    device: str,
    chosen: TuneDevice,
) -> Classes:
    if model is not None:
        return classes_of_model(model, device, kernels, chosen.target)
    if len(kernels) > 1 and len({one.size_names for one in kernels}) > 1:
        raise UsageError(
            "option --shape", "one --kernel that it is of", "none or several", "name the kernel"
        )
    units = int(chosen.spec.attributes.get("compute_units", 0))
    return named_classes(kernels, shapes or (), chosen.target, units)


def _timer(device: TuneDevice) -> Timer:
    return device_timer(device.spec.torch_device)


def _time_candidates(
    session: TuningSession, tasks: Sequence[TuningTask], candidates: Candidates, *, is_quiet: bool
) -> None:
    """Beside the configurations of ours, what others take for the same calls: by these times plans
    divide the numbers of tokens."""
    if session.timer is None:
        return
    for task in tasks:
        entry = time_candidates(task, candidates, session.timer, session.store)
        if entry is not None and not is_quiet:
            times = ", ".join(
                f"{t.candidate} {t.error if t.us is None else f'{t.us:,.1f} µs'}"
                for t in entry.times
            )
            print_text(f"{task.tunable.kernel} {task.shape}: {times}")


def _run(session: TuningSession, tasks: Sequence[TuningTask], *, is_json: bool) -> None:
    done: list[ShapeEntry] = []
    try:
        with progress(tasks, is_quiet=is_json) as report:
            done = session.run(tasks, report)
    except KeyboardInterrupt:
        print_text("interrupted: what was tried is kept, and the same command goes on behind it")
        raise typer.Exit(_INTERRUPTED) from None
    if is_json:
        found = [
            {"device": task.key, "kernel": task.tunable.kernel}
            | entry.model_dump(exclude={"trials"})
            | {"best": None if (best := entry.best()) is None else best.model_dump()}
            for task, entry in zip(tasks, done, strict=True)
        ]
        sys.stdout.write(json.dumps({"configurations": found}, indent=1) + "\n")
        return
    print_results(tasks, done, session)
