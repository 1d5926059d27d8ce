"""Why a kernel has nothing to be tuned: of each that multiplies its own reason, of the others one.

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

BY_ROWS = (
    "it multiplies nothing by a matrix unit: it reads its rows once, in blocks as wide as they are"
)


def why_fixed(kernel: str) -> str:
    """The reason of a kernel of the catalogue that cannot be tuned. Raises KeyError for one that
    multiplies and has no reason: it is to be tunable, or to be named here."""
    return FIXED[kernel] if CATALOGUE[kernel].uses_matrix_unit else BY_ROWS
