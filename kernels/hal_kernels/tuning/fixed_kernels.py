"""Why a kernel has nothing to be tuned: of each that multiplies its own reason, of the others
one for those that read in tiles, one for those that add up parts, one for the rest.

Free of torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal_kernels.aot.catalogue import CATALOGUE

_BY_ROUNDING = (
    "it has the tiles of the product alone: those of a rounded result are whole groups of scales "
    "wide, so what is tuned for the product need not fit"
)
_BY_EVIDENCE = "one configuration for each architecture, from its machine code; no other is tried"
FIXED: Mapping[str, str] = MappingProxyType(
    {
        "attention_projection.merge": _BY_EVIDENCE,
        "attention_projection.one_pass": _BY_EVIDENCE,
        "fused_gemm.dense": _BY_ROUNDING,
        "fused_gemm.fp8_block": _BY_ROUNDING,
        "fused_gemm.fp8_weight_only": _BY_ROUNDING,
        "fused_gemm.fp8_widened": _BY_ROUNDING,
        "fused_gemm.mxfp8": _BY_ROUNDING,
        "fused_gemm.weight_only": _BY_ROUNDING,
        "gemm.stream_k": "it shares out the tiles of gemm.dense, wide or square by the bytes that "
        "they ask for; a configuration that is kept for gemm.dense takes its place",
        "grouped_gemm.integer": _BY_EVIDENCE,
        "grouped_gemm.split_k": "it has the tiles of the whole product of few rows; what is tuned "
        "of that holds from the rows on that K is whole",
        "grouped_gemm.weight_only": _BY_EVIDENCE,
        "hyper_connection.mixes": _BY_EVIDENCE,
        "nsa_attention.select": _BY_EVIDENCE,
        "nsa_compress.hidden": _BY_EVIDENCE,
        "nsa_compress.project": _BY_EVIDENCE,
    }
)
"""Kernel that ends in matrix instructions -> why nothing of it is chosen by a tuning."""

_NO_UNIT = "it multiplies nothing by a matrix unit: "
BY_SIZES = (
    f"{_NO_UNIT}its blocks follow from the sizes of what it reads and writes, or are constants of "
    "the kernel; no others are tried"
)
BY_TILES = (
    f"{_NO_UNIT}it goes through rows, heads or lists tile by tile; the width of one follows from "
    "their sizes or is a constant of the kernel, and no other is tried"
)
BY_PARTS = (
    f"{_NO_UNIT}it adds up parts, as many as the kernel before it has stored, in blocks that "
    "follow from that kernel's tiles or from the width of the result; no others are tried"
)
_TILED = frozenset(
    {
        "collective.all_reduce_norm_looped",
        "engram.mix",
        "hyper_connection.collapse",
        "index_selection.mark",
        "index_selection.merge",
        "index_top_k.radix",
        "kv_compressor.pool",
        "layer_norm.looped",
        "moe_dispatch.places",
        "norm.rms_looped",
        "norm_quantize.looped",
        "quantize.looped",
        "rope.rotate",
        "sampling.top_k_top_p",
    }
)
_OF_PARTS = frozenset(
    {
        "attention.merge",
        "attention_projection.sum",
        "compressed_attention.merge",
        "fused_gemm.split_k_sum",
        "gemm.split_k_sum",
        "gemm.stream_k_fix_up",
        "grouped_gemm.split_k_sum",
        "mla_attention.merge",
        "nsa_attention.merge",
    }
)


def why_fixed(kernel: str) -> str:
    """The reason of a kernel of the catalogue that cannot be tuned. Raises KeyError for one that
    multiplies and has no reason: it is to be tunable, or to be named here."""
    if CATALOGUE[kernel].uses_matrix_unit:
        return FIXED[kernel]
    if kernel in _TILED:
        return BY_TILES
    return BY_PARTS if kernel in _OF_PARTS else BY_SIZES
