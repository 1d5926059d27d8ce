"""What links the devices of a group, as far as it is known. One decision: the link of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from hal.device import Confidence, DeviceSpec, Evidence
from hal.ops.collective import PeerAccess

_DIRECT_FABRICS = frozenset({"", "none"})
_NO_EVIDENCE = Evidence(source="none", found="not known", confidence=Confidence.UNVERIFIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink:
    """The link between the devices of one group.

    kind: a transport of `CollectiveRequest` ("host", "pcie", "nvlink", …). p2p: whether devices
    reach each other's memory, and who says so. is_full_mesh: every pair is linked directly, as
    somebody vouches for; is_mesh_known: False where nobody says whether they are. distance: of the
    farthest pair, PIX … SYS, "" if not known. bandwidth_bytes_per_s: what each rank sends and
    receives at best (bus bandwidth), latency_us: of a small collective; None where nobody measured
    or stated them.
    """

    kind: str
    p2p: PeerAccess = "none"
    is_full_mesh: bool = True
    is_mesh_known: bool = True
    distance: str = ""
    bandwidth_bytes_per_s: float | None = None
    latency_us: float | None = None
    evidence: Evidence = field(default=_NO_EVIDENCE)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def links_each_to_each(attributes: Mapping[str, str | int | float], num_devices: int) -> bool:
    """Whether a device's fabric links every pair of so many devices: as probed on a host
    (`fabric_is_full_mesh`), else as far as the product's reaches (`fabric_group`, 0 for not known),
    else yes: a plug-in that says neither has no other kind."""
    if "fabric_is_full_mesh" in attributes:
        return bool(attributes["fabric_is_full_mesh"])
    return num_devices <= int(attributes.get("fabric_group", num_devices))


def is_mesh_known(attributes: Mapping[str, str | int | float]) -> bool:
    """Whether anybody vouches for what `links_each_to_each` answers."""
    return "fabric_is_full_mesh" in attributes or attributes.get("fabric_group", 1) != 0


def group_link_of(spec: DeviceSpec, world_size: int) -> GroupLink:
    """The link of `world_size` devices like `spec`, from its attributes.

    A fabric ("nvlink", "xgmi", …) links the pairs that `links_each_to_each` says; without one the
    devices meet on PCIe, or, on a CPU, in the host's memory. Bandwidth:
    `link_bytes_per_s.<world>` where it was measured for that world size, else
    `fabric_bytes_per_s` or `host_link_bytes_per_s`.
    """
    attributes = spec.attributes
    fabric = str(attributes.get("fabric", ""))
    has_fabric = fabric not in _DIRECT_FABRICS
    kind = fabric if has_fabric else ("host" if spec.torch_device == "cpu" else "pcie")
    words: tuple[PeerAccess, ...] = get_args(PeerAccess)
    p2p: PeerAccess = next((word for word in words if word == attributes.get("p2p")), "none")
    is_full_mesh = has_fabric and links_each_to_each(attributes, world_size)
    keys = (
        f"link_bytes_per_s.{world_size}",
        "fabric_bytes_per_s" if has_fabric else "host_link_bytes_per_s",
    )
    key = next((key for key in keys if key in attributes), "")
    latency = attributes.get(f"link_latency_us.{world_size}")
    return GroupLink(
        kind=kind,
        p2p=p2p,
        is_full_mesh=is_full_mesh or world_size <= 2,
        is_mesh_known=not has_fabric or world_size <= 2 or is_mesh_known(attributes),
        distance=str(attributes.get("distance", "")),
        bandwidth_bytes_per_s=float(attributes[key]) if key else None,
        latency_us=None if latency is None else float(latency),
        evidence=spec.evidence.get(f"attributes.{key}", spec.evidence.get(key, _NO_EVIDENCE)),
    )
