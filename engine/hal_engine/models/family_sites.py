"""The order of the calls of families with latent or compressed attention, put together from parts.

A name has "*" for the layer. Layers that only speculative decoding uses are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hal.ops.embedding import EmbeddingRequest
from hal.ops.request import OpRequest, TokenRange
from hal.ops.sampling import TopKTopPRequest
from hal_engine.config_parts import HyperConnectionConfig
from hal_engine.models.compressed_sites import compressed_sites
from hal_engine.models.feed_forward_sites import feed_forward_sites
from hal_engine.models.mla_sites import mla_sites
from hal_engine.models.site_parts import Call, SiteParts
from hal_engine.models.stream_sites import engram_sites, stream_call

EMBED_TENSOR = "model.embed_tokens.weight"
HEAD_TENSOR = "lm_head.weight"
Site = tuple[str, int | None, OpRequest]
# What only the rows that get logits go through.
SAMPLED_SITES = frozenset(
    {"stream_head", "final_norm", "lm_head", "lm_head_all_gather", "sampler.top_k_top_p"}
)


@dataclass(frozen=True, slots=True)
class FamilySites:
    """All calls of one rank, in the order of a step."""

    parts: SiteParts

    def __iter__(self) -> Iterator[Site]:
        yield "embed", None, self._embedding()
        for layer in range(self.parts.config.num_layers):
            for name, request in self._layer(layer):
                yield f"layers.*.{name}", layer, request
        hyper = self.parts.config.hyper_connections
        if hyper is not None:
            yield "stream_head", None, stream_call(self.parts, hyper, "head")
        norm = self.parts.norm(self.parts.config.hidden_size, has_residual=hyper is None)
        yield "final_norm", None, norm
        yield from head_sites(self.parts)

    def _embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest(
            vocab_size=self.parts.config.vocab_size,
            hidden_size=self.parts.config.hidden_size,
            dtype=self.parts.precision.dtype,
            tokens=self.parts.limits.all_tokens,
        )

    def _layer(self, layer: int) -> Iterator[Call]:
        parts, config = self.parts, self.parts.config
        hyper, hidden = config.hyper_connections, config.hidden_size
        if config.engram is not None and layer in config.engram.layers:
            yield from engram_sites(parts, layer, config.engram)
        if hyper is None:
            yield "input_norm", parts.norm(hidden, has_residual=layer > 0)
            yield from self._attention(layer)
            yield "post_norm", parts.norm(hidden, has_residual=True)
            yield from feed_forward_sites(parts, layer)
        else:
            yield from self._between_streams(hyper, "attention", layer)
            yield from self._between_streams(hyper, "feed_forward", layer)

    def _between_streams(
        self, hyper: HyperConnectionConfig, sublayer: str, layer: int
    ) -> Iterator[Call]:
        parts, is_attention = self.parts, sublayer == "attention"
        yield f"{sublayer}_streams_in", stream_call(parts, hyper, "pre")
        name = "input_norm" if is_attention else "post_norm"
        yield name, parts.norm(parts.config.hidden_size)
        yield from self._attention(layer) if is_attention else feed_forward_sites(parts, layer)
        yield f"{sublayer}_streams_out", stream_call(parts, hyper, "post")

    def _attention(self, layer: int) -> Iterator[Call]:
        config = self.parts.config
        if config.mla is not None:
            yield from mla_sites(self.parts, layer, config.mla)
        elif config.compressed is not None:
            yield from compressed_sites(self.parts, layer, config.compressed)


def head_sites(parts: SiteParts) -> Iterator[Site]:
    """The output head, cut by rows of the vocabulary, and what the first rank samples from."""
    config, shard = parts.config, parts.shard
    tensor = EMBED_TENSOR if config.tie_word_embeddings else HEAD_TENSOR
    head = parts.linear(None, (tensor,), shard.vocab_rows, config.hidden_size, out_dtype="float32")
    yield "lm_head", None, head
    if shard.world_size > 1:
        gather = parts.collective("all_gather", shard.vocab_rows, "float32")
        yield "lm_head_all_gather", None, gather
    if shard.rank == 0:
        tokens = TokenRange(1, parts.limits.max_num_seqs)
        yield (
            "sampler.top_k_top_p",
            None,
            TopKTopPRequest(vocab_size=config.vocab_size, tokens=tokens),
        )
