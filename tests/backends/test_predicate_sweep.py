"""Every candidate of every accelerator over every device of the database and real requests.

A predicate is wrong if it never holds, always holds, holds with less and not with more, or tells
kin apart; each finding is an error unless predicate_allowances.yaml says why it is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from hal.device import DeviceSpec
from hal.ops import CATALOGUE

HERE = Path(__file__).resolve().parent
ALLOWED: Mapping[str, Mapping[str, str]] = yaml.safe_load(
    (HERE / "predicate_allowances.yaml").read_text(encoding="utf-8")
)
# Letters of the matrix that a fix could turn into "serves".
WITHIN_REACH = "Snimu"
# Architectures so close that a difference needs a reason.
KIN = (("sm_100", "sm_103"), ("ascend-910b", "ascend-910c"))


def judge(kind: str, found: Mapping[str, str]) -> None:
    """Each finding (candidate -> text) needs an allowance, and each allowance a finding."""
    allowed = ALLOWED[kind]
    unexplained = {
        name: text
        for name, text in found.items()
        if not any(fnmatchcase(name, glob) for glob in allowed)
    }
    idle = [g for g in allowed if not any(fnmatchcase(name, g) for name in found)]
    assert not unexplained, f"{kind}, without a stated reason: {unexplained}"
    assert not idle, f"{kind}: allowances that nothing needs: {idle}"


def test_every_op_and_format_is_in_the_grid(requests: Mapping[str, Mapping[str, Any]]) -> None:
    assert set(requests) == set(CATALOGUE)
    for op, named in requests.items():
        assert all(request.op == op for request in named.values())
        assert len(set(named.values())) == len(named), f"{op}: one request twice"


def test_no_predicate_never_holds(answers: Sequence[tuple[DeviceSpec, str, str]]) -> None:
    reachable: dict[str, bool] = {}
    for _, name, letters in answers:
        reachable[name] = reachable.get(name, False) or any(c in WITHIN_REACH for c in letters)
    judge("never", {name: "no device can take it" for name, is_ in reachable.items() if not is_})


def test_no_predicate_always_holds(answers: Sequence[tuple[DeviceSpec, str, str]]) -> None:
    always: dict[str, bool] = {}
    for _, name, letters in answers:
        always[name] = always.get(name, True) and set(letters) <= {"S", "n"}
    judge("always", {name: "takes everything" for name, is_ in always.items() if is_})


def test_siblings_differ_for_a_stated_reason_only(
    answers: Sequence[tuple[DeviceSpec, str, str]],
) -> None:
    by_arch: dict[tuple[str, str], dict[str, str]] = {}
    for device, name, letters in answers:
        by_arch.setdefault((device.arch, name), {})[device.device_id] = letters
    found = {
        name: f"{arch}: {verdicts}"
        for (arch, name), verdicts in by_arch.items()
        if len(set(verdicts.values())) > 1
    }
    for one, other in KIN:
        for (arch, name), verdicts in by_arch.items():
            if arch == one and _apart(name, verdicts) != _apart(name, by_arch[other, name]):
                found[name] = f"{one} {verdicts}, {other} {by_arch[other, name]}"
    judge("siblings", found)


def _apart(name: str, verdicts: Mapping[str, str]) -> set[str]:
    """For our kernels without the state of the evidence, which exists per architecture."""
    is_ours = name.split(".")[-1].startswith("triton")
    return {text.replace("S", "u") if is_ours else text for text in verdicts.values()}


def test_no_predicate_is_inverted(matrix: ModuleType) -> None:
    """What serves with nothing, no feature and no library, serves with everything too."""
    inverted = []
    for device in matrix.devices():
        full = matrix.with_software(device)
        bare = dataclasses.replace(
            full, features=frozenset(), unverified_features=frozenset(), software={}
        )
        for op in CATALOGUE:
            by_name = {c.name: c for c in matrix.candidates(full, op)}
            for poor in matrix.candidates(bare, op):
                rich = by_name[poor.name]
                inverted += [
                    (device.device_id, poor.name, name)
                    for name, request in matrix.REQUESTS[op].items()
                    if poor.serves(request) and not rich.serves(request)
                ]
    assert not inverted


def test_peer_access_never_takes_something_away(matrix: ModuleType) -> None:
    order = ("none", "claimed", "verified")
    for device in matrix.devices():
        for candidate in matrix.candidates(matrix.with_software(device), "collective"):
            for name, request in matrix.REQUESTS["collective"].items():
                serves = [
                    candidate.serves(dataclasses.replace(request, p2p=level)) for level in order
                ]
                assert serves == sorted(serves), (device.device_id, candidate.name, name)
