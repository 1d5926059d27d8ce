"""Times every implementation that could serve a class, on a live device, with the same operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.tiers import Tier
from hal_kernels.tuning.candidate_times import (
    CandidateTime,
    TimesEntry,
    class_of,
    save_times,
    versions_of,
)
from hal_kernels.tuning.measuring import Timer
from hal_kernels.tuning.session import TuningTask, today
from hal_kernels.tuning.store import code_hash
from hal_kernels.tuning.tunable import Call

Candidates = Callable[[str, DeviceSpec], Sequence[KernelCandidate]]
_MAX_ERROR = 300


def time_candidates(
    task: TuningTask, candidates: Candidates, timer: Timer, store: Path
) -> TimesEntry | None:
    """Measures and keeps the times of a class; None where fewer than two could serve, so that there
    is nothing to choose between.

    Those of a lower tier than the best that can serve are never chosen, and are not timed. Ours is
    launched with the configuration that is kept. Raises SettingsError for a file that is not right.
    """
    call = task.tunable.call(task.shape, task.device.torch_device)
    op = call.request.op
    able = [c for c in candidates(op, task.device) if c.serves(call.request)]
    best = max((c.tier for c in able), default=Tier.REFERENCE)
    rivals = [c for c in able if c.tier == best]
    known = class_of(op, call.request, task.device)
    if len(rivals) < 2 or known is None:
        return None
    entry = TimesEntry(
        kernel=known[0],
        shape=known[1],
        code=code_hash(known[0]),
        versions=versions_of(task.device),
        made=today(),
        times=[_timed(candidate, call, timer) for candidate in rivals],
    )
    save_times(store, task.key, task.target.arch, op, entry)
    return entry


def _timed(candidate: KernelCandidate, call: Call, timer: Timer) -> CandidateTime:
    try:
        kernel = candidate.load()(call.request, **call.static)
        us = timer(lambda: kernel(*call.args))
    except Exception as error:  # noqa: BLE001 - a library that refuses, in whatever way, is the result
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return CandidateTime(candidate=candidate.name, error=text[:_MAX_ERROR])
    return CandidateTime(candidate=candidate.name, us=us)
