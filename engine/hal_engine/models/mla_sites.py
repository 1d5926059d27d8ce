"""The calls of latent attention with its indexer (DeepSeek-V3, V3.2, GLM-5), absorbed form.

Queries are multiplied into the latent space and outputs out of it, so that all heads read one
latent row a token. `kv_b_proj` thereby becomes two products per head, which run in the activations'
dtype whatever the checkpoint stores: blocks of scales end inside heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.ops.formats import FORMATS
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal_engine.config_parts import IndexerConfig, MlaConfig
from hal_engine.models.index_sites import index_projection_sites, index_rotation_sites
from hal_engine.models.site_parts import PHASES, Call, SiteParts

QUERY_TENSOR = "self_attn.q_proj.weight"
LATENT_TENSORS = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
QUERY_B_TENSOR = "self_attn.q_b_proj.weight"
OUTPUT_TENSOR = "self_attn.o_proj.weight"
INDEX_KEY_TENSOR = "self_attn.indexer.wk.weight"


def mla_sites(parts: SiteParts, layer: int, mla: MlaConfig) -> Iterator[Call]:
    """From the normed input of a layer to its attention's output, summed over ranks."""
    config, heads = parts.config, parts.shard.num_heads
    indexer = config.indexer if parts.limits.attends_sparsely else None
    has_indexer = indexer is not None and layer in indexer.layers
    yield from _projections(parts, layer, mla, has_indexer=has_indexer)
    yield (
        "q_rope",
        parts.rope(heads, mla.qk_dim, mla.rope_dim, start=mla.nope_dim, style=mla.rope_style),
    )
    yield (
        "k_rope",
        parts.rope(1, mla.row_width, mla.rope_dim, start=mla.kv_lora_rank, style=mla.rope_style),
    )
    yield "kv_write", parts.write_rows(mla.row_width, parts.precision.kv_format)
    if indexer is not None and has_indexer:
        yield from _indexer_sites(parts, layer, indexer)
    absorbed = FORMATS[parts.precision.dtype]
    yield "q_absorb", parts.per_group(heads, mla.kv_lora_rank, mla.nope_dim, absorbed)
    for phase in PHASES:
        yield (
            "attention",
            MlaAttentionRequest(
                phase=phase,
                num_heads=heads,
                kv_lora_rank=mla.kv_lora_rank,
                rope_dim=mla.rope_dim,
                block_size=parts.limits.block_size,
                dtype=parts.precision.dtype,
                kv_format=parts.precision.kv_format,  # type: ignore[arg-type]
                top_k=0 if indexer is None else indexer.top_k,
                context_tokens=parts.limits.context_tokens,
                tokens=parts.limits.tokens_of(phase),
            ),
        )
    yield "v_absorb", parts.per_group(heads, mla.v_dim, mla.kv_lora_rank, absorbed)
    output = parts.linear(
        layer,
        (OUTPUT_TENSOR,),
        config.hidden_size,
        heads * mla.v_dim,
        has_bias=config.output_bias and parts.shard.rank == 0,
    )
    yield from parts.quantize("o_quantize", heads * mla.v_dim, output.weight_format)
    yield "o_proj", output
    yield from parts.all_reduce("o_all_reduce")


def _projections(
    parts: SiteParts, layer: int, mla: MlaConfig, *, has_indexer: bool
) -> Iterator[Call]:
    """Query and latent; without a query latent the query is projected at once."""
    config, heads = parts.config, parts.shard.num_heads
    queries = heads * mla.qk_dim
    tensors = LATENT_TENSORS if mla.q_lora_rank else (QUERY_TENSOR, LATENT_TENSORS[1])
    first = parts.linear(
        layer,
        tensors,
        (mla.q_lora_rank or queries) + mla.row_width,
        config.hidden_size,
        has_bias=config.qkv_bias,
    )
    keys = [parts.format_of(layer, [INDEX_KEY_TENSOR])] if has_indexer else []
    yield from parts.quantize(
        "attention_input_quantize", config.hidden_size, first.weight_format, *keys
    )
    yield "qkv_a_proj", first
    if mla.q_lora_rank:
        yield "q_a_norm", parts.norm(mla.q_lora_rank)
        second = parts.linear(layer, (QUERY_B_TENSOR,), queries, mla.q_lora_rank)
        yield from parts.quantize("q_a_quantize", mla.q_lora_rank, second.weight_format)
        yield "q_b_proj", second
    # What is done to the row that is kept stands together: one kernel may do it.
    yield "kv_a_norm", parts.norm(mla.kv_lora_rank)


def _indexer_sites(parts: SiteParts, layer: int, indexer: IndexerConfig) -> Iterator[Call]:
    """Keys from the layer's input, one a token; every rank chooses the same keys."""
    precision, limits = parts.precision, parts.limits
    yield (
        "indexer.k_proj",
        parts.linear(layer, (INDEX_KEY_TENSOR,), indexer.head_dim, parts.config.hidden_size),
    )
    yield from index_projection_sites(parts, layer, indexer)
    # What is done to the row that is kept stands together: one kernel may do it.
    yield (
        "indexer.k_norm",
        LayerNormRequest(
            hidden_size=indexer.head_dim,
            has_bias=True,
            dtype=precision.dtype,
            tokens=limits.all_tokens,
        ),
    )
    yield from index_rotation_sites(parts, indexer, num_keys=1)
    yield "indexer.kv_write", parts.write_rows(indexer.head_dim, precision.index_format)
    for phase in PHASES:
        yield (
            "indexer.logits",
            IndexLogitsRequest(
                phase=phase,
                num_heads=indexer.num_heads,
                head_dim=indexer.head_dim,
                key_format=precision.index_format,  # type: ignore[arg-type]
                block_size=limits.block_size,
                dtype=precision.index_query_dtype,
                context_tokens=limits.context_tokens,
                tokens=limits.tokens_of(phase),
            ),
        )
        yield (
            "indexer.top_k",
            IndexTopKRequest(
                phase=phase,
                top_k=indexer.top_k,
                context_tokens=limits.context_tokens,
                tokens=limits.tokens_of(phase),
            ),
        )
