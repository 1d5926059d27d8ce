"""Where one call may do what is between the projections of latent attention and its cache: the norm
of the row that a token keeps, the rotation of row and queries, the write in the cache's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hal.errors import RequestError
from hal.joins import JoinedPart, JoinedSite
from hal.ops.kv_write import KvWriteRequest
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest
from hal.ops.rope import RopeRequest
from hal.plan import OpSite


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Names of the calls of one kind of row; "" for none. q_rope is also that of the row where
    row_rope is "", which then is its one key head. unless: a call that reads the row itself, which
    would not be there to read."""

    joined: str
    write: str
    row_rope: str = ""
    q_rope: str = ""
    row_norm: str = ""
    q_norm: str = ""
    unless: str = ""


_PLACES = (
    _Place(
        joined="latent_kv_write",
        write="kv_write",
        row_rope="k_rope",
        q_rope="q_rope",
        row_norm="kv_a_norm",
    ),
    _Place(
        joined="window_kv_write",
        write="window_write",
        q_rope="rope",
        row_norm="kv_norm",
        q_norm="q_head_norm",
    ),
    # DeepSeek-V4.1 makes its index keys of the compressed rows.
    _Place(
        joined="compressor.rope_kv_write",
        write="compressor.kv_write",
        row_rope="compressor.rope",
        row_norm="compressor.kv_norm",
        unless="indexer.k_proj",
    ),
    _Place(
        joined="indexer.rope_kv_write",
        write="indexer.kv_write",
        row_rope="indexer.k_rope",
        row_norm="indexer.k_norm",
    ),
    # DeepSeek-V3.2 and GLM-5 rotate the index keys with their queries.
    _Place(
        joined="indexer.rope_kv_write",
        write="indexer.kv_write",
        q_rope="indexer.rope",
        row_norm="indexer.k_norm",
    ),
)


def latent_joins(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """Every one that a model's sites allow."""
    for place in _PLACES:
        for site in sites:
            if site.site != f"layers.*.{place.write}":
                continue
            groups: dict[tuple[LatentKvWriteRequest, tuple[str, ...]], list[int]] = {}
            for layer in site.layers:
                joined = _joined(_Layer(sites, layer, site.ranks), place, site.request)
                if joined is not None:
                    groups.setdefault(joined, []).append(layer)
            for (request, names), layers in groups.items():
                whole = OpSite(
                    site=f"layers.*.{place.joined}",
                    request=request,
                    layers=tuple(layers),
                    ranks=site.ranks,
                )
                parts = tuple(JoinedPart(site=f"layers.*.{name}") for name in names)
                yield JoinedSite(site=whole, parts=parts)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The requests of one layer on some ranks."""

    sites: Sequence[OpSite]
    layer: int
    ranks: tuple[int, ...]

    def request(self, name: str) -> OpRequest | None:
        """None where the layer has no such call, or where there is no name."""
        for site in self.sites:
            is_it = site.site == f"layers.*.{name}" and site.ranks == self.ranks
            if name and is_it and self.layer in site.layers:
                return site.request
        return None


def _joined(
    layer: _Layer, place: _Place, write: OpRequest
) -> tuple[LatentKvWriteRequest, tuple[str, ...]] | None:
    """The one call of a layer and the names of its parts."""
    queries = layer.request(place.q_rope)
    row = layer.request(place.row_rope) if place.row_rope else queries
    norm, q_norm = layer.request(place.row_norm), layer.request(place.q_norm)
    if not isinstance(write, KvWriteRequest) or not isinstance(row, RopeRequest):
        return None
    if layer.request(place.unless) is not None or not _are_joined(norm, q_norm):
        return None
    if not _rotates_one_row(row, queries, place) or row.head_dim != write.head_dim:
        return None
    names = (place.row_norm, place.q_norm, place.q_rope, place.row_rope, place.write)
    try:
        request = LatentKvWriteRequest(
            num_heads=queries.num_heads if isinstance(queries, RopeRequest) else 0,
            head_dim=queries.head_dim if isinstance(queries, RopeRequest) else 0,
            q_rotary_start=queries.rotary_start if isinstance(queries, RopeRequest) else 0,
            has_q_norm=q_norm is not None,
            row_dim=row.head_dim,
            rotary_dim=row.rotary_dim,
            row_rotary_start=row.rotary_start,
            norm_dim=norm.hidden_size if isinstance(norm, RmsNormRequest | LayerNormRequest) else 0,
            row_norm_kind="layer" if isinstance(norm, LayerNormRequest) else "rms",
            block_size=write.block_size,
            dtype=write.dtype,
            kv_format=write.kv_format,
            style=row.style,
            tokens=write.tokens,
        )
    except RequestError:
        return None
    return request, tuple(name for name in names if layer.request(name) is not None)


def _are_joined(row: OpRequest | None, queries: OpRequest | None) -> bool:
    """Whether the norms of row and queries, if there are any, are those that the joined op has."""
    if isinstance(row, LayerNormRequest) and not row.has_bias:
        return False
    is_row = row is None or isinstance(row, RmsNormRequest | LayerNormRequest)
    return is_row and (queries is None or isinstance(queries, RmsNormRequest))


def _rotates_one_row(row: RopeRequest, queries: OpRequest | None, place: _Place) -> bool:
    """Whether one row a token is rotated, forwards, and the queries by the same angles."""
    if row.is_inverse:
        return False
    if not place.q_rope:
        return (row.num_heads, row.num_kv_heads) == (1, 0)
    if not isinstance(queries, RopeRequest) or queries.is_inverse:
        return False
    if (queries.rotary_dim, queries.style) != (row.rotary_dim, row.style):
        return False
    if place.row_rope:
        return (row.num_heads, row.num_kv_heads, queries.num_kv_heads) == (1, 0, 0)
    return row.num_kv_heads == 1
