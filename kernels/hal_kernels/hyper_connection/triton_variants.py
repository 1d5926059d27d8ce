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
STREAMS = (4, 8)  # that are compiled; fewer have less of everything

_MOST_MIXES = 64  # whose sums 128 threads hold
_SPILL_OF_256 = ("sm_100", "sm_103")
_OF_64_WARPS = ("sm_80", "sm_90", "sm_100", "sm_103")
_MODULE = "hal_kernels.hyper_connection.triton_kernels"


def judged_streams(num_streams: int) -> int:
    """Whose machine code speaks for so many streams. Raises StopIteration beyond those."""
    return next(n for n in STREAMS if num_streams <= n)


def mixes_width(mixes: int) -> int:
    """Columns of the partial sums: of the mixes and the sum of squares, at least a matrix tile."""
    return max(16, 1 << mixes.bit_length())


def expand_launch(dtype: str, arch: str, warp_size: int) -> dict[str, Any]:
    """Of a program of the streams after a sublayer: 128 threads of 16 bytes a stream each. Four
    streams of eight columns kept take 64 registers, which let 32 warps in. Where a multiprocessor
    holds 64, 40 to 64 are resident if none is kept, and its cache holds what they read: 120 KiB
    of 192 and more, where 48 are."""
    columns = 16 // (4 if dtype == "float32" else 2)
    return {
        "BLOCK_D": 128 * columns,
        "RELOADS": arch in _OF_64_WARPS,
        "num_warps": 128 // warp_size,
    }


def collapse_warps(warp_size: int) -> int:
    """128 threads, of which each has all streams of eight columns: what is summed over streams then
    stays in a thread."""
    return 128 // warp_size


def mixes_constants(dtype: str, mixes: int) -> dict[str, Any]:
    """Of the projection. Terms beside the first take registers, and so do the columns of eight
    streams' mixes: their tile is narrower."""
    return {
        "BLOCK_T": BLOCK_T,
        "BLOCK_C": 64 if dtype == "bfloat16" and mixes_width(mixes) <= _MOST_MIXES else 32,
        "BLOCK_W": mixes_width(mixes),
        "S": PARTS,
        "TERMS": TERMS[dtype],
    }


def mixes_warps(dtype: str, mixes: int, arch: str, warp_size: int) -> int:
    """Of the projection: a step of the narrower tile reads 2 KiB of weights, 16 bytes for each of
    128 threads. Twice as many share the sums of eight streams' mixes, whose registers are too many
    for 128; but for those of float32 on the data-center Blackwells, where 128 have enough and of
    256 the compiler saves registers until some spill."""
    if mixes_width(mixes) > _MOST_MIXES and not (dtype == "float32" and arch in _SPILL_OF_256):
        return 256 // warp_size
    return 4 if dtype == "bfloat16" else 128 // warp_size


def _mixes(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="bfloat16",
            config=f"n{n}-{dtype}",
            pointers={
                "streams_TC_ptr": dtype,
                "terms_PWC_ptr": "bfloat16",
                "partial_TSW_ptr": "float32",
            },
            scalars=dict.fromkeys(("stride_streams", "T", "C", "W"), "i32"),
            divisible=frozenset({"stride_streams", "C"}),
            constants=mixes_constants(dtype, n * (2 + n)),
            num_warps=mixes_warps(dtype, n * (2 + n), target.arch, target.warp_size),
        )
        for n in STREAMS
        for dtype in TERMS
    )


def _collapse(target: Target) -> Sequence[KernelVariant]:
    rows = ("streams_TC_ptr", "x_TD_ptr")
    weights = ("partial_TSW_ptr", "base_W_ptr", "scale_ptr", "previous_TN_ptr", "pre_TN_ptr")
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"n{n}{form}",
            pointers={
                **dict.fromkeys(rows, dtype),
                **dict.fromkeys((*weights, "post_TN_ptr", "comb_TNN_ptr"), "float32"),
            },
            scalars={"stride_streams": "i32", "D": "i32", "norm_eps": "fp32", "eps": "fp32"},
            divisible=frozenset({"stride_streams", "D"}),
            constants={
                "N": n,
                "W": n * (2 + n),
                "BLOCK_W": mixes_width(n * (2 + n)),
                "S": PARTS,
                "ITERATIONS": 20,
                "BLOCK_D": BLOCK_D,
                "SOURCE": source,
            },
            num_warps=collapse_warps(target.warp_size),
        )
        for n in STREAMS
        for dtype in TERMS
        for form, source in (("", 0), ("-lagged", 1))
    )


def _expand(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"n{n}",
            pointers={
                **dict.fromkeys(("y_TD_ptr", "streams_TC_ptr", "out_TC_ptr"), dtype),
                **dict.fromkeys(("post_TN_ptr", "comb_TNN_ptr"), "float32"),
            },
            scalars=dict.fromkeys(("stride_y", "stride_streams", "D"), "i32"),
            divisible=frozenset({"stride_y", "stride_streams", "D"}),
            constants={"N": n, "BLOCK_D": launch["BLOCK_D"], "RELOADS": launch["RELOADS"]},
            num_warps=launch["num_warps"],
        )
        for n in STREAMS
        for dtype in TERMS
        for launch in (expand_launch(dtype, target.arch, target.warp_size),)
    )


KERNELS = tuple(
    TritonKernel(
        name=f"hyper_connection.{name}", op="hyper_connection", module=_MODULE,
        function=f"_hyper_connection_{name}_kernel", variants=variants,
        uses_matrix_unit=name == "mixes",
    )
    for name, variants in (("mixes", _mixes), ("collapse", _collapse), ("expand", _expand))
)  # fmt: skip
