"""The platform's own collective library, by its name, through torch.distributed.

One decision: when the library counts as tuned. Over a fabric, or between two devices, it does.
Among more than two devices on PCIe it does only if the devices reach each other's memory and that
was verified here: otherwise every byte goes through the host's memory, and that is its own,
portable candidate. NCCL's default ceiling for peer access is one PCIe hierarchy (PXB), after its
src/graph/paths.cc.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.collective import COLLECTIVE_KINDS, CollectiveRequest
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.collectives_peer import peer_candidates
from hal_backends.gpu.limits import gather, limit, scope
from hal_backends.gpu.offers import Offer, on_device, work_of
from hal_backends.process_group import load_process_group

if TYPE_CHECKING:
    pass

_DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "int8")
_FOUND = {
    "claimed": "claimed, not verified: capability bits are known to be wrong",
    "unknown": "not known (`hal devices --verify-links` tells on the host)",
    "none": "none",
}
_NEAR = ("", "PIX", "PXB")  # "" is not known: then peer access alone decides


def library_name(device: DeviceSpec) -> str:
    """The library of the device's platform as candidates are named by it: "nccl", "hccl", …"""
    found = re.match(r"[A-Za-z]+", str(device.attributes.get("collective_library", "")))
    return found.group().lower() if found else "torch_distributed"


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    if op not in ("collective", "all_reduce_norm"):
        return ()
    return (*on_device(_library_offers(device), op, device), *peer_candidates(op, device))


def _library_offers(device: DeviceSpec) -> tuple[Offer, Offer]:
    name = library_name(device)
    shown = str(device.attributes.get("collective_library") or "torch.distributed")
    leaf = (Leaf(kind="symbol", name=str(device.attributes.get("torch_backend") or name)),)

    def common(r: CollectiveRequest) -> list[Reason]:
        return gather(
            _process_group(device),
            scope("kind", r.kind, COLLECTIVE_KINDS),
            limit("dtype", r.dtype, " or ".join(_DTYPES), is_met=r.dtype in _DTYPES),
        )

    return (
        Offer(
            op="collective",
            implementation=name,
            tier=Tier.TUNED,
            summary=f"{shown} over the devices' own links",
            check=lambda r: gather(common(r), peer_path(r, shown)),
            load=load_process_group,
            leaf=leaf,
            is_graph_safe="graph_capture" in device.features,
        ),
        Offer(
            op="collective",
            implementation=f"{name}_through_host",
            tier=Tier.PORTABLE,
            summary=f"{shown} through the host's memory: each byte crosses PCIe twice",
            check=lambda r: gather(common(r), _host_path(r)),
            load=load_process_group,
            leaf=leaf,
            work=_staged_work,
            is_graph_safe="graph_capture" in device.features,
        ),
    )


def _process_group(device: DeviceSpec) -> list[Reason]:
    """A backend name of torch.distributed is known for the platform."""
    if device.attributes.get("torch_backend"):
        return []
    return [
        Reason(
            what="torch.distributed backend",
            required=f"the name that {device.backend}'s torch registers",
            found="not published",
            kind=ReasonKind.UNVERIFIED,
        )
    ]


def peer_path(r: CollectiveRequest, library: str) -> list[Reason]:
    """What keeps the library from the direct path between the devices.

    A fabric that links some pairs only (bridges) is no better than what the other pairs have.
    """
    if r.transport == "host":
        return scope("transport", r.transport, ("pcie", "a fabric"))
    if r.world_size <= 2 or not _crosses_pcie(r):
        return []
    if r.p2p != "verified":
        return [verified_peer_access(r, f"{library} without staging in the host's memory")]
    if r.distance in _NEAR:
        return []
    return [
        Reason(
            what="distance of the farthest pair",
            required=f"PIX or PXB, {library}'s default ceiling for peer access "
            "(NCCL_P2P_LEVEL=SYS raises it)",
            found=r.distance,
            kind=ReasonKind.SOFTWARE,
        )
    ]


def _crosses_pcie(r: CollectiveRequest) -> bool:
    return r.transport == "pcie" or not r.is_full_mesh


def _host_path(r: CollectiveRequest) -> list[Reason]:
    """Only what crosses PCIe can be staged in the host's memory."""
    if r.transport == "host" or _crosses_pcie(r):
        return []
    return scope("transport", r.transport, ("pcie", "host", "a fabric between some pairs only"))


def verified_peer_access(r: CollectiveRequest, what_for: str) -> Reason:
    """Peer access is a fact that was tested on this host by writing and comparing, or it is not."""
    return Reason(
        what="peer access (P2P)",
        required=f"verified on this host, for {what_for}"
        + ("" if r.transport == "pcie" else f", as {r.transport} is not known to link every pair"),
        found=_FOUND[r.p2p],
        kind=ReasonKind.HARDWARE if r.p2p == "none" else ReasonKind.UNVERIFIED,
    )


def _staged_work(r: CollectiveRequest, tokens: int) -> Work:
    """Up to the host and down again: twice the bytes of the direct path."""
    direct = work_of(r, tokens, unit=r.dtype)
    return work_of(r, tokens, unit=r.dtype, more_bytes=direct.bytes)
