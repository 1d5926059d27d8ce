"""The plan: every decision for a model on a device group, as data with a stable hash.

A plan is made from requests alone, before any weight is read. Its hash covers everything that
decides what will run and nothing else (no date, no host name), so equal plans have equal hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hal.candidates import KernelCandidate
from hal.device_group import GroupLink
from hal.errors import WaiverError
from hal.kernel_uses import deciding, planned_uses
from hal.ops.request import OpRequest, TokenRange
from hal.reasons import RANKING_KINDS
from hal.roofline import Bound
from hal.selection import Decision
from hal.unlocks import unlocks_of
from hal.violations import Violation

if TYPE_CHECKING:
    from hal.memory_need import MemoryNeed
    from hal.step_costs import StepEstimate

SCHEMA = "halstack.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSite:
    """A call site of a model. `site` has "*" for the layer number where layers share the request;
    `layers` lists them; empty for a site outside the layers. ranks: of the group that call it.
    is_sampled: only the rows that get logits go through it, in a step that has more.
    Raises ValueError if there is a "*" without layers or layers without a "*"."""

    site: str
    request: OpRequest
    layers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)
    is_sampled: bool = False

    def __post_init__(self) -> None:
        if ("*" in self.site) != bool(self.layers):
            raise ValueError(
                f'call site {self.site!r}: required layers where it has "*", '
                f"found layers {list(self.layers)}"
            )

    def names(self) -> tuple[str, ...]:
        """The names of the single call sites."""
        if not self.layers:
            return (self.site,)
        return tuple(self.site.replace("*", str(layer)) for layer in self.layers)

    def label(self) -> str:
        """The name with its layers for people: "layers.0–2,4.attention"; of many, the ends."""
        runs: list[list[int]] = []
        for layer in self.layers:
            if runs and layer == runs[-1][-1] + 1:
                runs[-1] = [runs[-1][0], layer]
            else:
                runs.append([layer])
        texts = ["–".join(map(str, run)) for run in runs]
        if len(texts) > 6:
            texts[3:-1] = ["…"]
        return self.site.replace("*", ",".join(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """One site and one token range with its decision."""

    site: OpSite
    tokens: TokenRange
    decision: Decision
    waiver: str | None = None  # of a lost fast path or a semantic change, as text
    bound: Bound | None = None  # of one call at the upper end of `tokens`
    better: KernelCandidate | None = None  # what should serve, where a fast path is lost

    @property
    def choice(self) -> KernelCandidate:
        return self.decision.choice

    def to_dict(self) -> dict[str, Any]:
        request, decision = self.site.request, self.decision
        return {
            "site": self.site.site,
            "layers": list(self.site.layers),
            "ranks": list(self.site.ranks),
            "op": request.label.removesuffix(f".{request.phase}"),
            "phase": request.phase,
            "tokens": [self.tokens.low, self.tokens.high],
            "arguments": request.arguments(),
            "choice": decision.choice.name,
            "tier": decision.choice.tier.label,
            "distribution": decision.choice.distribution,
            "is_explicit": decision.is_explicit,
            "estimate_us": decision.estimate_us,
            "estimate_source": decision.estimate_source,
            "roofline_us": None if self.bound is None else round(self.bound.us, 2),
            "roofline_by": None if self.bound is None else self.bound.by,
            "kernels": [asdict(use) for use in planned_uses(self)],
            "leaf": [{"kind": leaf.kind, "name": leaf.name} for leaf in decision.choice.leaf],
            "semantic_notes": [
                {"name": note.name, "text": note.text} for note in decision.semantic_notes
            ],
            "lost": self._lost(),
            "waiver": self.waiver,
            "rejected": [loser.to_dict() for loser in decision.rejected],
        }

    def _lost(self) -> dict[str, Any] | None:
        lost = self.decision.lost
        if lost is None:
            return None
        return {
            "better": lost.better,
            "better_tier": lost.better_tier.label,
            "unlock": list(unlocks_of(lost.reasons)),
            "why": lost.describe(self.choice),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All planned ops with what they were planned for.

    model, settings: plain data that names the model and what the user asked for. devices:
    `DeviceSpec.to_dict()` of the group. notes: remarks for people (what is not exact and where).
    policy: what the device's backend forces on and disables, with reasons. decode_bound_us: least
    time of a decode step with one sequence on the measured device. link: of a group. steps: least
    times, op by op. violations: why this plan may not be used, empty for one that may.
    pending_waivers: for whoever runs it to raise once every kernel compiled: waivers that only a
    kernel which does not compile would need.
    """

    model: Mapping[str, Any]
    devices: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    kv_bytes_per_token: int
    ops: Sequence[PlannedOp]
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    decode_bound_us: float | None = None
    link: GroupLink | None = None
    steps: Sequence[StepEstimate] = ()
    memory: MemoryNeed | None = None
    violations: Sequence[Violation] = ()
    pending_waivers: Sequence[WaiverError] = ()

    def to_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "model": dict(self.model),
            "device": self.device_label,
            "devices": [dict(device) for device in self.devices],
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "notes": list(self.notes),
            "policy": {name: dict(entries) for name, entries in self.policy.items()},
            "decode_roofline_us": self.decode_bound_us,
            "link": None if self.link is None else self.link.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
            "memory": None if self.memory is None else self.memory.to_dict(),
            "violations": [violation.to_dict() for violation in self.violations],
            "ops": [op.to_dict() for op in self.ops],
        }
        document["hash"] = plan_hash(document)
        return document

    @property
    def device_label(self) -> str:
        names = [f"{d['name']} ({d['device_id']})" for d in self.devices]
        distinct = dict.fromkeys(names)
        if len(distinct) == 1 and len(names) > 1:
            return f"{len(names)} × {names[0]}"
        return ", ".join(names)

    @property
    def hash(self) -> str:
        return str(self.to_dict()["hash"])

    def waivers_in_use(self) -> list[str]:
        """One line per waiver that this plan needs, without repetition."""
        return sorted({op.waiver for op in self.ops if op.waiver})


# What is measured on a device and may differ between two hosts that run the same thing.
_MEASURED = frozenset({"evidence", "memory_bandwidth", "peak_flops"})
# What follows from the measured, and from what else is in the document.
_DERIVED = ("hash", "decode_roofline_us", "steps", "memory", "link", "violations")


def plan_hash(document: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of BLAKE2b over the canonical JSON without what is measured.

    Raises ValueError if the document holds a number that is not finite: JSON has none.
    """
    stable = _without(document, _DERIVED)
    stable["devices"] = [_without(device, _MEASURED) for device in document["devices"]]
    stable["ops"] = [_stable_op(op) for op in document["ops"]]
    canonical = json.dumps(stable, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def _without(data: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys}


def _stable_op(op: Mapping[str, Any]) -> dict[str, Any]:
    # Losers are listed by rank and say by how many µs they lost: neither is what will run.
    losers = sorted(op["rejected"], key=lambda loser: str(loser["name"]))
    stable = _without(
        op, ("estimate_us", "estimate_source", "roofline_us", "roofline_by", "lost", "kernels")
    )
    if chosen := deciding(op.get("kernels", ())):
        stable["kernels"] = chosen
    stable["rejected"] = [
        _without(loser, ("estimate_us",))
        | {"reasons": [r for r in loser["reasons"] if r["kind"] not in RANKING_KINDS]}
        for loser in losers
    ]
    return stable


def group_sites(sites: Iterable[tuple[str, int | None, int, OpRequest]]) -> list[OpSite]:
    """Merges (site pattern, layer, rank, request) whose pattern and request are equal.

    The order is that of first appearance. Layers that other ranks call are another site.
    """
    callers: dict[tuple[str, OpRequest], dict[int | None, dict[int, None]]] = {}
    for pattern, layer, rank, request in sites:
        callers.setdefault((pattern, request), {}).setdefault(layer, {})[rank] = None
    grouped: dict[tuple[str, OpRequest, tuple[int, ...]], list[int]] = {}
    for (pattern, request), ranks_of in callers.items():
        for layer, ranks in ranks_of.items():
            layers = grouped.setdefault((pattern, request, tuple(ranks)), [])
            if layer is not None:
                layers.append(layer)
    return [
        OpSite(site=pattern, request=request, layers=tuple(layers), ranks=ranks)
        for (pattern, request, ranks), layers in grouped.items()
    ]
