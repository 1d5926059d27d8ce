"""What a collective over peers' memory needs of the group, and the sizes at which it is meant.

Beyond its size the platform's library is better, so a larger message is out of scope and nothing is
lost by it. Thresholds: vLLM's custom all-reduce (8 MiB; one-shot below 512 KiB for up to 4 ranks,
256 KiB for up to 8), and measurements on PCIe (one-shot loses to the library from about 48 KiB
among 8 devices of two sockets).
"""

from __future__ import annotations

from collections.abc import Sequence

from hal.ops.collective import CollectiveKind, CollectiveRequest
from hal.ops.formats import DTYPE_BYTES
from hal.reasons import Reason, ReasonKind
from hal_backends.gpu.limits import gather, one_of, scope

_KIB, MIB = 1 << 10, 1 << 20
MOST_BYTES = 8 * MIB
_WORLDS = (2, 4, 6, 8)
_DTYPES = ("bfloat16", "float16", "float32")
FABRICS = ("nvlink", "xgmi")


def message_bytes(r: CollectiveRequest) -> int:
    """Of the largest message of the request's token range."""
    return r.tokens.high * r.width * DTYPE_BYTES[r.dtype]


def one_shot_most_bytes(r: CollectiveRequest) -> int:
    """Up to which every rank reads all of every other rank's message."""
    if r.world_size <= 2:
        return MOST_BYTES
    if r.transport == "pcie" and r.world_size > 4 and r.distance == "SYS":
        return 48 * _KIB
    return 512 * _KIB if r.world_size <= 4 else 256 * _KIB


def size(
    r: CollectiveRequest, low: int, high: int, kind: CollectiveKind = "all_reduce"
) -> list[Reason]:
    """Between the bounds; the sizes are those of one kind, other kinds are out of scope at any."""
    found = message_bytes(r)
    if r.kind != kind or low < found <= high:
        return []
    bounds = f"at most {high} bytes" if low == 0 else f"more than {low}, at most {high} bytes"
    return [
        Reason(
            what="message",
            required=f"{bounds} (beyond that another algorithm wins)",
            found=f"{found} bytes",
            kind=ReasonKind.SCOPE,
        )
    ]


def peers(
    r: CollectiveRequest, transports: Sequence[str], kind: CollectiveKind = "all_reduce"
) -> list[Reason]:
    """A collective of devices that all reach each other's memory, as verified on this host."""
    reasons = gather(
        scope("kind", r.kind, (kind,)),
        scope("dtype", r.dtype, _DTYPES),
        scope("transport", r.transport, transports),
        one_of("world_size", r.world_size, _WORLDS),
    )
    if r.transport in FABRICS and r.world_size > 2 and not r.is_full_mesh:
        reasons.append(
            Reason(
                what="fabric",
                required=f"{r.transport} between every pair",
                found="not every pair is linked directly",
                kind=ReasonKind.HARDWARE,
            )
        )
    if r.p2p != "verified":
        reasons.append(
            Reason(
                what="peer access (P2P)",
                required="verified on this host (hal devices --verify-links)",
                found={"claimed": "claimed, not verified", "unknown": "not known"}.get(
                    r.p2p, "none"
                ),
                kind=ReasonKind.HARDWARE if r.p2p == "none" else ReasonKind.UNVERIFIED,
            )
        )
    return reasons
