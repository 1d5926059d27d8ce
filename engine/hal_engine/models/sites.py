"""The call sites of a decoder: every op that a step will call, as requests, from the config alone.

The names here and the bindings in `decoder.py` are the two halves of one contract; a plan with a
site that nothing binds, or the other way round, is an error when the model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from hal.device_group import GroupLink
from hal.ops.attention import AttentionRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.gemm import GemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, Phase, TokenRange
from hal.ops.rope import RopeRequest
from hal.plan import OpSite, group_sites
from hal_engine.config import ModelConfig
from hal_engine.models.family_shards import shard_family, shard_with_copies
from hal_engine.models.family_sites import (
    EMBED_TENSOR,
    HEAD_TENSOR,
    SAMPLED_SITES,
    FamilySites,
    head_sites,
)
from hal_engine.models.feed_forward_sites import DOWN_TENSOR, GATE_UP_TENSORS, feed_forward_sites
from hal_engine.models.site_parts import HOST_LINK, SiteParts
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import Precision
from hal_engine.shards import Shard, shard_model

_LAYER = "model.layers.{}"
QKV_TENSORS = tuple(f"self_attn.{n}_proj.weight" for n in "qkv")
OUTPUT_TENSOR = "self_attn.o_proj.weight"


def head_tensor(config: ModelConfig) -> str:
    return EMBED_TENSOR if config.tie_word_embeddings else HEAD_TENSOR


def model_sites(
    config: ModelConfig,
    precision: Precision,
    limits: StepLimits,
    world_size: int = 1,
    link: GroupLink = HOST_LINK,
) -> list[OpSite]:
    """All call sites of all ranks. Raises PlanError if the ranks cannot share the model."""
    sites = group_sites(
        (pattern, layer, rank, request)
        for rank in range(world_size)
        for pattern, layer, request in _sites_of_rank(
            config, precision, limits, (rank, world_size), link
        )
    )
    return [dataclasses.replace(site, is_sampled=site.site in SAMPLED_SITES) for site in sites]


def _sites_of_rank(
    config: ModelConfig,
    precision: Precision,
    limits: StepLimits,
    rank: tuple[int, int],
    link: GroupLink,
) -> Iterator[tuple[str, int | None, OpRequest]]:
    is_dense = config.mla is None and config.compressed is None
    cut = shard_model if config.is_runnable else shard_with_copies
    heads = cut(config, *rank) if is_dense else None
    family = SiteParts(
        config=config,
        precision=precision,
        limits=limits,
        shard=shard_family(config, *rank),
        link=link,
    )
    if heads is None:
        return iter(FamilySites(family))
    return _Sites(config, precision, limits, family).of_rank(heads)


@dataclass(frozen=True, slots=True)
class _Sites:
    config: ModelConfig
    precision: Precision
    limits: StepLimits
    family: SiteParts  # of the same rank: for experts and collectives

    def of_rank(self, shard: Shard) -> Iterator[tuple[str, int | None, OpRequest]]:
        yield (
            "embed",
            None,
            EmbeddingRequest(
                vocab_size=self.config.vocab_size,
                hidden_size=self.config.hidden_size,
                dtype=self.precision.dtype,
                tokens=self._all_tokens,
            ),
        )
        for layer in range(self.config.num_layers):
            yield "layers.*.input_norm", layer, self._norm(has_residual=layer > 0)
            for name, request in (
                *self._attention(shard, layer),
                *self._feed_forward(shard, layer),
            ):
                yield f"layers.*.{name}", layer, request
        yield "final_norm", None, self._norm(has_residual=True)
        yield from head_sites(self.family)

    @property
    def _all_tokens(self) -> TokenRange:
        return self.limits.all_tokens

    def _norm(self, *, has_residual: bool) -> RmsNormRequest:
        return RmsNormRequest(
            hidden_size=self.config.hidden_size,
            dtype=self.precision.dtype,
            has_residual=has_residual,
            tokens=self._all_tokens,
        )

    def _gemm(
        self,
        layer: int,
        tensors: tuple[str, ...],
        n: int,
        k: int,
        *,
        bias: bool,
        gated: bool = False,
    ) -> GemmRequest:
        names = [f"{_LAYER.format(layer)}.{tensor}" for tensor in tensors]
        return GemmRequest(
            n=n,
            k=k,
            dtype=self.precision.dtype,
            weight_format=self.precision.weight_format(self.config, names),
            has_bias=bias,
            epilogue="silu_gated" if gated else "none",
            tokens=self._all_tokens,
        )

    def _attention(self, shard: Shard, layer: int) -> Iterator[tuple[str, OpRequest]]:
        config, dtype = self.config, self.precision.dtype
        heads, kv_heads, dim = shard.num_heads, shard.num_kv_heads, config.head_dim
        yield (
            "qkv_proj",
            self._gemm(
                layer,
                QKV_TENSORS,
                (heads + 2 * kv_heads) * dim,
                config.hidden_size,
                bias=config.qkv_bias,
            ),
        )
        if config.qk_norm:
            for name, rows in (("q_norm", heads), ("k_norm", kv_heads)):
                yield (
                    name,
                    RmsNormRequest(
                        hidden_size=dim, dtype=dtype, rows_per_token=rows, tokens=self._all_tokens
                    ),
                )
        yield (
            "rope",
            RopeRequest(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                rotary_dim=dim,
                dtype=dtype,
                tokens=self._all_tokens,
            ),
        )
        yield (
            "kv_write",
            KvWriteRequest(
                num_kv_heads=kv_heads,
                head_dim=dim,
                v_head_dim=dim,
                block_size=self.limits.block_size,
                dtype=dtype,
                kv_dtype=self.precision.kv_dtype,
                tokens=self._all_tokens,
            ),
        )
        phases: tuple[Phase, ...] = ("prefill", "decode")
        for phase in phases:
            yield "attention", self._attention_request(shard, layer, phase)
        yield (
            "o_proj",
            self._gemm(
                layer,
                (OUTPUT_TENSOR,),
                config.hidden_size,
                heads * dim,
                bias=config.output_bias and shard.rank == 0,
            ),
        )
        yield from self._all_reduce("o_all_reduce", shard)

    def _attention_request(self, shard: Shard, layer: int, phase: Phase) -> AttentionRequest:
        return AttentionRequest(
            phase=phase,
            num_heads=shard.num_heads,
            num_kv_heads=shard.num_kv_heads,
            head_dim=self.config.head_dim,
            v_head_dim=self.config.head_dim,
            block_size=self.limits.block_size,
            dtype=self.precision.dtype,
            kv_dtype=self.precision.kv_dtype,
            window=self.config.sliding_windows[layer] or 0,
            context_tokens=self.limits.context_tokens,
            tokens=self.limits.tokens_of(phase),
        )

    def _feed_forward(self, shard: Shard, layer: int) -> Iterator[tuple[str, OpRequest]]:
        config = self.config
        yield "post_norm", self._norm(has_residual=True)
        if config.moe_of(layer) is not None:
            yield from feed_forward_sites(self.family, layer)
            return
        yield (
            "gate_up_proj",
            self._gemm(
                layer,
                GATE_UP_TENSORS,
                2 * shard.num_features,
                config.hidden_size,
                bias=config.mlp_bias,
                gated=True,
            ),
        )
        yield (
            "down_proj",
            self._gemm(
                layer,
                (DOWN_TENSOR,),
                config.hidden_size,
                shard.num_features,
                bias=config.mlp_bias and shard.rank == 0,
            ),
        )
        yield from self._all_reduce("down_all_reduce", shard)

    def _all_reduce(self, name: str, shard: Shard) -> Iterator[tuple[str, OpRequest]]:
        if shard.world_size > 1:
            width, dtype = self.config.hidden_size, self.precision.dtype
            yield name, self.family.collective("all_reduce", width, dtype)
