"""What the installed back-ends of halstack offer for each op, asked from the candidates themselves.

Nobody types a limit here. Each candidate is asked about many requests on a device of which nothing
is known, and what it requires is collected from its reasons.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.errors import RequestError
from hal.hookspecs import ENTRY_POINT_GROUP, BackendInfo
from hal.ops import CATALOGUE
from hal.ops.formats import DTYPE_BYTES, FORMATS, WeightFormat
from hal.ops.request import OpFamily, OpRequest
from hal.plugins.listing import list_plugins
from hal.reasons import Reason, ReasonKind
from hal_backends.detecting.accelerator import AcceleratorPlugin

_INTEGERS = (64, 1, 17, 320, 200_000)
_FLOATS = (0.0, 30.0)
_NOT_PROBED = frozenset({"tokens", "graph_mode", "context_tokens"})


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@functools.cache
def backends() -> tuple[tuple[BackendInfo, Any], ...]:
    """(info, plug-in) of halstack's own plug-ins that may offer candidates and run here. The
    accelerators have tables of their own, device by device."""
    found = []
    for entry in list_plugins():
        if entry.distribution == "halstack" and not entry.shadowed_by:
            point = importlib.metadata.EntryPoint(entry.name, entry.value, ENTRY_POINT_GROUP)
            module = point.load()
            is_accelerator = isinstance(module, AcceleratorPlugin)
            if hasattr(module, "hal_kernel_candidates") and not is_accelerator:
                found.append((module.hal_backend_info(), module))
    return tuple(sorted(found, key=lambda pair: ("devices" not in pair[0].provides, pair[0].name)))


@functools.cache
def offers(op: str) -> tuple[tuple[str, KernelCandidate], ...]:
    """(backend, candidate) for one op, the better tiers first."""
    found = []
    for info, module in backends():
        device = DeviceSpec(
            device_id=f"{info.name}:0",
            vendor=info.vendor,
            backend=info.name,
            name="",
            arch="",
            torch_device="",
        )
        found += [(info.name, c) for c in module.hal_kernel_candidates(op=op, device=device)]
    return tuple(sorted(found, key=lambda pair: (-pair[1].tier, pair[1].name)))


def ops_by_backend() -> str:
    """Per op and backend: the best tier, and how many implementations there are."""
    names = [info.name for info, _ in backends()]
    rows = []
    for op, family in CATALOGUE.items():
        cells = []
        for name in names:
            own = [candidate for backend, candidate in offers(op) if backend == name]
            best = max((c.tier for c in own), default=None)
            count = f" ({len(own)})" if len(own) > 1 else ""
            cells.append("–" if best is None else f"{best.label}{count}")
        rows.append([f"`{op}`", family.summary, *cells])
    return markdown(["op", "what it does", *names], rows)


def op_arguments() -> str:
    """Per op: the arguments that decide which candidate can serve."""
    rows = []
    for op, family in CATALOGUE.items():
        names = [f.name for f in dataclasses.fields(family.request_type)]
        tolerances = ", ".join(f"{d} {t.rtol:g}" for d, t in family.tolerances.items())
        rows.append([f"`{op}`", ", ".join(f"`{name}`" for name in names), tolerances])
    return markdown(["op", "arguments that decide", "relative tolerance by dtype"], rows)


def candidates() -> str:
    """Per op, a table of every candidate with its tier, scope, limits and semantic notes."""
    parts = []
    for op, family in CATALOGUE.items():
        rows = [_row(family, candidate) for _, candidate in offers(op)]
        columns = ("implementation", "tier", "what it is", "serves", "limits", "changes")
        parts.append(f"### `{op}`\n\n{family.summary}.\n\n{markdown(columns, rows)}")
    return "\n\n".join(parts)


def _row(family: OpFamily, candidate: KernelCandidate) -> list[str]:
    needs = requirements(family, candidate)
    notes = sorted(
        {
            note.name
            for request in probes(family)
            for note in candidate.semantic_notes(request)
            if not [r for r in candidate.not_supported_reasons(request) if r.kind == "scope"]
        }
    )
    scope = [text for kind, text in needs if kind is ReasonKind.SCOPE]
    limits = [text for kind, text in needs if kind is not ReasonKind.SCOPE]
    return [
        f"`{candidate.name}`",
        candidate.tier.label,
        candidate.summary,
        "; ".join(scope) or "all",
        "; ".join(limits) or "none",
        ", ".join(f"`{note}`" for note in notes) or "nothing",
    ]


def requirements(family: OpFamily, candidate: KernelCandidate) -> list[tuple[ReasonKind, str]]:
    """What the candidate requires of a request or a device, as it says itself: each requirement
    with the values of other arguments that it holds for, if these are not all that are served."""
    witnesses: dict[tuple[ReasonKind, str], dict[str, OpRequest]] = {}
    for request in probes(family):
        for reason in candidate.not_supported_reasons(request):
            of = witnesses.setdefault((reason.kind, reason.what), {})
            of.setdefault(_required(reason), request)
    found = []
    for (kind, what), texts in witnesses.items():
        by_condition: dict[str, set[str]] = {}
        for text, witness in texts.items():
            condition = _condition(family, candidate, what, text, witness)
            if condition is not None:
                by_condition.setdefault(condition, set()).add(text)
        parts = [f"{_joined(same)}{condition}" for condition, same in by_condition.items()]
        if parts:
            found.append((kind, f"{what}: {', '.join(sorted(parts))}"))
    return found


def _required(reason: Reason) -> str:
    """A value of the request in brackets explains a requirement; it is not part of it."""
    return re.sub(r" \(\d+\)", "", reason.required)


def _joined(texts: set[str]) -> str:
    if len(texts) == 1:
        return next(iter(texts))
    return " and ".join(f"({text})" if " or " in text else text for text in sorted(texts))


def _condition(
    family: OpFamily, candidate: KernelCandidate, what: str, required: str, witness: OpRequest
) -> str | None:
    """Where a requirement depends on another argument: for which of its values it holds. None
    where it holds for none that is served."""
    conditions = []
    for name, values in _choices(family).items():
        if len(values) < 2 or not _is_categorical(values):
            continue
        variants = _variants(witness, name, values)
        reasons = {text: candidate.not_supported_reasons(r) for text, r in variants.items()}
        served = {
            text: any(r.what == what and _required(r) == required for r in unmet)
            for text, unmet in reasons.items()
            if not any(r.found == text for r in unmet)
        }
        own = _text(getattr(witness, name))
        is_its_own = any(r.found == own for r in reasons[own] if r.what == what)
        holding = [text for text, holds in served.items() if holds]
        if is_its_own or not served or len(holding) == len(served):
            continue
        if not holding:
            return None
        conditions.append(" or ".join(holding))
    return f" (for {', '.join(conditions)})" if conditions else ""


def _variants(witness: OpRequest, name: str, values: Sequence[Any]) -> dict[str, OpRequest]:
    """The request with each value of one argument that does not contradict the others."""
    found = {}
    for value in values:
        try:
            found[_text(value)] = dataclasses.replace(witness, **{name: value})
        except RequestError:
            continue
    return found


@functools.cache
def probes_of(op: str) -> tuple[OpRequest, ...]:
    """Requests that differ from a plain one in any two arguments."""
    family = CATALOGUE[op]
    choices = _choices(family)
    base = {name: values[0] for name, values in choices.items()}
    seen: dict[OpRequest, None] = {}
    pairs = itertools.combinations(choices, 2) if len(choices) > 1 else [(n, n) for n in choices]
    for first, second in pairs:
        for a, b in itertools.product(choices[first], choices[second]):
            try:
                seen[family.request_type(**(base | {first: a, second: b}))] = None
            except RequestError:
                continue  # contradictory: no candidate is ever asked about it
    return tuple(seen)


def probes(family: OpFamily) -> Sequence[OpRequest]:
    return probes_of(family.name)


def _choices(family: OpFamily) -> dict[str, tuple[Any, ...]]:
    return dict(_fields(family.request_type))


def _fields(request_type: type[OpRequest]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    hints = typing.get_type_hints(request_type)
    for field in dataclasses.fields(request_type):
        if field.name in _NOT_PROBED:
            continue
        hint = hints[field.name]
        plain = () if field.default is dataclasses.MISSING else (field.default,)
        if get_origin(hint) is Literal:
            yield field.name, _first(plain, get_args(hint))
        elif hint is bool:
            yield field.name, _first(plain, (False, True))
        elif hint is WeightFormat:
            yield field.name, tuple(FORMATS.values())
        elif hint is str:
            known = ("float32", *DTYPE_BYTES) if "dtype" in field.name else ("another",)
            yield field.name, _first(plain, known)
        else:
            yield field.name, _first(plain, _FLOATS if hint is float else _INTEGERS)


def _first(plain: tuple[Any, ...], values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*plain, *values)))


def _is_categorical(values: Sequence[Any]) -> bool:
    return not any(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _text(value: Any) -> str:
    return value.name if isinstance(value, WeightFormat) else str(value)
