"""The parts a model's configuration may have beyond dense attention and one feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]
RopeStyle = Literal["half_split", "interleaved"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Frequencies are over the part of the head that is rotated.

    `factor` stretches positions (linear, dynamic, llama3, yarn). For llama3 and yarn the original
    context is `original_max_position_embeddings`; for yarn `attention_factor` multiplies cos and
    sin and is resolved here (https://arxiv.org/abs/2309.00071).
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0 where the type does not use it
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434): sizes in elements.

    A head's query and key are `nope_dim` values without position and `rope_dim` rotated ones; keys
    and values of all heads are read from one latent of `kv_lora_rank` beside one rotated key.
    q_lora_rank: 0 where the query is projected directly.
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope_style: RopeStyle = "interleaved"

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def row_width(self) -> int:
        """Values that one token leaves in the cache."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The indexer of sparse attention: which keys a query attends to.

    layers: those that run it; the others take the choice of the last one before them. The first
    `rope_dim` values of a head are rotated, or the last ones where `is_rope_last`.
    """

    num_heads: int
    head_dim: int
    top_k: int
    rope_dim: int
    layers: tuple[int, ...]
    rope_style: RopeStyle = "half_split"
    is_rope_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A mixture of experts with routing per token.

    layers: those with experts; the others are dense. hash_layers: those of them whose experts a
    table gives by token id. num_groups: of experts, of which `num_groups_picked` take part.
    shared_intermediate_size: of the experts that see every token together; 0 without.
    activation_clamp: cap of the gated activation, 0 without.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: tuple[int, ...]
    scoring: Scoring
    shared_intermediate_size: int = 0
    hash_layers: tuple[int, ...] = ()
    has_bias: bool = False
    num_groups: int = 1
    num_groups_picked: int = 1
    normalizes: bool = True
    route_scale: float = 1.0
    activation_clamp: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionConfig:
    """Attention over a window of own keys and a cache of compressed ones (DeepSeek V4, V4.1).

    Keys and values are the same row of `head_dim` values, one for all heads, of which the last
    `rope_dim` are rotated. ratios[i]: tokens per compressed row of the cache that layer i reads; 0
    where it reads only its window. sources[i]: the layer that fills that cache, i itself where it
    compresses its own. is_overlapping: of a ratio, whether two neighbouring windows share a row.
    The output is projected per group of heads, `o_groups` times to `o_lora_rank`.
    """

    q_lora_rank: int
    rope_dim: int
    window: int
    ratios: tuple[int, ...]
    sources: tuple[int, ...]
    o_groups: int
    o_lora_rank: int
    compress_rope: RopeConfig  # of layers that read a compressed cache
    overlapping_ratios: tuple[int, ...] = ()
    has_query_norm: bool = False
    candidate_source: int | None = None  # the layer whose blocks restrict later indexers
    candidate_blocks: int = 0
    candidate_block_size: int = 1

    def compresses(self, layer: int) -> bool:
        """Whether the layer fills a compressed cache itself."""
        return self.ratios[layer] > 0 and self.sources[layer] == layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: `num_streams` residual streams instead of one.

    is_lagged: a sublayer reads the streams by the weights of the sublayer before it, and no learnt
    head collapses them at the end.
    """

    num_streams: int
    sinkhorn_iterations: int
    eps: float
    is_lagged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """Tables of n-gram embeddings read before some layers. rows[i]: of the table of layers[i]."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    num_heads: int
    max_ngram: int
    row_width: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def rows_per_token(self) -> int:
        """Table rows that one token reads: one a head for n = 2 … max_ngram."""
        return (self.max_ngram - 1) * self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How a quantised checkpoint stores its weights: FP8 in square blocks, experts maybe in MXFP4.

    block_size: rows and columns that share a scale. has_fp4_experts: routed experts as MXFP4, 32
    values a scale. kept_modules: modules that stay as they are, by the whole words of their names.
    """

    block_size: int
    scale_dtype: Literal["float32", "ue8m0"]
    has_fp4_experts: bool = False
    kept_modules: tuple[str, ...] = ()

    @property
    def dense_format(self) -> str:
        """A name of hal.ops.formats, without what happens to the activations."""
        return f"fp8_block{self.block_size}" + ("_ue8m0" if self.scale_dtype == "ue8m0" else "")

    def stored_format(self, tensor_name: str) -> str | None:
        """The format of a tensor, None for one that the checkpoint does not quantise."""
        if any(part in tensor_name for part in NEVER_QUANTIZED):
            return None
        if any(f".{module}." in f".{tensor_name}." for module in self.kept_modules):
            return None
        if self.has_fp4_experts and ".mlp.experts." in tensor_name:
            return "mxfp4"
        return self.dense_format


# Parts of the names of tensors that no released FP8 checkpoint of these families quantises.
NEVER_QUANTIZED = (
    "embed_tokens",
    "lm_head",
    "norm",
    ".mlp.gate.",
    "weights_proj",
    "compressor.kv_proj",
    "compressor.gate_proj",
    "indexer.kv_proj",
    "indexer.gate_proj",
    "_hc.",
    "hc_head",
)
