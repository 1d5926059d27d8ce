"""What a model needs of a device's memory: weights a rank, and how many tokens fit beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.request import OpRequest
from hal.plan import OpSite

# Left for activations, communication buffers and the framework itself.
USABLE_SHARE = 0.90


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank. weight_bytes: of the rank that holds most. kv_tokens: how many tokens of
    cache fit beside the weights on the whole group; None where the memory is not known, or the
    model keeps no cache.
    """

    weight_bytes: int
    memory_bytes: int | None
    kv_bytes_per_token_of_rank: int
    kv_tokens: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the weights fit; None where the device's memory is not known."""
        if self.memory_bytes is None:
            return None
        return self.weight_bytes <= self.memory_bytes * USABLE_SHARE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


def stored_weight_bytes(site: OpSite) -> int:
    """Bytes of the weights of all layers of a site, as stored; 0 for an op without a weight."""
    return _weight_bytes(site.request) * max(1, len(site.layers))


def memory_need(
    sites: Sequence[OpSite],
    device: DeviceSpec,
    world_size: int,
    kv_bytes_per_token: int,
    kv_copies: int = 1,
) -> MemoryNeed:
    """The need of the fullest of `world_size` ranks.

    A token's cache is shared by the ranks where each holds its heads' part of it. kv_copies: ranks
    that keep the same rows, all of them for a cache that all heads read (latent, compressed).
    """
    per_rank: Counter[int] = Counter()
    for site in _each_weight_once(sites):
        for rank in site.ranks:
            per_rank[rank] += stored_weight_bytes(site)
    weights = max(per_rank.values(), default=0)
    kv = -(-kv_bytes_per_token * kv_copies // world_size)
    memory = device.memory_bytes or None
    room = None if memory is None else int(memory * USABLE_SHARE) - weights
    tokens = max(0, room) // kv if room is not None and kv else None
    return MemoryNeed(
        weight_bytes=weights, memory_bytes=memory, kv_bytes_per_token_of_rank=kv, kv_tokens=tokens
    )


def _each_weight_once(sites: Sequence[OpSite]) -> list[OpSite]:
    """A site that is planned for two phases has one weight."""
    seen: dict[tuple[str, tuple[int, ...], tuple[int, ...]], OpSite] = {}
    for site in sites:
        seen.setdefault((site.site, site.layers, site.ranks), site)
    return list(seen.values())


def _weight_bytes(request: OpRequest) -> int:
    return CATALOGUE[request.op].weight_bytes(request)
