"""The op catalogue: one file per op family. A new family is a new file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal.ops import (
    activation,
    attention,
    attention_projection,
    batched_gemm,
    block_sparse_attention,
    collective,
    collective_norm,
    compressed_attention,
    dense_attention,
    embedding,
    engram,
    fused_gemm,
    gemm,
    gemm_norm,
    hyper_connection,
    index_logits,
    index_selection,
    index_top_k,
    kv_compressor,
    kv_write,
    latent_kv_write,
    layer_norm,
    mla_attention,
    moe_dispatch,
    moe_router,
    norm,
    norm_quantize,
    nsa_attention,
    nsa_compress,
    quantize,
    rope,
    rope_kv_write,
    sampling,
)
from hal.ops.request import OpFamily, OpRequest, Phase, TokenRange, Tolerance

_FAMILIES: tuple[OpFamily, ...] = (
    attention.FAMILY,
    attention_projection.FAMILY,
    mla_attention.FAMILY,
    compressed_attention.FAMILY,
    dense_attention.FAMILY,
    block_sparse_attention.FAMILY,
    nsa_attention.FAMILY,
    nsa_compress.FAMILY,
    index_logits.FAMILY,
    index_top_k.FAMILY,
    index_selection.FAMILY,
    kv_compressor.FAMILY,
    gemm.FAMILY,
    fused_gemm.FAMILY,
    gemm_norm.FAMILY,
    gemm.GROUPED_FAMILY,
    batched_gemm.FAMILY,
    moe_router.FAMILY,
    moe_dispatch.FAMILY,
    norm.FAMILY,
    norm_quantize.FAMILY,
    layer_norm.FAMILY,
    hyper_connection.FAMILY,
    engram.FAMILY,
    quantize.FAMILY,
    rope.FAMILY,
    activation.FAMILY,
    embedding.FAMILY,
    kv_write.FAMILY,
    rope_kv_write.FAMILY,
    latent_kv_write.FAMILY,
    sampling.FAMILY,
    collective.FAMILY,
    collective_norm.FAMILY,
)

CATALOGUE: Mapping[str, OpFamily] = MappingProxyType({f.name: f for f in _FAMILIES})

__all__ = ["CATALOGUE", "OpFamily", "OpRequest", "Phase", "TokenRange", "Tolerance"]
