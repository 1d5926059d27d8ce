"""Writes random patterns from one device's memory into another's and compares every bit.

One decision: when peer access counts as verified. The platform says that both directions are
direct, and every pattern of every size arrives unchanged over what said the opposite before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hal.hookspecs import Runtime
from hal.peer_links.outcome import PairOutcome

if TYPE_CHECKING:
    import torch

# 32-bit words: less than a page and no round number, a block of a small collective, one of a large.
WORDS = (1021, 1 << 18, 1 << 24)
ROUNDS = 4
_TIMED_COPIES = 3


@runtime_checkable
class PeerRuntime(Runtime, Protocol):
    """A runtime whose peer access can be verified: it has these two members besides."""

    def reaches(self, peer: torch.device) -> bool | None:
        """Whether this device addresses the memory of `peer` directly; None if nobody tells."""
        ...

    def copy_to_peer(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy from this device's memory into that of a peer, without the host's between."""
        ...


def verify_pair(ids: tuple[str, str], first: Runtime, second: Runtime) -> PairOutcome:
    """Both directions between two devices of this process. Raises what the runtimes raise."""
    if not isinstance(first, PeerRuntime) or not isinstance(second, PeerRuntime):
        return _outcome(ids, "unknown", "the plug-in's runtime has no copy between devices")
    ends: tuple[PeerRuntime, PeerRuntime] = (first, second)
    claims = (first.reaches(second.torch_device), second.reaches(first.torch_device))
    if None in claims:
        return _outcome(ids, "unknown", "the platform does not tell whether they reach each other")
    if not all(claims):
        return _outcome(ids, "none", "the platform says that they do not reach each other")
    rates = []
    for here, there, direction in ((0, 1, "→"), (1, 0, "←")):
        for words in WORDS:
            for _ in range(ROUNDS):
                wrong = _wrong_words(ends[here], ends[there], words)
                if wrong:
                    return _outcome(ids, "wrong", f"{direction} {wrong} of {words} words wrong")
        rates.append(_bytes_per_s(ends[here], ends[there]))
    sizes = f"{len(WORDS)} sizes to {WORDS[-1] * 4 >> 20} MiB, {ROUNDS} patterns each"
    return _outcome(ids, "verified", f"both directions bit for bit, {sizes}", min(rates))


def _outcome(
    ids: tuple[str, str], verdict: str, detail: str, rate: float | None = None
) -> PairOutcome:
    return PairOutcome(
        first=ids[0],
        second=ids[1],
        verdict=verdict,  # type: ignore[arg-type]  # one of the literals above
        detail=detail,
        bytes_per_s=rate,
    )


def _wrong_words(here: PeerRuntime, there: PeerRuntime, words: int) -> int:
    """How many of so many random words arrive as others."""
    import torch

    pattern = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int64).to(torch.int32)
    source = pattern.to(here.torch_device)
    destination = torch.bitwise_not(pattern).to(there.torch_device)
    _copy(here, there, source, destination)
    return int((destination.cpu() != pattern).sum())


def _bytes_per_s(here: PeerRuntime, there: PeerRuntime) -> float:
    """The best of some copies of the largest size."""
    import torch

    source = torch.zeros(WORDS[-1], dtype=torch.int32, device=here.torch_device)
    destination = torch.empty_like(source, device=there.torch_device)
    best = float("inf")
    for _ in range(_TIMED_COPIES):
        started = time.perf_counter()
        _copy(here, there, source, destination)
        best = min(best, time.perf_counter() - started)
    return source.numel() * source.element_size() / max(best, 1e-9)


def _copy(
    here: PeerRuntime, there: PeerRuntime, source: torch.Tensor, destination: torch.Tensor
) -> None:
    """Copied and arrived: both devices are waited for before and after."""
    here.synchronize()
    there.synchronize()
    here.copy_to_peer(source, destination)
    here.synchronize()
    there.synchronize()
