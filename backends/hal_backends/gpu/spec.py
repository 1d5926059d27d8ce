"""The specification of a device from its profile in the capability database.

Only what somebody vouches for becomes a feature; what an unverified source claims stands in
`unverified_features` and never serves. Rates and bandwidths are kept with their confidence, so a
plan can say which of its figures nobody checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hal.device import Confidence, DeviceSpec, Evidence
from hal.roofline import MEASURED_ELSEWHERE
from hal_capability_db import Architecture, Database, DeviceProfile, Fact, FamilyProfile
from hal_capability_db import load_database as load_capability_database


@dataclass(slots=True)
class _Draft:
    """What is gathered fact by fact."""

    features: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)

    def note(self, key: str, fact: Fact[Any]) -> None:
        self.evidence[key] = _evidence(fact)

    def feature(self, name: str, fact: Fact[bool]) -> None:
        if fact.value:
            (self.features if fact.is_verified else self.unverified).add(name)
            self.note(f"features.{name}", fact)

    def dtypes(self, fact: Fact[frozenset[str]]) -> None:
        for dtype in fact.value or ():
            name = f"matrix.{dtype}"
            if name in self.features:
                continue
            (self.features if fact.is_verified else self.unverified).add(name)
            self.note(f"features.{name}", fact)

    def attribute(self, name: str, fact: Fact[Any], *, whole: bool = False) -> None:
        if fact.value is None:
            return
        self.attributes[name] = int(fact.value) if whole else fact.value
        self.note(f"attributes.{name}", fact)


def device_spec(
    profile: DeviceProfile,
    *,
    device_id: str,
    backend: str,
    software: Mapping[str, str],
    database: Database | None = None,
) -> DeviceSpec:
    """`profile` as the specification that candidates are checked against.

    backend: name of the plug-in that describes the device. software: distribution -> version of
    what is installed beside it, or what is assumed for a device that is not here. database: where
    the family, the architecture and the link measurements are looked up, the built-in one if None.
    """
    known = database or load_capability_database()
    family = known.families[profile.family]
    architecture = known.architectures.get(profile.arch)
    draft = _Draft()
    _matrix_dtypes(draft, profile, architecture)
    _units(draft, family, architecture)
    _attributes(draft, profile, family, architecture)
    _links(draft, known, profile)
    memory = (
        profile.usable_memory_bytes
        if profile.usable_memory_bytes.is_known
        else profile.memory_bytes
    )
    draft.note("memory_bytes", memory)
    rates = _rates(draft, profile)
    return DeviceSpec(
        device_id=device_id,
        vendor=family.vendor,
        backend=backend,
        name=profile.name,
        arch=profile.arch,
        torch_device=family.torch_device,
        features=frozenset(draft.features),
        unverified_features=frozenset(draft.unverified - draft.features),
        memory_bytes=int(memory.value or 0),
        memory_bandwidth=rates.pop("memory_bandwidth", None),
        peak_flops={key.removeprefix("peak_flops."): rate for key, rate in rates.items()},
        attributes=draft.attributes,
        software=dict(software),
        evidence=draft.evidence,
    )


def _rates(draft: _Draft, profile: DeviceProfile) -> dict[str, float]:
    """Key of the evidence -> rate: what is stated of the product, else what somebody measured on
    one, which the attribute `rates_measured_elsewhere` names."""
    stated = {"memory_bandwidth": profile.memory_bandwidth}
    stated |= {f"peak_flops.{dtype}": rate for dtype, rate in profile.peak.items()}
    bandwidths = ("memory_bandwidth", "host_link", "fabric", "p2p")
    measured = {
        what if what in bandwidths else f"peak_flops.{what}": rate
        for what, rate in profile.measured.items()
    }
    rates, elsewhere = {}, []
    for key in dict.fromkeys((*stated, *measured)):
        found = stated.get(key)
        if found is None or not found.is_known:
            if key in bandwidths and key != "memory_bandwidth":
                continue
            if key in measured:
                found = measured[key]
                elsewhere.append(key)
        if found is None:
            continue
        draft.note(key, found)
        if found.value is not None:
            rates[key] = float(found.value)
    if elsewhere:
        draft.attributes[MEASURED_ELSEWHERE] = " ".join(elsewhere)
    return rates


def _matrix_dtypes(
    draft: _Draft, profile: DeviceProfile, architecture: Architecture | None
) -> None:
    """The device's own list where it has one; what its architecture lacks is never claimed."""
    absent: frozenset[str] = frozenset()
    if architecture is not None:
        absent = architecture.absent_matrix_dtypes.value or frozenset()
    sources = [profile.matrix_dtypes, profile.unverified_matrix_dtypes]
    if architecture is not None:
        sources += [architecture.matrix_dtypes, architecture.unverified_matrix_dtypes]
    # The vouched-for lists first, so that a claim never hides them.
    for fact in sorted(sources, key=lambda f: not f.is_verified):
        draft.dtypes(fact)
    for dtype in absent:
        draft.features.discard(f"matrix.{dtype}")
        draft.unverified.discard(f"matrix.{dtype}")


def _units(draft: _Draft, family: FamilyProfile, architecture: Architecture | None) -> None:
    if architecture is None:
        return
    for name in ("graph_capture", "tma", "wgmma", "tcgen05", "multicast"):
        draft.feature(name, getattr(architecture, name))
    target = architecture.triton_target
    draft.attributes["triton_target"] = target.value or ""
    if target.value and family.triton.works:
        is_verified = target.is_verified and family.triton.group.is_verified
        (draft.features if is_verified else draft.unverified).add("triton")
        draft.note("features.triton", target)


def _attributes(
    draft: _Draft,
    profile: DeviceProfile,
    family: FamilyProfile,
    architecture: Architecture | None,
) -> None:
    draft.attributes |= {"family": family.id, "profile": profile.id}
    if profile.compute_capability is not None:
        draft.attributes["compute_capability"] = profile.compute_capability
    draft.attributes["collective_library"] = family.collectives.name
    draft.attributes["torch_backend"] = family.collectives.torch_backend or ""
    draft.attribute("warp_size", _first(profile, architecture, "warp_size"), whole=True)
    draft.attribute(
        "shared_memory_per_block_bytes",
        _first(profile, architecture, "shared_memory_per_block_bytes"),
        whole=True,
    )
    draft.attribute("compute_units", profile.compute_units, whole=True)
    draft.attribute("host_link", profile.host_link)
    draft.attribute("host_link_bytes_per_s", profile.host_link_bytes_per_s)
    draft.attributes["fabric"] = profile.fabric.value or "none"
    draft.note("attributes.fabric", profile.fabric)
    if draft.attributes["fabric"] != "none":
        group = profile.fabric_group
        draft.attributes["fabric_group"] = group.value or 0 if group.is_verified else 0
        draft.note("attributes.fabric_group", group)
    both_directions = profile.fabric_bytes_per_s
    if both_directions.is_known:
        draft.attribute("fabric_bytes_per_s", both_directions.scaled(0.5, "half of it each way"))
    elif (measured := profile.measured.get("fabric")) is not None:
        draft.attribute("fabric_bytes_per_s", measured)
    if profile.torch_devices_per_card > 1:
        draft.attributes["devices_per_card"] = profile.torch_devices_per_card
    draft.attributes["p2p"] = peer_access(profile.p2p)
    draft.note("attributes.p2p", profile.p2p)


def _first(profile: DeviceProfile, architecture: Architecture | None, name: str) -> Fact[Any]:
    """The device's own value, or its architecture's."""
    own: Fact[Any] = getattr(profile, name)
    if own.is_known or architecture is None:
        return own
    shared: Fact[Any] = getattr(architecture, name)
    return shared


def peer_access(fact: Fact[str]) -> str:
    """ "claimed" where a source says that peer access is on, "none" where one says that it is off,
    else "unknown".

    Never "verified": that is a fact about one host, found by writing and comparing on it.
    """
    said = fact.value or ""
    if said.startswith("enabled"):
        return "claimed"
    return "none" if said.startswith("disabled") else "unknown"


def _links(draft: _Draft, database: Database, profile: DeviceProfile) -> None:
    """The best measured bus bandwidth and the shortest latency for each number of devices."""
    for link in database.links:
        if link.device != profile.id or link.value.value is None:
            continue
        if link.metric == "all_reduce_busbw":
            key, value, better = f"link_bytes_per_s.{link.world_size}", link.value.value, max
        elif link.metric == "all_reduce_latency":
            key = f"link_latency_us.{link.world_size}"
            value, better = link.value.value * 1e6, min
        else:
            continue
        before = draft.attributes.get(key)
        chosen = value if before is None else better(float(before), value)
        if chosen == value:
            draft.attributes[key] = value
            draft.note(f"attributes.{key}", link.value)


def _evidence(fact: Fact[Any]) -> Evidence:
    """Where a value comes from; everything that is not vouched for is UNVERIFIED."""
    found = "not known" if fact.value is None else _shown(fact.value)
    return Evidence(
        source=f"capability database: {', '.join(fact.source) or 'no source'}"
        + (f" ({fact.note})" if fact.note else ""),
        found=f"{found} {fact.unit}".strip(),
        confidence=Confidence.DATABASE if fact.is_verified else Confidence.UNVERIFIED,
    )


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return " ".join(_sorted_texts(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _sorted_texts(values: frozenset[Any]) -> Iterator[str]:
    return iter(sorted(str(value) for value in values))
