"""The support matrix: every candidate asked about real calls on every device of the database.

`verdicts` is the sweep; `csv` writes it with one line per architecture and candidate, one letter
per request; `page` gives the best that each architecture has for each request. Nobody types one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.software import TESTED_VERSIONS, vendor_version
from hal_backends.gpu.spec import device_spec
from hal_capability_db import load_database
from matrix_requests import REQUESTS
from support import markdown

BACKENDS = (
    "nvidia",
    "amd",
    "ascend",
    "cambricon",
    "moore_threads",
    "metax",
    "iluvatar",
    "hygon",
    "kunlunxin",
    "thead",
    "enflame",
    "biren",
    "tecorigin",
    "intel_xpu",
    "gaudi",
)
# What is there in any case; the matrix must not depend on the machine that makes it.
PLAIN: Mapping[str, str] = {"torch": "2.13.0", "triton": "3.9.0"}
# Worst first: the letter of a verdict is that of its worst reason.
LETTERS: Mapping[ReasonKind, str] = {
    ReasonKind.SCOPE: ".",
    ReasonKind.HARDWARE: "h",
    ReasonKind.POLICY: "p",
    ReasonKind.ARGUMENT: "a",
    ReasonKind.UNVERIFIED: "u",
    ReasonKind.MISSING: "m",
    ReasonKind.SOFTWARE: "i",
}
SERVES = "S"
LEGEND = (
    ("S", "serves"),
    ("n", "serves, but changes the numbers: needs a semantic waiver"),
    ("i", "would serve once software is installed"),
    ("m", "would serve once the kernel is written"),
    ("u", "may be able to: only an unverified source says so"),
    ("a", "the kernel does not take these arguments"),
    ("p", "disabled by the device's policy"),
    ("h", "the device cannot"),
    (".", "not meant for this"),
)


@functools.cache
def devices() -> tuple[DeviceSpec, ...]:
    """Every device of the database with plain software, by backend and id."""
    database = load_database()
    families = {
        importlib.import_module(f"hal_backends.{b}.detection").RULES.family: b for b in BACKENDS
    }
    found = [
        device_spec(
            profile,
            device_id=profile.id,
            backend=families[profile.family],
            software=PLAIN,
            database=database,
        )
        for profile in database.devices.values()
    ]
    return tuple(sorted(found, key=lambda s: (BACKENDS.index(s.backend), s.arch, s.device_id)))


def with_software(device: DeviceSpec) -> DeviceSpec:
    """The device with every library that a candidate asks about, in the version it was read in."""
    versions = {name: vendor_version(name, device.backend) for name in TESTED_VERSIONS}
    return dataclasses.replace(device, software={**PLAIN, **versions})


def candidates(device: DeviceSpec, op: str) -> Sequence[KernelCandidate]:
    module = importlib.import_module(f"hal_backends.{device.backend}.candidates")
    found: Sequence[KernelCandidate] = module.candidates_for(op, device)
    return found


def disabled(device: DeviceSpec) -> Mapping[str, str]:
    policy = importlib.import_module(f"hal_backends.{device.backend}.policy")
    return dict(policy.device_policy(device).disabled)


def letter(reasons: Sequence[Reason], *, is_disabled: bool, changes_meaning: bool) -> str:
    kinds = {reason.kind for reason in reasons}
    if is_disabled:
        kinds.add(ReasonKind.POLICY)
    worst = next((sign for kind, sign in LETTERS.items() if kind in kinds), SERVES)
    return "n" if worst == SERVES and changes_meaning else worst


def verdicts(device: DeviceSpec, op: str) -> Iterator[tuple[KernelCandidate, str]]:
    """(candidate, one letter per request of the op) on a device."""
    from fnmatch import fnmatchcase

    globs = tuple(disabled(device))
    for candidate in candidates(device, op):
        is_disabled = any(fnmatchcase(candidate.name, glob) for glob in globs)
        yield (
            candidate,
            "".join(
                letter(
                    candidate.not_supported_reasons(request),
                    is_disabled=is_disabled,
                    changes_meaning=bool(candidate.semantic_notes(request)),
                )
                for request in REQUESTS[op].values()
            ),
        )


@functools.cache
def rows() -> tuple[tuple[str, str, str, str, str], ...]:
    """(architecture, devices, candidate, tier, letters); devices that agree share a line."""
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for device in devices():
        for op in CATALOGUE:
            for candidate, letters in verdicts(device, op):
                key = (device.arch, candidate.name, candidate.tier.label, letters)
                lines.setdefault(key, []).append(device.device_id)
    return tuple(
        (arch, " ".join(ids), name, tier, letters)
        for (arch, name, tier, letters), ids in lines.items()
    )


def csv() -> str:
    """The whole matrix. The columns of the letters are named in docs/support-matrix.md."""
    lines = ["architecture,devices,candidate,tier,letters"]
    lines += [",".join(row) for row in rows() if set(row[-1]) != {"."}]
    return "\n".join(lines) + "\n"


def legend() -> str:
    return markdown(["letter", "meaning"], [[f"`{sign}`", text] for sign, text in LEGEND])


def columns() -> str:
    """The requests of each op, in the order of the letters."""
    table = [
        [f"`{op}`", ", ".join(f"{i} {name}" for i, name in enumerate(requests, start=1))]
        for op, requests in REQUESTS.items()
    ]
    return markdown(["op", "requests"], table)


def page() -> str:
    """Per op: the best tier of each architecture for each request, and what keeps a better one."""
    best: dict[tuple[str, str], list[str]] = {}
    for device in devices():
        for op, requests in REQUESTS.items():
            answers = list(verdicts(device, op))
            cells = [_cell(answers, i) for i in range(len(requests))]
            best.setdefault((op, f"{device.arch} ({device.backend})"), cells)
    parts = []
    for op, requests in REQUESTS.items():
        lines = [[arch, *cells] for (found, arch), cells in best.items() if found == op]
        table = markdown(["architecture", *requests], lines)
        parts.append(f"### `{op}`\n\n{table}")
    return "\n\n".join(parts)


_MARKS = {"i": "install", "m": "kernel missing", "u": "unverified"}


def _cell(answers: Sequence[tuple[KernelCandidate, str]], at: int) -> str:
    """The best tier that serves, and a better one that is within reach."""
    serving = max((c.tier for c, letters in answers if letters[at] == SERVES), default=None)
    reach: dict[Tier, list[str]] = {}
    for candidate, letters in answers:
        if letters[at] in _MARKS and (serving is None or candidate.tier > serving):
            reach.setdefault(candidate.tier, []).append(_MARKS[letters[at]])
    text = "–" if serving is None else serving.label
    if not reach:
        return text
    tier = max(reach)
    first = next(mark for mark in _MARKS.values() if mark in reach[tier])
    return f"{text} ({tier.label}: {first})"
