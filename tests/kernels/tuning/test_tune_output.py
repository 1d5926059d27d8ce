"""The bar of `hal kernels tune`: it counts every trial once, also those of an earlier run."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from hal_kernels.tuning import tune_output
from hal_kernels.tuning.configuration_files import ShapeEntry
from hal_kernels.tuning.session import TuningSession, TuningTask
from hal_kernels.tuning.store import user_store

Tasks = Callable[..., TuningTask]
SHAPES = ("n=64,k=128,rows=4", "n=64,k=128,rows=300")


class Shown:
    """What a tuning shows on a terminal or on a pipe, and the bar after each report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> None:
        self._out = io.StringIO()
        self._console = Console(
            file=self._out, force_terminal=is_terminal, width=100, markup=False, highlight=False
        )
        self._made: list[Progress] = []
        self.counts: list[float] = []
        monkeypatch.setattr(tune_output, "create_console", lambda: self._console)
        bars = tune_output._bars

        def made(console: Console) -> Progress:
            self._made.append(bars(console))
            return self._made[-1]

        monkeypatch.setattr(tune_output, "_bars", made)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._out.getvalue())

    def run(self, tasks: list[TuningTask], compiler: Any, *, is_quiet: bool = False) -> None:
        session = TuningSession(user_store(), compile=compiler)
        with tune_output.progress(tasks, is_quiet=is_quiet) as report:

            def told(task: TuningTask, entry: ShapeEntry, total: int) -> None:
                report(task, entry, total)
                self.counts += [bar.tasks[0].completed for bar in self._made[-1:]]

            session.run(tasks, told)


def test_the_bar_goes_through_every_configuration(
    task: Tasks, spilling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task(shape=shape) for shape in SHAPES]
    total = sum(len(one.configurations) for one in tasks)
    shown = Shown(monkeypatch, is_terminal=True)
    shown.run(tasks, spilling())
    assert shown.counts == sorted(shown.counts)
    assert shown.counts[:2] == [0, 1]
    assert shown.counts[-1] == total
    assert len(tasks[0].configurations) in shown.counts
    assert f"{total}/{total}" in shown.text
    last = shown.text.rstrip().splitlines()[-1]
    name = f"modelled {tasks[-1].tunable.kernel} rows {tasks[-1].shape.rows}"
    assert re.match(rf"{re.escape(name)}, best [\d.,]+ µs ", last)


@pytest.mark.parametrize("at", [1, 3])
def test_the_bar_goes_on_where_an_interrupted_run_ended(
    at: int, task: Tasks, spilling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = task()
    with pytest.raises(KeyboardInterrupt):
        Shown(monkeypatch, is_terminal=True).run([one], spilling(interrupted_at=at))
    shown = Shown(monkeypatch, is_terminal=True)
    shown.run([one], spilling())
    assert shown.counts[0] == at
    assert shown.counts[-1] == len(one.configurations)


def test_on_a_pipe_there_is_a_line_per_class_and_quiet_is_nothing(
    task: Tasks, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task(shape=shape) for shape in SHAPES]
    shown = Shown(monkeypatch, is_terminal=False)
    shown.run(tasks, compiler())
    lines = shown.text.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"{one.tunable.kernel} {one.shape}" for one in tasks
    ]
    for one, line in zip(tasks, lines, strict=True):
        found = re.search(r": (\d+) of (\d+) configurations tried$", line)
        assert found is not None
        assert 0 < int(found[1]) <= int(found[2]) == len(one.configurations)
    assert shown.counts == []
    quiet = Shown(monkeypatch, is_terminal=True)
    quiet.run(tasks, compiler(), is_quiet=True)
    assert quiet.text == ""
