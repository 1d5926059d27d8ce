"""Where the norms of q and k, their rotation and the write of k and v may be one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hal.joins import JoinedPart, JoinedSite
from hal.ops.kv_write import KvWriteRequest
from hal.ops.rope import RopeRequest
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.plan import OpSite

ROPE_KV_WRITE = "rope_kv_write"
_NORMS = ("q_norm", "k_norm")


def rotary_joins(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """Of dense caches of keys and values, where the first values of each head are rotated."""
    for site in sites:
        rope = site.request
        if site.site != "layers.*.rope" or not isinstance(rope, RopeRequest):
            continue
        if rope.is_inverse or rope.rotary_start or not rope.num_kv_heads:
            continue
        groups: dict[tuple[KvWriteRequest, bool], list[int]] = {}
        for layer in site.layers:
            write = _in_layer(sites, "kv_write", layer, site.ranks)
            if isinstance(write, KvWriteRequest) and not write.kv_format:
                has_norms = _in_layer(sites, _NORMS[0], layer, site.ranks) is not None
                groups.setdefault((write, has_norms), []).append(layer)
        for (write, has_norms), layers in groups.items():
            names = (*(_NORMS if has_norms else ()), "rope", "kv_write")
            whole = OpSite(
                site=f"layers.*.{ROPE_KV_WRITE}",
                request=_joined(rope, write, has_norms=has_norms),
                layers=tuple(layers),
                ranks=site.ranks,
            )
            parts = tuple(JoinedPart(site=f"layers.*.{name}") for name in names)
            yield JoinedSite(site=whole, parts=parts)


def _in_layer(
    sites: Sequence[OpSite], name: str, layer: int, ranks: tuple[int, ...]
) -> object | None:
    """The request of a site of that layer, None if it has none."""
    for site in sites:
        if site.site == f"layers.*.{name}" and layer in site.layers and site.ranks == ranks:
            return site.request
    return None


def _joined(rope: RopeRequest, write: KvWriteRequest, *, has_norms: bool) -> RopeKvWriteRequest:
    return RopeKvWriteRequest(
        num_heads=rope.num_heads,
        num_kv_heads=rope.num_kv_heads,
        head_dim=rope.head_dim,
        v_head_dim=write.v_head_dim,
        rotary_dim=rope.rotary_dim,
        block_size=write.block_size,
        dtype=rope.dtype,
        kv_dtype=write.kv_dtype,
        has_qk_norm=has_norms,
        style=rope.style,
        has_kv_scales=write.has_scales,
        tokens=rope.tokens,
    )
