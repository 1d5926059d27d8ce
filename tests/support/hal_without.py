"""`python hal_without.py NAME,NAME COMMAND…`: the command `hal`, without some CPU candidates.

The CPU plug-in answers as if those implementations had been taken out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hal_backends.cpu.candidates as cpu_candidates
from hal.candidates import KernelCandidate
from hal.cli import main
from hal.device import DeviceSpec


def remove(names: set[str]) -> None:
    everything = cpu_candidates.candidates_for

    def without(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        return [c for c in everything(op, device) if c.name not in names]

    cpu_candidates.candidates_for = without


if __name__ == "__main__":
    remove(set(sys.argv.pop(1).split(",")))
    sys.exit(main())
