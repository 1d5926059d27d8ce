"""The products of two FP8 operands that are decoded to 16 bits, as targets are compiled for them,
and their tiles. Free of torch.

They are for architectures whose matrix unit has no FP8, and claim FP8: the evidence says that they
are emulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import (
    FP8_AFTER,
    GATED,
    PLAIN,
    SOURCES,
    WIDENED_UNITS,
    fp8_variant,
    stored_as,
)

MODULE = "hal_kernels.gemm.widened_kernels"
WIDENED_SOURCES = ("hal_kernels.gemm.triton_kernels", *SOURCES)
GROUPS = (128, 32)


def widened_tiles(target: Target, group: int, size: str, *, is_wide: bool) -> dict[str, int]:
    """Tile sizes and launch options. group: columns that share a scale. size: "large" or "small".
    is_wide: for a gated product, and for a rounded result, whose tiles are whole groups wide.

    A step is 32 columns of K where a tall tile leaves no registers for 64 (RDNA 3 wants each
    operand twice), else 64; threads are as few as load 16 bytes each of the weight.
    """
    is_few, is_wave64 = size == "small", target.warp_size == 64
    is_short = group == 32 or (target.arch == "gfx1100" and not is_few)
    is_slow_load = is_wave64 and is_short
    columns = 64 if is_few and not is_wide and not is_slow_load else 128
    return {
        "BLOCK_M": 16 if is_few else 32 if is_wide and not is_wave64 else 64,
        "BLOCK_N": columns,
        "BLOCK_K": 32 if is_short else 64,
        "GROUP_K": group,
        "SCALE_N": group,
        "GROUP_M": 1 if is_few else 8,
        "num_warps": 4 if columns == 64 or is_slow_load else 8,
        "num_stages": 2 if target.backend == "hip" else 3,
    }


def widened_variant(
    target: Target, config: str, group: int, after: Mapping[str, Any]
) -> KernelVariant:
    """A product in the tiles that its name says, with what follows it."""
    is_wide = after["EPILOGUE"] == GATED["EPILOGUE"] or after["OUT_GROUP"] > 0
    size = "small" if config.endswith("-small") else "large"
    given = widened_tiles(target, group, size, is_wide=is_wide)
    variant = fp8_variant(target, config, given, "float32", after)
    bits = {"x_MK_ptr": "uint8", "w_NK_ptr": "uint8"}
    return replace(variant, pointers={**variant.pointers, **bits})


def _widened(target: Target) -> Sequence[KernelVariant]:
    if target.arch not in WIDENED_UNITS:
        return ()
    variants = []
    for group in GROUPS:
        for suffix, after in (*FP8_AFTER.items(), ("-gated", GATED)):
            for small in ("", "-small"):
                config = f"g{group}{suffix}{small}"
                variant = widened_variant(target, config, group, PLAIN | dict(after))
                variants.append(stored_as(variant, "float32") if suffix == "-float32" else variant)
    return variants


KERNELS = (
    TritonKernel(
        name="gemm.fp8_widened", op="gemm", module=MODULE, function="_gemm_fp8_widened_kernel",
        variants=_widened, uses_matrix_unit=True, sources=WIDENED_SOURCES,
    ),
)  # fmt: skip
