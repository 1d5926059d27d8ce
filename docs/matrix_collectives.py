"""Collectives and what they are joined with, in the support matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.request import OpRequest, TokenRange


def _reduce_norm(transport: str, p2p: Any, tokens: int) -> OpRequest:
    """Of 8 ranks, as the sums of the collectives below."""
    return AllReduceNormRequest(
        kind="all_reduce",
        world_size=8,
        width=5120,
        dtype="bfloat16",
        transport=transport,
        p2p=p2p,
        tokens=TokenRange(1, tokens),
    )


def _all_reduce(world: int, transport: str, p2p: Any, tokens: int, **more: Any) -> OpRequest:
    """5120 values of bfloat16 per token: 10 KiB for one, 80 MiB for 8192."""
    given: dict[str, Any] = {"kind": "all_reduce", "dtype": "bfloat16", "width": 5120} | more
    return CollectiveRequest(
        world_size=world, transport=transport, p2p=p2p, tokens=TokenRange(1, tokens), **given
    )


COLLECTIVES: Mapping[str, Mapping[str, OpRequest]] = {
    "collective": {
        "2 on PCIe, no P2P, 10 KiB": _all_reduce(2, "pcie", "none", 1),
        "8 on PCIe, no P2P, 10 KiB": _all_reduce(8, "pcie", "none", 1),
        "8 on PCIe, P2P claimed, 10 KiB": _all_reduce(8, "pcie", "claimed", 1),
        "8 on PCIe, P2P verified, 10 KiB": _all_reduce(8, "pcie", "verified", 1),
        "8 on PCIe, P2P verified, 640 KiB": _all_reduce(8, "pcie", "verified", 64),
        "8 on PCIe, P2P verified, 80 MiB": _all_reduce(8, "pcie", "verified", 8192),
        "8 on PCIe across sockets, 10 KiB": _all_reduce(8, "pcie", "verified", 1, distance="SYS"),
        "8 on NVLink, verified, 10 KiB": _all_reduce(8, "nvlink", "verified", 1),
        "8 on NVLink, claimed, 10 KiB": _all_reduce(8, "nvlink", "claimed", 1),
        "4 on NVLink bridges, 10 KiB": _all_reduce(4, "nvlink", "verified", 1, is_full_mesh=False),
        "8 on xGMI, verified, 10 KiB": _all_reduce(8, "xgmi", "verified", 1),
        "8 on the vendor's fabric": _all_reduce(8, "hccs", "claimed", 64),
        "8 on NVLink, verified, 640 KiB": _all_reduce(8, "nvlink", "verified", 64),
        "8 on NVLink, verified, 80 MiB": _all_reduce(8, "nvlink", "verified", 8192),
        "all_gather, 8 on PCIe": _all_reduce(8, "pcie", "claimed", 64, kind="all_gather"),
    },
    "all_reduce_norm": {
        "8 on PCIe, P2P verified, 10 KiB": _reduce_norm("pcie", "verified", 1),
        "8 on PCIe, P2P claimed, 10 KiB": _reduce_norm("pcie", "claimed", 1),
        "8 on NVLink, verified, 10 KiB": _reduce_norm("nvlink", "verified", 1),
        "8 on xGMI, verified, 10 KiB": _reduce_norm("xgmi", "verified", 1),
        "8 on NVLink, verified, 640 KiB": _reduce_norm("nvlink", "verified", 64),
    },
}
