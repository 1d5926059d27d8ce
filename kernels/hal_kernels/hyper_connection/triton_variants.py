"""The specialisations of the Triton hyper-connections that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

PARTS = 16  # that a token's columns are summed in: enough programs for a decode
BLOCK_D = 1024
# bfloat16 terms that hold a value of the dtype.
TERMS: Mapping[str, int] = MappingProxyType({"bfloat16": 1, "float16": 2, "float32": 3})
BLOCK_T = 16

_MODULE = "hal_kernels.hyper_connection.triton_kernels"


def mixes_width(mixes: int) -> int:
    """Columns of the partial sums: of the mixes and the sum of squares, at least a matrix tile."""
    return max(16, 1 << mixes.bit_length())


def mixes_constants(dtype: str, mixes: int) -> dict[str, Any]:
    """Of the projection. Terms beside the first take registers: their tile is narrower."""
    return {
        "BLOCK_T": BLOCK_T,
        "BLOCK_C": 64 if dtype == "bfloat16" else 32,
        "BLOCK_W": mixes_width(mixes),
        "S": PARTS,
        "TERMS": TERMS[dtype],
    }


def _mixes(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="bfloat16",
            config=dtype,
            pointers={
                "streams_TC_ptr": dtype,
                "terms_PWC_ptr": "bfloat16",
                "partial_TSW_ptr": "float32",
            },
            scalars=dict.fromkeys(("stride_streams", "T", "C", "W"), "i32"),
            divisible=frozenset({"stride_streams", "C"}),
            constants=mixes_constants(dtype, 24),
        )
        for dtype in TERMS
    )


def _collapse(target: Target) -> Sequence[KernelVariant]:
    rows = ("streams_TC_ptr", "x_TD_ptr")
    weights = ("partial_TSW_ptr", "base_W_ptr", "scale_ptr", "previous_TN_ptr", "pre_TN_ptr")
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=config,
            pointers={
                **dict.fromkeys(rows, dtype),
                **dict.fromkeys((*weights, "post_TN_ptr", "comb_TNN_ptr"), "float32"),
            },
            scalars={"stride_streams": "i32", "D": "i32", "norm_eps": "fp32", "eps": "fp32"},
            divisible=frozenset({"stride_streams", "D"}),
            constants={
                "N": 4,
                "W": 24,
                "BLOCK_W": 32,
                "S": PARTS,
                "ITERATIONS": 20,
                "BLOCK_D": BLOCK_D,
                "SOURCE": source,
            },
        )
        for dtype in TERMS
        for config, source in (("n4", 0), ("n4-lagged", 1))
    )


def _expand(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config="n4",
            pointers={
                **dict.fromkeys(("y_TD_ptr", "streams_TC_ptr", "out_TC_ptr"), dtype),
                **dict.fromkeys(("post_TN_ptr", "comb_TNN_ptr"), "float32"),
            },
            scalars=dict.fromkeys(("stride_y", "stride_streams", "D"), "i32"),
            divisible=frozenset({"stride_y", "stride_streams", "D"}),
            constants={"N": 4, "BLOCK_D": BLOCK_D},
        )
        for dtype in TERMS
    )


KERNELS = tuple(
    TritonKernel(
        name=f"hyper_connection.{name}", op="hyper_connection", module=_MODULE,
        function=f"_hyper_connection_{name}_kernel", variants=variants,
        uses_matrix_unit=name == "mixes",
    )
    for name, variants in (("mixes", _mixes), ("collapse", _collapse), ("expand", _expand))
)  # fmt: skip
