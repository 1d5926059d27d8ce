"""The call sites of a decoder: every op that a step will call, as requests, from the config alone.

The names here and the bindings in `decoder.py` are the two halves of one contract; a plan with a
site that nothing binds, or the other way round, is an error when the model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hal.ops.attention import AttentionRequest
from hal.ops.collective import CollectiveRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import DTYPE_BYTES
from hal.ops.gemm import GemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, Phase, TokenRange
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal.plan import OpSite, group_sites
from hal_engine.config import ModelConfig
from hal_engine.precision import Precision
from hal_engine.shards import Shard, shard_model

_LAYER = "model.layers.{}"
QKV_TENSORS = tuple(f"self_attn.{n}_proj.weight" for n in "qkv")
GATE_UP_TENSORS = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
OUTPUT_TENSOR = "self_attn.o_proj.weight"
DOWN_TENSOR = "mlp.down_proj.weight"
EMBED_TENSOR = "model.embed_tokens.weight"
HEAD_TENSOR = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The sizes of a step that requests depend on. context_tokens: what estimates assume."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    context_tokens: int = 1024


def head_tensor(config: ModelConfig) -> str:
    return EMBED_TENSOR if config.tie_word_embeddings else HEAD_TENSOR


def kv_bytes_per_token(config: ModelConfig, precision: Precision) -> int:
    """Bytes that one token's keys and values take over all layers and ranks."""
    row = 2 * config.num_key_value_heads * config.head_dim
    return config.num_layers * row * DTYPE_BYTES[precision.kv_dtype]


def model_sites(
    config: ModelConfig, precision: Precision, limits: StepLimits, world_size: int = 1
) -> list[OpSite]:
    """All call sites of all ranks. Raises PlanError if the ranks cannot share the model."""
    sites = _Sites(config, precision, limits)
    shards = [shard_model(config, rank, world_size) for rank in range(world_size)]
    return group_sites(
        (pattern, layer, shard.rank, request)
        for shard in shards
        for pattern, layer, request in sites.of_rank(shard)
    )


@dataclass(frozen=True, slots=True)
class _Sites:
    config: ModelConfig
    precision: Precision
    limits: StepLimits

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
        yield from self._head(shard)
        if shard.rank == 0:
            yield (
                "sampler.top_k_top_p",
                None,
                TopKTopPRequest(
                    vocab_size=self.config.vocab_size,
                    tokens=TokenRange(1, self.limits.max_num_seqs),
                ),
            )

    @property
    def _all_tokens(self) -> TokenRange:
        return TokenRange(1, self.limits.max_num_batched_tokens)

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
        most = self.limits.max_num_seqs if phase == "decode" else self.limits.max_num_batched_tokens
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
            tokens=TokenRange(1, most),
        )

    def _feed_forward(self, shard: Shard, layer: int) -> Iterator[tuple[str, OpRequest]]:
        config = self.config
        yield "post_norm", self._norm(has_residual=True)
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
            yield name, self._collective("all_reduce", shard, self.config.hidden_size)

    def _collective(self, kind: str, shard: Shard, width: int) -> CollectiveRequest:
        reduces = kind == "all_reduce"
        return CollectiveRequest(
            kind="all_reduce" if reduces else "all_gather",
            world_size=shard.world_size,
            width=width,
            dtype=self.precision.dtype if reduces else "float32",
            tokens=self._all_tokens,
        )

    def _head(self, shard: Shard) -> Iterator[tuple[str, int | None, OpRequest]]:
        yield (
            "lm_head",
            None,
            GemmRequest(
                n=shard.vocab_rows,
                k=self.config.hidden_size,
                dtype=self.precision.dtype,
                out_dtype="float32",
                weight_format=self.precision.weight_format(self.config, [head_tensor(self.config)]),
                tokens=self._all_tokens,
            ),
        )
        if shard.world_size > 1:
            yield (
                "lm_head_all_gather",
                None,
                self._collective("all_gather", shard, shard.vocab_rows),
            )
