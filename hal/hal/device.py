"""Devices: what a detection found, and the specification that candidates are checked against.

Everything here is plain data that survives JSON, because detection runs in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any


class Confidence(StrEnum):
    """Where a value comes from, best first. An UNVERIFIED value never gates behaviour."""

    MEASURED = "measured"
    PROBED = "probed"
    DATABASE = "database"
    DECLARED = "declared"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation: its source (a path, a command, a document) and what it showed."""

    source: str
    found: str
    confidence: Confidence = Confidence.PROBED


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedDevice:
    """One device that a plug-in claims; `device_id` ("cpu:0", PCI address) is unique on a host."""

    device_id: str
    vendor: str
    name: str
    arch: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What a device is and can do. Every field that a decision uses has its entry in `evidence`.

    features: what candidates test ("avx2", "matrix.fp8_e4m3fn", "graph_capture", …).
    unverified_features: what only an unverified source claims; they never serve, and a candidate
    that needs one says so. peak_flops: dense FLOP/s (OP/s for integers) by dtype, only where known.
    memory_bandwidth: bytes per second of reads. software: distribution -> version of what is
    installed beside the device and decides what can run. attributes: further facts, units in their
    names; "same_silicon_as" is the id of another plug-in's device that is the same hardware, so
    that this one is used only where it is named; "hidden_by" is what hides the device from this
    process ("CUDA_VISIBLE_DEVICES=0"), so that it is here and not used.
    """

    device_id: str
    vendor: str
    backend: str
    name: str
    arch: str
    torch_device: str
    features: frozenset[str] = frozenset()
    unverified_features: frozenset[str] = frozenset()
    num_cores: int = 0
    memory_bytes: int = 0
    memory_bandwidth: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        # Not asdict: it copies mappings deeply, which read-only ones do not allow.
        data = {f.name: getattr(self, f.name) for f in fields(self)} | {
            "features": sorted(self.features),
            "unverified_features": sorted(self.unverified_features),
            "software": dict(self.software),
            "peak_flops": dict(self.peak_flops),
            "attributes": dict(self.attributes),
            "evidence": {key: asdict(seen) for key, seen in self.evidence.items()},
        }
        result: dict[str, Any] = json.loads(json.dumps(data, sort_keys=True))
        return result


# Features that a policy may force on. SPARSE_ATTENTION: a model that chooses its keys does so, and
# dense attention for it is refused whatever the user allows. EAGER: no step is captured as a graph.
SPARSE_ATTENTION = "sparse_attention"
EAGER = "eager"
# Of a device whose runtime captures steps, to replay them as one call (`CapturingRuntime`).
GRAPH_CAPTURE = "graph_capture"
FORCIBLE_FEATURES = (SPARSE_ATTENTION, EAGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePolicy:
    """What a device's backend forces on or disables, each with its reason.

    forced_features: one of FORCIBLE_FEATURES -> reason; what nothing reads would be no policy.
    disabled: glob over candidate names -> reason. capture_saves_us: microseconds that a call takes
    less in a step that is captured (GRAPH_CAPTURE), at least, from a measurement; 0 without one.
    """

    forced_features: Mapping[str, str] = field(default_factory=dict)
    disabled: Mapping[str, str] = field(default_factory=dict)
    capture_saves_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingDependency:
    """Hardware that was seen while the software to use it is not there."""

    hardware: str
    software: str
    remedy: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """One golden-value check of a backend's runtime."""

    name: str
    passed: bool
    detail: str
