"""The plan: every decision for a model on a device group, as data with a stable hash.

A plan is made from requests alone, before any weight is read. Its hash covers everything that
decides what will run and nothing else (no date, no host name), so equal plans have equal hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hal.candidates import KernelCandidate
from hal.ops.request import OpRequest, TokenRange
from hal.selection import Decision

SCHEMA = "halstack.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSite:
    """A call site of a model. `site` has "*" for the layer number where layers share the request;
    `layers` lists them; empty for a site outside the layers. ranks: of the group that call it."""

    site: str
    request: OpRequest
    layers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)

    def names(self) -> tuple[str, ...]:
        """The names of the single call sites."""
        if not self.layers:
            return (self.site,)
        return tuple(self.site.replace("*", str(layer)) for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """One site and one token range with its decision."""

    site: OpSite
    tokens: TokenRange
    decision: Decision
    waiver: str | None = None  # of a lost fast path or a semantic change, as text

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
            "leaf": [{"kind": leaf.kind, "name": leaf.name} for leaf in decision.choice.leaf],
            "semantic_notes": [
                {"name": note.name, "text": note.text} for note in decision.semantic_notes
            ],
            "waiver": self.waiver,
            "rejected": [loser.to_dict() for loser in decision.rejected],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All planned ops with what they were planned for.

    model, settings: plain data that names the model and what the user asked for. devices:
    `DeviceSpec.to_dict()` of the group. notes: remarks for people (what is not exact and where).
    """

    model: Mapping[str, Any]
    devices: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    kv_bytes_per_token: int
    ops: Sequence[PlannedOp]
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

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
            "ops": [op.to_dict() for op in self.ops],
        }
        document["hash"] = plan_hash(document)
        return document

    @property
    def device_label(self) -> str:
        names = [f"{d['name']} ({d['device_id']})" for d in self.devices]
        return ", ".join(names)

    @property
    def hash(self) -> str:
        return str(self.to_dict()["hash"])

    def waivers_in_use(self) -> list[str]:
        """One line per waiver that this plan needs, without repetition."""
        return sorted({op.waiver for op in self.ops if op.waiver})


# What may differ between two hosts that run the same thing: times, and the memory that is free.
_VOLATILE = frozenset({"hash", "estimate_us", "evidence", "memory_bandwidth", "peak_flops"})


def plan_hash(document: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of BLAKE2b over the canonical JSON without volatile fields."""
    canonical = json.dumps(_stable(document), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        stable = {k: _stable(v) for k, v in value.items() if k not in _VOLATILE}
        # Losers are listed by rank and say by how many µs they lost: neither is what will run.
        if stable.get("kind") == "ranked":
            return {"kind": "ranked"}
        if "rejected" in stable:
            stable["rejected"] = sorted(stable["rejected"], key=lambda loser: str(loser["name"]))
        return stable
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_stable(v) for v in value]
    return value


def group_sites(sites: Iterable[tuple[str, int | None, int, OpRequest]]) -> list[OpSite]:
    """Merges (site pattern, layer, rank, request) whose pattern and request are equal.

    The order is that of first appearance.
    """
    layers: dict[tuple[str, OpRequest], dict[int, None]] = {}
    ranks: dict[tuple[str, OpRequest], dict[int, None]] = {}
    for pattern, layer, rank, request in sites:
        members = layers.setdefault((pattern, request), {})
        if layer is not None:
            members[layer] = None
        ranks.setdefault((pattern, request), {})[rank] = None
    return [
        OpSite(
            site=pattern,
            request=request,
            layers=tuple(members),
            ranks=tuple(ranks[pattern, request]),
        )
        for (pattern, request), members in layers.items()
    ]
