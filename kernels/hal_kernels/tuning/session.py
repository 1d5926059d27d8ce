"""One tuning: every configuration of every class asked for, each kept as soon as it is tried.

An interruption loses at most the trial that it falls into; the same command goes on behind it.
Trials of another source of the kernel or another Triton are made anew.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal_kernels.aot.targets import Target
from hal_kernels.tuning.configuration_files import (
    Basis,
    ConfigurationFile,
    ShapeEntry,
    Trial,
)
from hal_kernels.tuning.estimating import estimate, least_us, modelled_us
from hal_kernels.tuning.measuring import Measuring, Timer
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.store import (
    code_hash,
    configuration_path,
    device_key,
    is_current,
    load_configurations,
    save_configurations,
    triton_version,
)
from hal_kernels.tuning.trial_compiling import compile_trial
from hal_kernels.tuning.tunable import TunableKernel

Compile = Callable[[str, Target, ShapeClass, Mapping[str, int]], Trial]
Report = Callable[["TuningTask", ShapeEntry, int], None]
"""Called with the task, its entry by now, and how many configurations it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """A class of a kernel on a device. key: what the configurations are kept under."""

    tunable: TunableKernel
    shape: ShapeClass
    target: Target
    device: DeviceSpec
    basis: Basis
    key: str

    @property
    def configurations(self) -> list[dict[str, int]]:
        return self.tunable.configurations(self.target, self.shape, self.device)


@dataclass(slots=True)
class TuningSession:
    """Where trials are kept and how they are made. timer: for the basis "measured"."""

    store: Path
    timer: Timer | None = None
    compile: Compile = compile_trial
    dropped: dict[str, int] = field(default_factory=dict)
    """Kernel -> trials of an older source or Triton that were made anew."""

    def run(self, tasks: Sequence[TuningTask], report: Report) -> list[ShapeEntry]:
        """All tasks in order. Raises SettingsError for a file that cannot be read or written, and
        KernelTuningError from a measurement."""
        for task in {self.path_of(task): task for task in tasks}.values():
            # Before minutes of work: can it be read and written?
            save_configurations(self.path_of(task), self._document(task))
        return [self._run(task, report) for task in tasks]

    def path_of(self, task: TuningTask) -> Path:
        return configuration_path(self.store, task.key, task.tunable.kernel)

    def _run(self, task: TuningTask, report: Report) -> ShapeEntry:
        entry = self._begun(task)
        wanted = self._ordered(task)
        if not entry.is_complete:
            report(task, entry, len(wanted))
        measuring: Measuring | None = None
        tried = [trial.configuration for trial in entry.trials]
        for configuration in wanted:
            if configuration in tried or self._cannot_win(task, entry, configuration):
                continue
            compiled = self._compiled(task, configuration)
            if task.basis == "measured" and not compiled.error and self.timer is not None:
                measuring = measuring or Measuring(
                    task.tunable, task.shape, task.device, self.timer
                )
                trial = measuring.measure(compiled)
            else:
                trial = self._modelled(task, compiled)
            entry = self._kept(task, entry, [*entry.trials, trial], is_complete=False)
            report(task, entry, len(wanted))
        kept = [t for t in entry.trials if t.configuration in wanted]
        done = self._kept(task, entry, kept, is_complete=True)
        report(task, done, len(wanted))
        return done

    def _ordered(self, task: TuningTask) -> list[dict[str, int]]:
        """The default first; by the model then those that may be fastest, so that few need to be
        compiled."""
        default, *others = task.configurations
        if task.basis == "modelled":
            others.sort(key=lambda c: _number(least_us(task.tunable, task.shape, c, task.device)))
        return [default, *others]

    def _cannot_win(
        self, task: TuningTask, entry: ShapeEntry, configuration: Mapping[str, int]
    ) -> bool:
        """Whether the model says so without the machine code."""
        most = entry.us_to_beat() if task.basis == "modelled" else None
        if most is None:
            return False
        return _number(least_us(task.tunable, task.shape, configuration, task.device)) >= most

    def _begun(self, task: TuningTask) -> ShapeEntry:
        """What an earlier run left, if it still holds."""
        document = self._document(task)
        found = document.find(str(task.shape), task.basis)
        if found is not None and is_current(found, task.tunable.kernel):
            return found
        if found is not None:
            kernel = task.tunable.kernel
            self.dropped[kernel] = self.dropped.get(kernel, 0) + len(found.trials)
        return ShapeEntry(
            shape=str(task.shape),
            basis=task.basis,
            code=code_hash(task.tunable.kernel),
            triton=triton_version(),
            made=today(),
        )

    def _document(self, task: TuningTask) -> ConfigurationFile:
        path, kernel = self.path_of(task), task.tunable.kernel
        found = load_configurations(path)
        if found is None:
            return ConfigurationFile(device=task.key, arch=task.target.arch, kernel=kernel)
        if found.arch != task.target.arch:
            raise SettingsError(
                f"file {path}",
                f"configurations for {task.target.arch}",
                found.arch,
                "name another folder with --store, or move the file away",
            )
        return found

    def _compiled(self, task: TuningTask, configuration: Mapping[str, int]) -> Trial:
        """The machine code of a configuration: sizes are arguments of a kernel and not part of it,
        so a class of the same form has it already."""
        same = str(task.shape).split(",")[:2]
        for entry in self._document(task).entries:
            if entry.shape.split(",")[:2] != same or not is_current(entry, task.tunable.kernel):
                continue
            for trial in entry.trials:
                if trial.configuration == configuration and trial.registers:
                    return trial.model_copy(update={"us": None, "error": ""})
        return self.compile(task.tunable.kernel, task.target, task.shape, configuration)

    def _modelled(self, task: TuningTask, compiled: Trial) -> Trial:
        if compiled.error:
            return compiled
        found = estimate(task.tunable, task.shape, compiled, task.device)
        if isinstance(found, str):
            return compiled.model_copy(update={"error": found})
        us = modelled_us(found, compiled.configuration)
        return compiled.model_copy(update={"us": round(us, 3)})

    def _kept(
        self, task: TuningTask, entry: ShapeEntry, trials: list[Trial], *, is_complete: bool
    ) -> ShapeEntry:
        changed = entry.model_copy(
            update={"trials": trials, "made": today(), "is_complete": is_complete}
        )
        if changed != entry:
            document = self._document(task).with_entry(changed)
            save_configurations(self.path_of(task), document)
        return changed


def make_task(
    tunable: TunableKernel,
    shape: ShapeClass,
    target: Target,
    device: DeviceSpec,
    *,
    basis: Basis,
    key: str = "",
) -> TuningTask:
    """A task whose configurations are kept under the device's own key, or another one."""
    return TuningTask(
        tunable=tunable,
        shape=shape,
        target=target,
        device=device,
        basis=basis,
        key=key or device_key(device),
    )


def _number(us: float | str) -> float:
    """0 where nothing is known."""
    return 0.0 if isinstance(us, str) else us


def today() -> str:
    """As YYYY-MM-DD, of the world and not of a place."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
