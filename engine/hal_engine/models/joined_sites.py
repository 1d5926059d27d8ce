"""Calls of a decoder that one op may do together: a sum over ranks and the norm behind it, the
attention of a decode and the output projection. What is before the attention: `rotary_joins`,
`latent_joins`; what a product stores: `product_joins`; a norm: `norm_joins`; an indexer:
`index_joins`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hal.joins import JoinedPart, JoinedSite
from hal.ops.attention import AttentionRequest
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.plan import OpSite
from hal_engine.models.index_joins import index_joins
from hal_engine.models.latent_joins import latent_joins
from hal_engine.models.norm_joins import norm_joins
from hal_engine.models.product_joins import product_joins
from hal_engine.models.rotary_joins import rotary_joins

# The joined call, the sum, the norm, and how many layers behind the sum it is.
_REDUCES_WITH_NORM = (
    ("layers.*.o_reduce_norm", "layers.*.o_all_reduce", "layers.*.post_norm", 0),
    ("layers.*.down_reduce_norm", "layers.*.down_all_reduce", "layers.*.input_norm", 1),
    ("layers.*.experts_reduce_norm", "layers.*.experts_all_reduce", "layers.*.input_norm", 1),
)


_ATTENTION, _OUTPUT = "layers.*.attention", "layers.*.o_proj"
ATTENTION_PROJECTION = "attention_projection"


def model_joins(sites: Sequence[OpSite]) -> list[JoinedSite]:
    """The joined calls that a model's sites allow. The sum over ranks behind the last layer has no
    norm of its own layer behind it; nor has a layer between residual streams."""
    reduces = [
        join
        for name, reduce, norm, shift in _REDUCES_WITH_NORM
        for join in _of_pattern(sites, name, reduce, JoinedPart(site=norm, shift=shift))
    ]
    attended = _attention_projections(sites)
    # Norms last: a sum that takes one with it saves more than its rounding.
    return [
        *rotary_joins(sites),
        *latent_joins(sites),
        *attended,
        *index_joins(sites),
        *product_joins(sites),
        *reduces,
        *norm_joins(sites),
    ]


def _attention_projections(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """Where the projection's weight is as wide as the activations and nothing else is added."""
    for attention, output in product(sites, sites):
        attend, project = attention.request, output.request
        layers = tuple(layer for layer in attention.layers if layer in output.layers)
        if (
            (attention.site, output.site) == (_ATTENTION, _OUTPUT)
            and attention.ranks == output.ranks
            and layers
            and isinstance(attend, AttentionRequest)
            and attend.phase == "decode"
            and not attend.has_kv_scales
            and isinstance(project, GemmRequest)
            and project.weight_format.name == attend.dtype
            and not project.has_bias
        ):
            joined = AttentionProjectionRequest(
                phase="decode",
                num_heads=attend.num_heads,
                num_kv_heads=attend.num_kv_heads,
                head_dim=attend.head_dim,
                v_head_dim=attend.v_head_dim,
                hidden_size=project.n,
                block_size=attend.block_size,
                dtype=attend.dtype,
                kv_dtype=attend.kv_dtype,
                window=attend.window,
                softcap=attend.softcap,
                has_sinks=attend.has_sinks,
                context_tokens=attend.context_tokens,
                tokens=attend.tokens,
            )
            site = f"layers.*.{ATTENTION_PROJECTION}"
            whole = OpSite(site=site, request=joined, layers=layers, ranks=attention.ranks)
            parts = (JoinedPart(site=_ATTENTION, phase="decode"), JoinedPart(site=_OUTPUT))
            yield JoinedSite(site=whole, parts=parts)


def _of_pattern(
    sites: Sequence[OpSite], name: str, reduce: str, norm: JoinedPart
) -> Iterator[JoinedSite]:
    for site in sites:
        request = site.request
        if site.site != reduce or not isinstance(request, CollectiveRequest):
            continue
        layers = tuple(
            layer for layer in site.layers if _has_norm(sites, norm, layer, request.width)
        )
        if layers:
            joined = AllReduceNormRequest(
                kind="all_reduce",
                world_size=request.world_size,
                width=request.width,
                dtype=request.dtype,
                transport=request.transport,
                p2p=request.p2p,
                is_full_mesh=request.is_full_mesh,
                distance=request.distance,
                tokens=request.tokens,
            )
            whole = OpSite(site=name, request=joined, layers=layers, ranks=site.ranks)
            yield JoinedSite(site=whole, parts=(JoinedPart(site=reduce), norm))


def _has_norm(sites: Sequence[OpSite], norm: JoinedPart, layer: int, width: int) -> bool:
    return any(
        site.site == norm.site
        and layer + norm.shift in site.layers
        and isinstance(site.request, RmsNormRequest)
        and site.request.has_residual
        and site.request.hidden_size == width
        for site in sites
    )
