"""The calls that make the queries of an indexer: projections, rotation, rounding."""

from __future__ import annotations

from collections.abc import Iterator

from hal.ops.quantize import QuantizeRequest
from hal.ops.rope import RopeRequest
from hal_engine.config_parts import IndexerConfig
from hal_engine.models.site_parts import Call, SiteParts

QUERY_TENSOR = "self_attn.indexer.wq_b.weight"
QUERY_TENSOR_OF_V4 = "self_attn.compressor.indexer.q_b_proj.weight"
WEIGHTS_TENSOR = "self_attn.indexer.weights_proj.weight"
# The query is rounded like the keys that it meets are, but always to 8 bits.
_QUERY_GROUP = 128


def index_projection_sites(parts: SiteParts, layer: int, indexer: IndexerConfig) -> Iterator[Call]:
    """Queries of all index heads and their weights."""
    mla, compressed = parts.config.mla, parts.config.compressed
    latent = mla.q_lora_rank if mla is not None else compressed.q_lora_rank if compressed else 0
    width = indexer.num_heads * indexer.head_dim
    tensor = QUERY_TENSOR_OF_V4 if parts.config.family == "deepseek_v4" else QUERY_TENSOR
    yield "indexer.q_proj", parts.linear(layer, (tensor,), width, latent)
    yield (
        "indexer.weights_proj",
        parts.linear(
            layer,
            (WEIGHTS_TENSOR,),
            indexer.num_heads,
            parts.config.hidden_size,
            out_dtype="float32",
        ),
    )


def index_rotation_sites(
    parts: SiteParts, indexer: IndexerConfig, *, num_keys: int
) -> Iterator[Call]:
    """Queries of all index heads as they meet the keys. num_keys: key heads rotated in the same
    call; 0 where keys are compressed and have positions of their own."""
    yield "indexer.rope", rope_of_index(parts, indexer, indexer.num_heads, num_keys)
    if parts.precision.index_format != "bf16":
        yield (
            "indexer.q_quantize",
            QuantizeRequest(
                group_size=min(_QUERY_GROUP, indexer.head_dim),
                out_dtype="fp8_e4m3fn",
                scale_dtype="float32",
                width=indexer.num_heads * indexer.head_dim,
                dtype=parts.precision.dtype,
                tokens=parts.limits.all_tokens,
            ),
        )


def rope_of_index(
    parts: SiteParts, indexer: IndexerConfig, heads: int, num_keys: int
) -> RopeRequest:
    """Rotation of index heads: of their first values, or of their last."""
    return parts.rope(
        heads,
        indexer.head_dim,
        indexer.rope_dim,
        start=indexer.head_dim - indexer.rope_dim if indexer.is_rope_last else 0,
        style=indexer.rope_style,
        num_kv_heads=num_keys,
    )
