"""Checks the peer access of every pair of a host's devices, each pair in a process of its own with
a deadline: a pair that hangs says so, and holds up no other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations

from hal.device import DeviceSpec
from hal.peer_links.outcome import VERDICTS, PairOutcome
from hal.plugins.listing import PluginEntry
from hal.processes import ProcessEnd, ProcessOutcome, run_bounded

# Two runtimes have to come up, and a driver may have to wake up.
PAIR_DEADLINE_S = 120.0
_MAX_RESULT_BYTES = 1 << 16

Pair = tuple[DeviceSpec, DeviceSpec]


def device_pairs(specs: Sequence[DeviceSpec]) -> list[Pair]:
    """Pairs of accelerators that one plug-in answers for and this process may use: devices of two
    vendors do not reach each other, and a CPU's memory is the host's."""
    usable = [
        spec
        for spec in specs
        if spec.torch_device != "cpu"
        and "hidden_by" not in spec.attributes
        and "same_silicon_as" not in spec.attributes
    ]
    return [pair for pair in combinations(usable, 2) if pair[0].backend == pair[1].backend]


def verify_pairs(
    pairs: Sequence[Pair],
    entry_of: Callable[[DeviceSpec], PluginEntry],
    *,
    deadline_s: float = PAIR_DEADLINE_S,
) -> Iterator[PairOutcome]:
    """The outcomes one by one, in the order of the pairs."""
    for first, second in pairs:
        yield _verify(entry_of(first), first, second, deadline_s)


def _verify(
    entry: PluginEntry, first: DeviceSpec, second: DeviceSpec, deadline_s: float
) -> PairOutcome:
    request = {
        "entry": asdict(entry),
        "devices": [first.to_dict(), second.to_dict()],
        "sys_path": list(sys.path),
    }
    outcome = run_bounded(
        [sys.executable, "-P", "-m", "hal.peer_links.child", "{result_fd}"],
        deadline_s=deadline_s,
        environment=_child_environment(os.environ),
        stdin=json.dumps(request).encode(),
        result_limit_bytes=_MAX_RESULT_BYTES,
        is_contained=True,
    )
    found = _read(outcome, first.device_id, second.device_id)
    if found is not None:
        return found
    return PairOutcome(
        first=first.device_id,
        second=second.device_id,
        verdict="failed",
        detail=_why(outcome, deadline_s),
    )


def _child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _read(outcome: ProcessOutcome, first: str, second: str) -> PairOutcome | None:
    """The child's answer; None if it has none that is about this pair."""
    if outcome.end is not ProcessEnd.EXITED or outcome.exit_code != 0:
        return None
    try:
        found = PairOutcome(**json.loads(outcome.result))
    except (ValueError, TypeError):
        return None
    is_about_it = (found.first, found.second) == (first, second) and found.verdict in VERDICTS
    return found if is_about_it else None


def _why(outcome: ProcessOutcome, deadline_s: float) -> str:
    if outcome.end is ProcessEnd.DEADLINE:
        return f"no end after {deadline_s:g} s, killed"
    lines = [line for line in outcome.stderr.decode(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"{outcome.describe()}{said}"
