"""Every Triton kernel. A new one is a declaration beside its code and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal.errors import SettingsError
from hal.suggestions import did_you_mean
from hal_kernels.activation import triton_variants as activation
from hal_kernels.aot.variant import TritonKernel
from hal_kernels.attention import triton_variants as attention
from hal_kernels.attention_projection import triton_variants as attention_projection
from hal_kernels.block_sparse_attention import triton_variants as block_sparse_attention
from hal_kernels.collective import triton_variants as collective
from hal_kernels.compressed_attention import triton_variants as compressed_attention
from hal_kernels.embedding import triton_variants as embedding
from hal_kernels.engram import triton_variants as engram
from hal_kernels.fused_gemm import triton_variants as fused_gemm
from hal_kernels.gemm import split_k_variants as gemm_split_k
from hal_kernels.gemm import stream_k_variants as gemm_stream_k
from hal_kernels.gemm import triton_variants as gemm
from hal_kernels.gemm import weight_only_variants as gemm_weight_only
from hal_kernels.gemm import widened_variants as gemm_widened
from hal_kernels.grouped_gemm import integer_variants as grouped_gemm_integer
from hal_kernels.grouped_gemm import round_variants as grouped_gemm_round
from hal_kernels.grouped_gemm import split_k_variants as grouped_gemm_split_k
from hal_kernels.grouped_gemm import triton_variants as grouped_gemm
from hal_kernels.grouped_gemm import weight_only_variants as grouped_gemm_weight_only
from hal_kernels.grouped_gemm import widened_variants as grouped_gemm_widened
from hal_kernels.hyper_connection import triton_variants as hyper_connection
from hal_kernels.index_logits import triton_variants as index_logits
from hal_kernels.index_selection import triton_variants as index_selection
from hal_kernels.index_top_k import triton_variants as index_top_k
from hal_kernels.kv_compressor import triton_variants as kv_compressor
from hal_kernels.kv_write import triton_variants as kv_write
from hal_kernels.latent_kv_write import triton_variants as latent_kv_write
from hal_kernels.layer_norm import triton_variants as layer_norm
from hal_kernels.mla_attention import triton_variants as mla_attention
from hal_kernels.moe_dispatch import triton_variants as moe_dispatch
from hal_kernels.moe_router import triton_variants as moe_router
from hal_kernels.norm import triton_variants as norm
from hal_kernels.norm_quantize import triton_variants as norm_quantize
from hal_kernels.nsa_attention import triton_variants as nsa_attention
from hal_kernels.nsa_compress import triton_variants as nsa_compress
from hal_kernels.quantize import triton_variants as quantize
from hal_kernels.rope import triton_variants as rope
from hal_kernels.rope_kv_write import triton_variants as rope_kv_write
from hal_kernels.sampling import triton_variants as sampling

_KERNELS: tuple[TritonKernel, ...] = (
    *activation.KERNELS,
    *attention.KERNELS,
    *attention_projection.KERNELS,
    *block_sparse_attention.KERNELS,
    *collective.KERNELS,
    *compressed_attention.KERNELS,
    *embedding.KERNELS,
    *engram.KERNELS,
    *fused_gemm.KERNELS,
    *gemm.KERNELS,
    *gemm_split_k.KERNELS,
    *gemm_stream_k.KERNELS,
    *gemm_weight_only.KERNELS,
    *gemm_widened.KERNELS,
    *grouped_gemm.KERNELS,
    *grouped_gemm_split_k.KERNELS,
    *grouped_gemm_integer.KERNELS,
    *grouped_gemm_round.KERNELS,
    *grouped_gemm_weight_only.KERNELS,
    *grouped_gemm_widened.KERNELS,
    *hyper_connection.KERNELS,
    *index_logits.KERNELS,
    *index_selection.KERNELS,
    *index_top_k.KERNELS,
    *kv_compressor.KERNELS,
    *kv_write.KERNELS,
    *latent_kv_write.KERNELS,
    *layer_norm.KERNELS,
    *mla_attention.KERNELS,
    *moe_dispatch.KERNELS,
    *moe_router.KERNELS,
    *norm.KERNELS,
    *norm_quantize.KERNELS,
    *nsa_attention.KERNELS,
    *nsa_compress.KERNELS,
    *quantize.KERNELS,
    *rope.KERNELS,
    *rope_kv_write.KERNELS,
    *sampling.KERNELS,
)

CATALOGUE: Mapping[str, TritonKernel] = MappingProxyType({k.name: k for k in _KERNELS})


def find_kernel(name: str) -> TritonKernel:
    """Raises SettingsError if there is no kernel of that name."""
    if name not in CATALOGUE:
        raise SettingsError(
            "kernel", "a kernel of the catalogue", repr(name), did_you_mean(name, CATALOGUE)
        )
    return CATALOGUE[name]
