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
# the small ones leave room for a second one everywhere, see the evidence. Wide ones are not in
# every table.
PROGRAMS_PER_UNIT: Mapping[str, int] = MappingProxyType({"large": 1, "small": 2, "wide": 1})
# Where the small tiles of a gated product would spill with the warps of the whole ones.
_MORE_WARPS = frozenset({"sm_90", "sm_120"})
_STRIDES = ("stride_xm", "stride_wn", "stride_ym")
_FLOAT32 = "-float32"  # of a product whose result is wanted so: a router's scores, logits


def tiles_of(target: Target, table: str, size: str) -> dict[str, int]:
    """Tile sizes and launch options: those of the same product in whole tiles."""
    whole = configurations(table, target)[size]
    tiles = {name: value for name, value in whole.items() if name != "SPLIT_K"}
    if (table, size) == ("gemm_gated", "small") and target.arch in _MORE_WARPS:
        tiles["num_warps"] = 8
    return tiles


def fix_up_name(config: str, dtype: str) -> str:
    """The sum of parts behind a product of rows in `dtype`, by the product's own name; what is
    stored in float32 and has no bias is the same whatever the rows are."""
    return config + "-float16" * (dtype == "float16" and not config.endswith(_FLOAT32))


def _kinds() -> list[tuple[str, str, int, bool]]:
    """Table, suffix, epilogue, whether there is a bias: what a dense product has, and what it
    stores in float32."""
    return [*DENSE_KINDS, ("gemm", _FLOAT32, 0, False)]


def sizes_of(target: Target, table: str, suffix: str) -> list[str]:
    """Of the tiles of a product with what follows it. With a bias and an activation wide ones
    would spill."""
    wide = "wide" in configurations(table, target) and suffix in ("", _FLOAT32)
    return [size for size in PROGRAMS_PER_UNIT if size != "wide" or wide]


def _stored(suffix: str, dtype: str) -> str:
    return "float32" if suffix == _FLOAT32 else dtype


def _products(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for dtype in ("bfloat16", "float16"):
        for table, suffix, epilogue, has_bias in _kinds():
            for size in sizes_of(target, table, suffix):
                constants = tiles_of(target, table, size)
                warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
                variants.append(
                    KernelVariant(
                        dtype=dtype,
                        config=size + suffix,
                        pointers={
                            **dict.fromkeys(("x_MK_ptr", "w_NK_ptr", "bias_N_ptr"), dtype),
                            "y_MN_ptr": _stored(suffix, dtype),
                            "part_P_ptr": "float32",
                        },
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
    for dtype in ("bfloat16", "float16"):
        for table, suffix, epilogue, has_bias in _kinds():
            if suffix == _FLOAT32 and dtype == "float16":
                continue  # no operand of the sum is in it
            for size in sizes_of(target, table, suffix):
                config = tiles_of(target, table, size)
                variants.append(
                    KernelVariant(
                        dtype="",
                        config=fix_up_name(size + suffix, dtype),
                        pointers={
                            "part_P_ptr": "float32",
                            "bias_N_ptr": dtype,
                            "y_MN_ptr": _stored(suffix, dtype),
                        },
                        scalars=dict.fromkeys(("M", "N", "steps", "programs", "stride_ym"), "i32"),
                        divisible=frozenset({"N", "stride_ym"}),
                        constants={
                            **{name: config[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP_M")},
                            "ROWS": FIX_UP_ROWS,
                            "HAS_BIAS": has_bias,
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
