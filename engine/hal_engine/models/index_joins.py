"""Where the scores of an indexer and the choice among them may be one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hal.joins import JoinedPart, JoinedSite
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.plan import OpSite

_LOGITS, _TOP_K = "layers.*.indexer.logits", "layers.*.indexer.top_k"


def index_joins(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """Of every indexer, for each form of the choice that its layers make."""
    for scores in sites:
        score = scores.request
        if scores.site != _LOGITS or not isinstance(score, IndexLogitsRequest):
            continue
        groups: dict[IndexTopKRequest, list[int]] = {}
        for layer in scores.layers:
            choice = _choice_of(sites, scores, layer)
            if choice is not None:
                groups.setdefault(choice, []).append(layer)
        for choice, layers in groups.items():
            whole = OpSite(
                site="layers.*.indexer.selection",
                request=_joined(score, choice),
                layers=tuple(layers),
                ranks=scores.ranks,
            )
            parts = tuple(JoinedPart(site=name, phase=score.phase) for name in (_LOGITS, _TOP_K))
            yield JoinedSite(site=whole, parts=parts, needs_gain=False)


def _choice_of(sites: Sequence[OpSite], scores: OpSite, layer: int) -> IndexTopKRequest | None:
    """The choice of a layer that goes by these scores."""
    for site in sites:
        request = site.request
        if (
            (site.site, site.ranks, request.phase) == (_TOP_K, scores.ranks, scores.request.phase)
            and layer in site.layers
            and isinstance(request, IndexTopKRequest)
        ):
            return request
    return None


def _joined(score: IndexLogitsRequest, choice: IndexTopKRequest) -> IndexSelectionRequest:
    return IndexSelectionRequest(
        phase=score.phase,
        num_heads=score.num_heads,
        head_dim=score.head_dim,
        key_format=score.key_format,
        block_size=score.block_size,
        dtype=score.dtype,
        top_k=choice.top_k,
        compress_ratio=score.compress_ratio,
        context_tokens=score.context_tokens,
        pool_size=choice.pool_size,
        candidate_blocks=choice.candidate_blocks,
        publishes_candidates=choice.publishes_candidates,
        tokens=score.tokens,
    )
