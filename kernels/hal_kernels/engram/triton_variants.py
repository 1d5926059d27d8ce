"""The specialisations of the Triton Engram that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

BLOCK_D = 1024
_HEADS_AND_WIDTHS = ((8, 256), (16, 512))  # of the rows of a token, that are compiled
_STREAMS = (4, 8)
MAX_VALUES = _HEADS_AND_WIDTHS[-1][0] * _HEADS_AND_WIDTHS[-1][1]  # of a token, in registers
MAX_STREAMS = _STREAMS[-1]


def gathered_values(heads: int, width: int) -> int:
    """That a program of the gather has: rows and their number are padded to powers of two."""
    return (1 << (heads - 1).bit_length()) * (1 << (width - 1).bit_length())


def gather_config(heads: int, width: int) -> str:
    """The form that a gather is judged by: with as many values or more."""
    values = gathered_values(heads, width)
    h, w = next((h, w) for h, w in _HEADS_AND_WIDTHS if h * w >= values)
    return f"h{h}-w{w}"


def mix_config(streams: int) -> str:
    """The form that a mix is judged by: of as many streams or more, which are factors of addresses
    and nothing else."""
    return f"n{next(n for n in _STREAMS if n >= streams)}"


def mix_warps(dtype: str, warp_size: int) -> int:
    """Values of 16 bits come in 16 bytes for each of 128 threads."""
    return 4 if dtype == "float32" else 128 // warp_size


def _gather(target: Target) -> Sequence[KernelVariant]:
    integers = ("ids_TS_ptr", "multipliers_S_ptr", "primes_GH_ptr", "offsets_GH_ptr")
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"h{heads}-w{width}",
            pointers={
                **dict.fromkeys(integers, "int64"),
                "table_RB_ptr": "uint8",
                "y_ptr": dtype,
            },
            scalars={"R": "i32"},
            constants={
                "S": 4,
                "H": heads,
                "BLOCK_H": heads,
                "WIDTH": width,
                "BLOCK_W": width,
            },
        )
        for dtype in ACTIVATION_DTYPES
        for heads, width in _HEADS_AND_WIDTHS
    )


def _mix(target: Target) -> Sequence[KernelVariant]:
    rows = ("streams_TND_ptr", "kv_TMD_ptr", "out_TND_ptr")
    weights = ("query_weight_ND_ptr", "key_weight_ND_ptr")
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"n{streams}",
            pointers=dict.fromkeys((*rows, *weights), dtype),
            scalars={
                **dict.fromkeys(("stride_streams", "stride_kv", "D"), "i32"),
                **dict.fromkeys(("root", "eps"), "fp32"),
            },
            divisible=frozenset({"stride_streams", "stride_kv", "D"}),
            constants={"N": streams, "BLOCK_D": BLOCK_D},
            num_warps=mix_warps(dtype, target.warp_size),
        )
        for dtype in ACTIVATION_DTYPES
        for streams in _STREAMS
    )


KERNELS = tuple(
    TritonKernel(
        name=f"engram.{name}", op="engram", module="hal_kernels.engram.triton_kernels",
        function=f"_engram_{name}_kernel", variants=variants, uses_matrix_unit=False,
    )
    for name, variants in (("gather", _gather), ("mix", _mix))
)  # fmt: skip
