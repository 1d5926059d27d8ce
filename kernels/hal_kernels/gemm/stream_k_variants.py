"""The specialisations of the Stream-K products that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import DENSE_KINDS, SOURCES, configurations

_MODULE = "hal_kernels.gemm.stream_k_kernels"
_SOURCES = ("hal_kernels.gemm.triton_kernels", *SOURCES)
FIX_UP_ROWS = 16  # rows of a tile that one program sums
# Programs of a multiprocessor (compute unit) that the wave model counts on, by size of the tiles:
# the small ones leave room for a second one everywhere, see the evidence.
PROGRAMS_PER_UNIT: Mapping[str, int] = MappingProxyType({"large": 1, "small": 2})
# Where the small tiles of a gated product would spill with the warps of the whole ones.
_MORE_WARPS = frozenset({"sm_90", "sm_120"})
_STRIDES = ("stride_xm", "stride_wn", "stride_ym")


def tiles_of(target: Target, table: str, size: str) -> dict[str, int]:
    """Tile sizes and launch options: those of the same product in whole tiles."""
    whole = configurations(table, target)[size]
    tiles = {name: value for name, value in whole.items() if name != "SPLIT_K"}
    if (table, size) == ("gemm_gated", "small") and target.arch in _MORE_WARPS:
        tiles["num_warps"] = 8
    return tiles


def _products(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for dtype in ("bfloat16", "float16"):
        for table, suffix, epilogue, has_bias in DENSE_KINDS:
            for size in PROGRAMS_PER_UNIT:
                constants = tiles_of(target, table, size)
                warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
                pointers = dict.fromkeys(("x_MK_ptr", "w_NK_ptr", "bias_N_ptr", "y_MN_ptr"), dtype)
                variants.append(
                    KernelVariant(
                        dtype=dtype,
                        config=size + suffix,
                        pointers={**pointers, "part_P_ptr": "float32"},
                        scalars=dict.fromkeys(("M", "N", "K", *_STRIDES), "i32"),
                        divisible=frozenset({"N", "K", *_STRIDES}),
                        constants={**constants, "HAS_BIAS": has_bias, "EPILOGUE": epilogue},
                        num_warps=warps,
                        num_stages=stages,
                    )
                )
    return variants


def _fix_ups(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for table, suffix, epilogue, _ in (DENSE_KINDS[0], DENSE_KINDS[2]):
        for size in PROGRAMS_PER_UNIT:
            config = tiles_of(target, table, size)
            variants.append(
                KernelVariant(
                    dtype="",
                    config=size + suffix,
                    pointers={
                        "part_P_ptr": "float32",
                        "bias_N_ptr": "bfloat16",
                        "y_MN_ptr": "bfloat16",
                    },
                    scalars=dict.fromkeys(("M", "N", "steps", "programs", "stride_ym"), "i32"),
                    divisible=frozenset({"N", "stride_ym"}),
                    constants={
                        **{name: config[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP_M")},
                        "ROWS": FIX_UP_ROWS,
                        "HAS_BIAS": False,
                        "EPILOGUE": epilogue,
                    },
                )
            )
    return variants


KERNELS = (
    TritonKernel(
        name="gemm.stream_k", op="gemm", module=_MODULE, function="_gemm_stream_k_kernel",
        variants=_products, uses_matrix_unit=True, sources=_SOURCES,
    ),
    TritonKernel(
        name="gemm.stream_k_fix_up", op="gemm", module=_MODULE, function="_stream_k_fix_up_kernel",
        variants=_fix_ups, uses_matrix_unit=False, sources=_SOURCES,
    ),
)  # fmt: skip
