"""The calls of compressed attention (DeepSeek V4, V4.1): a window of own rows, compressed rows.

Keys and values are one row for all heads, kept whole by every rank. The projection of the output
is cut by groups of heads, so that ranks meet once, after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.kv_compressor import KvCompressorRequest
from hal_engine.config_parts import CompressedAttentionConfig, IndexerConfig
from hal_engine.models.index_sites import (
    index_projection_sites,
    index_rotation_sites,
    rope_of_index,
)
from hal_engine.models.site_parts import PHASES, Call, SiteParts

LATENT_TENSORS = ("self_attn.q_a_proj.weight", "self_attn.kv_proj.weight")
QUERY_B_TENSOR = "self_attn.q_b_proj.weight"
OUTPUT_A_TENSOR = "self_attn.o_a_proj.weight"
OUTPUT_B_TENSOR = "self_attn.o_b_proj.weight"
COMPRESSOR_TENSORS = (
    "self_attn.compressor.kv_proj.weight",
    "self_attn.compressor.gate_proj.weight",
)
INDEX_COMPRESSOR_TENSORS = (
    "self_attn.compressor.indexer.kv_proj.weight",
    "self_attn.compressor.indexer.gate_proj.weight",
)
INDEX_KEY_TENSOR = "self_attn.indexer.wk.weight"


def compressed_sites(
    parts: SiteParts, layer: int, attention: CompressedAttentionConfig
) -> Iterator[Call]:
    """From the normed input of a layer to its attention's output, summed over ranks."""
    yield from _query_and_window(parts, layer, attention)
    if attention.compresses(layer):
        yield from _compressor(parts, layer, attention)
    indexer = parts.config.indexer
    if indexer is not None and layer in indexer.layers and parts.limits.attends_sparsely:
        yield from _indexer(parts, layer, attention, indexer)
    for phase in PHASES:
        yield (
            "attention",
            CompressedAttentionRequest(
                phase=phase,
                num_heads=parts.shard.num_heads,
                head_dim=parts.config.head_dim,
                rope_dim=attention.rope_dim,
                window=attention.window,
                top_k=_listed_keys(parts, layer, attention),
                compress_ratio=attention.ratios[layer],
                has_sinks=True,
                window_format=parts.precision.window_format,  # type: ignore[arg-type]
                main_format=parts.precision.kv_format,  # type: ignore[arg-type]
                block_size=parts.limits.block_size,
                dtype=parts.precision.dtype,
                context_tokens=parts.limits.context_tokens,
                tokens=parts.limits.tokens_of(phase),
            ),
        )
    yield from _output(parts, layer, attention)


def _listed_keys(parts: SiteParts, layer: int, attention: CompressedAttentionConfig) -> int:
    """Compressed rows that an indexer lists for a query; 0 where all of them are read."""
    indexer, ratio = parts.config.indexer, attention.ratios[layer]
    if indexer is None or not ratio or not parts.limits.attends_sparsely:
        return 0
    is_listed = layer in indexer.layers or attention.sources[layer] != layer
    return indexer.top_k if is_listed else 0


def _query_and_window(
    parts: SiteParts, layer: int, attention: CompressedAttentionConfig
) -> Iterator[Call]:
    config, heads, dim = parts.config, parts.shard.num_heads, parts.config.head_dim
    first = parts.linear(layer, LATENT_TENSORS, attention.q_lora_rank + dim, config.hidden_size)
    second = parts.linear(layer, (QUERY_B_TENSOR,), heads * dim, attention.q_lora_rank)
    yield from parts.quantize("attention_input_quantize", config.hidden_size, first.weight_format)
    yield "qkv_a_proj", first
    yield "q_a_norm", parts.norm(attention.q_lora_rank)
    yield from parts.quantize("q_a_quantize", attention.q_lora_rank, second.weight_format)
    yield "q_b_proj", second
    yield "kv_norm", parts.norm(dim)
    if attention.has_query_norm:
        yield "q_head_norm", parts.norm(dim, rows=heads)
    yield (
        "rope",
        parts.rope(
            heads,
            dim,
            attention.rope_dim,
            start=dim - attention.rope_dim,
            style="interleaved",
            num_kv_heads=1,
        ),
    )
    yield "window_write", parts.write_rows(dim, parts.precision.window_format)


def _compressor(
    parts: SiteParts, layer: int, attention: CompressedAttentionConfig
) -> Iterator[Call]:
    """Rows of the compressed cache: pooled by a gate, or one a token where the ratio is 1."""
    config, dim, ratio = parts.config, parts.config.head_dim, attention.ratios[layer]
    hidden = config.hidden_size
    if ratio == 1:
        keys = parts.linear(layer, COMPRESSOR_TENSORS[:1], dim, hidden)
        yield "compressor.kv_gate_proj", keys
        yield "compressor.kv_norm", parts.norm(dim)
    else:
        pool = _pool(parts, attention, ratio, dim)
        both = parts.linear(layer, COMPRESSOR_TENSORS, 2 * pool.width, hidden)
        yield "compressor.kv_gate_proj", both
        yield "compressor.pool", pool
    yield (
        "compressor.rope",
        parts.rope(1, dim, attention.rope_dim, start=dim - attention.rope_dim, style="interleaved"),
    )
    yield "compressor.kv_write", parts.write_rows(dim, parts.precision.kv_format)


def _pool(
    parts: SiteParts, attention: CompressedAttentionConfig, ratio: int, dim: int
) -> KvCompressorRequest:
    return KvCompressorRequest(
        ratio=ratio,
        head_dim=dim,
        is_overlapping=ratio in attention.overlapping_ratios,
        dtype=parts.precision.dtype,
        tokens=parts.limits.all_tokens,
    )


def _indexer(
    parts: SiteParts, layer: int, attention: CompressedAttentionConfig, indexer: IndexerConfig
) -> Iterator[Call]:
    """Queries on every indexer; keys only where the layer fills a cache."""
    limits, ratio = parts.limits, attention.ratios[layer]
    if attention.compresses(layer):
        yield from _index_keys(parts, layer, attention, indexer)
    yield from index_projection_sites(parts, layer, indexer)
    yield from index_rotation_sites(parts, indexer, num_keys=0)
    for phase in PHASES:
        yield (
            "indexer.logits",
            IndexLogitsRequest(
                phase=phase,
                num_heads=indexer.num_heads,
                head_dim=indexer.head_dim,
                key_format=parts.precision.index_format,  # type: ignore[arg-type]
                block_size=limits.block_size,
                dtype=parts.precision.index_query_dtype,
                compress_ratio=ratio,
                context_tokens=limits.context_tokens,
                tokens=limits.tokens_of(phase),
            ),
        )
        source = attention.candidate_source
        yield (
            "indexer.top_k",
            IndexTopKRequest(
                phase=phase,
                top_k=indexer.top_k,
                context_tokens=limits.context_tokens,
                compress_ratio=ratio,
                candidate_blocks=(
                    attention.candidate_blocks if source is not None and layer >= source else 0
                ),
                publishes_candidates=layer == source,
                tokens=limits.tokens_of(phase),
            ),
        )


def _index_keys(
    parts: SiteParts, layer: int, attention: CompressedAttentionConfig, indexer: IndexerConfig
) -> Iterator[Call]:
    """V4 compresses index keys beside the main rows; V4.1 projects them from the main rows."""
    config, dim = parts.config, indexer.head_dim
    if config.family == "deepseek_v41":
        weight = parts.linear(layer, (INDEX_KEY_TENSOR,), dim, config.head_dim)
        yield from parts.quantize("indexer.k_quantize", config.head_dim, weight.weight_format)
        yield "indexer.k_proj", weight
        yield "indexer.k_norm", parts.norm(dim)
    else:
        request = _pool(parts, attention, attention.ratios[layer], dim)
        yield (
            "indexer.kv_gate_proj",
            parts.linear(layer, INDEX_COMPRESSOR_TENSORS, 2 * request.width, config.hidden_size),
        )
        yield "indexer.pool", request
    yield "indexer.k_rope", rope_of_index(parts, indexer, 1, 0)
    yield "indexer.kv_write", parts.write_rows(dim, parts.precision.index_format)


def _output(parts: SiteParts, layer: int, attention: CompressedAttentionConfig) -> Iterator[Call]:
    """The rotation undone, a product per group of heads, one over all groups."""
    config, shard = parts.config, parts.shard
    dim, heads = config.head_dim, shard.num_heads
    yield (
        "o_rope",
        parts.rope(
            heads,
            dim,
            attention.rope_dim,
            start=dim - attention.rope_dim,
            style="interleaved",
            is_inverse=True,
        ),
    )
    inputs = config.num_attention_heads // attention.o_groups * dim
    outputs = shard.num_groups * attention.o_lora_rank
    # V4.1's reference keeps this product's activations as they are.
    is_rounded = config.family == "deepseek_v4"
    weight = parts.format_of(layer, (OUTPUT_A_TENSOR,), rounds_activations=is_rounded)
    second = parts.linear(layer, (OUTPUT_B_TENSOR,), config.hidden_size, outputs)
    yield from parts.quantize("o_a_quantize", heads * dim, weight)
    yield "o_a_proj", parts.per_group(shard.num_groups, attention.o_lora_rank, inputs, weight)
    yield from parts.quantize("o_b_quantize", outputs, second.weight_format)
    yield "o_b_proj", second
    yield from parts.all_reduce("o_all_reduce")
