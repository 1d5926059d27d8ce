"""Kernels of the CPU that cannot be compiled, in this process and in the workers that it starts."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hal.candidates import KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.errors import KernelBuildError
from hal_backends.cpu import candidates

_VARIABLE = "TEST_FAILING_KERNELS"  # as JSON


def inject(
    monkeypatch: pytest.MonkeyPatch, folder: Path, here: Sequence[str], in_workers: Sequence[str]
) -> None:
    """Candidates whose kernels do not compile when they are first called, here and in workers.

    folder: an empty one, for what workers import when they start.
    """
    monkeypatch.setattr(candidates, "candidates_for", _failing(here, in_workers))
    (folder / "sitecustomize.py").write_text(
        "import failing_kernels\nfailing_kernels.install()\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parent}")
    monkeypatch.setenv(_VARIABLE, json.dumps([in_workers, here]))


def install() -> None:
    """In a worker."""
    candidates.candidates_for = _failing(*json.loads(os.environ[_VARIABLE]))


def _failing(here: Sequence[str], elsewhere: Sequence[str]) -> Any:
    """elsewhere: those that fail on other ranks, which plan the same."""
    plain = candidates.candidates_for

    def candidates_for(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        offered = [_broken(c) if c.name in here else c for c in plain(op, device)]
        return [_compiled(c) if c.name in {*here, *elsewhere} else c for c in offered]

    return candidates_for


def _compiled(candidate: KernelCandidate) -> KernelCandidate:
    """As what is compiled at its first call declares it: a waiver may be needed until then."""
    return dataclasses.replace(candidate, leaf=(Leaf(kind="kernel", name="_injected_kernel"),))


def _broken(candidate: KernelCandidate) -> KernelCandidate:
    def fail(*_: Any, **__: Any) -> Any:
        raise KernelBuildError(
            f"{candidate.name} for {candidate.op}",
            "machine code of _injected_kernel for this device",
            "CompilationError: injected by a test",
            "choose another",
        )

    return dataclasses.replace(candidate, load=lambda: lambda *_, **__: fail)
