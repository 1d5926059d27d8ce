"""The specialisations of the Triton indexer scores that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hal.ops.kv_formats import PLAIN_FORMATS
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

_MODULE = "hal_kernels.index_logits.triton_kernels"
_PACKED_ROWS = "hal_kernels.kv_write.packed_rows"
# As `hal_kernels.kv_write.packed_rows` numbers them; plain ones are read in their own dtype.
KEY_FORMATS: Mapping[str, int] = MappingProxyType({"bf16": 0, "fp16": 0, "fp8_132": 1, "fp4_68": 2})
_WITHOUT_FP8 = frozenset({"sm_80", "sm_86", "gfx90a", "gfx1100"})


# Whether of a decode, and whether of the candidate blocks alone, which is the decode's only.
_CALLS = ((True, False), (False, False), (True, True))


def config_of(key_format: str, *, is_decode: bool, is_listed: bool = False) -> str:
    """The name of a variant."""
    name = f"{key_format}-{'decode' if is_decode else 'prefill'}"
    return f"{name}-listed" if is_listed else name


def unit_of(target: Target) -> str:
    """The unit for a query in e4m3fn: the FP8 one of the architecture, or 16 bits."""
    if target.arch in _WITHOUT_FP8:
        return "bf16"
    return "fnuz" if target.fp8_dtype == "fp8_e4m3fnuz" else "fn"


def tiles(target: Target, *, is_decode: bool, is_listed: bool = False) -> dict[str, int]:
    """Tile sizes and launch options. A tile of queries shares what is read of the keys; the one
    query of a decode is read once for all keys of a tile, which eight warps share: as many bytes as
    with four, with half the registers of each and about twice the warps resident."""
    rows = _keys(target)
    if target.arch == "gfx1100" and (is_listed or not is_decode):
        rows //= 2  # it has the fewest registers to spare
    return {
        "BLOCK_N": rows,
        "BLOCK_Q": 1 if is_decode else 16,
        "num_warps": 8 if is_decode else 4,
        "num_stages": _stages(target),
    }


def _keys(target: Target) -> int:
    return 64 if target.backend == "hip" and target.warp_size == 32 else 128


def _stages(target: Target) -> int:
    return 1 if target.backend == "hip" else 2


def _variant(
    target: Target, key_format: str, *, is_fp8: bool, is_decode: bool, is_listed: bool
) -> KernelVariant:
    options: dict[str, Any] = tiles(target, is_decode=is_decode, is_listed=is_listed)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    dtype = "float16" if key_format == "fp16" else "bfloat16"
    cache = dtype if key_format in PLAIN_FORMATS else "uint8"
    scales = {"fp8_132": "float32", "fp4_68": "uint8"}.get(key_format, dtype)
    strides = (
        "width", "offset", "is_whole", "stride_q", "stride_weights", "stride_out",
        "stride_candidates", "stride_table", "stride_page", "stride_row", "stride_scale_page",
        "scale_start",
    )  # fmt: skip
    return KernelVariant(
        dtype=target.fp8_dtype if is_fp8 else dtype,
        config=config_of(key_format, is_decode=is_decode, is_listed=is_listed),
        pointers={
            "q_TD_ptr": "uint8" if is_fp8 else dtype,
            "weights_TH_ptr": "float32",
            "keys_ptr": cache,
            "scales_ptr": scales,
            "out_TE_ptr": "float32",
            "starts_B_ptr": "int32",
            "lengths_B_ptr": "int32",
            "table_BW_ptr": "int32",
            "candidates_TN_ptr": "int32" if is_listed else "float32",
        },
        scalars={"scale": "fp32", **dict.fromkeys(strides, "i32")},
        divisible=frozenset({"stride_q", "stride_page", "stride_row", "stride_scale_page"}),
        constants={
            "HEADS": 64,
            "HEAD_DIM": 128,
            "BLOCK_H": 64,
            "BLOCK_D": 128,
            "PAGE": 64,
            "RATIO": 1,
            "KEY_FORMAT": KEY_FORMATS[key_format],
            "Q_IS_FP8": is_fp8,
            "UNIT": unit_of(target) if is_fp8 else "bf16",
            "IS_LISTED": is_listed,
            **options,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _variants(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, key_format, is_fp8=is_fp8, is_decode=is_decode, is_listed=is_listed)
        for key_format, is_fp8 in (
            ("bf16", False),
            ("fp16", False),
            ("fp8_132", False),
            ("fp8_132", True),
            ("fp4_68", False),
        )
        for is_decode, is_listed in _CALLS
    )


def fp4_tiles(target: Target, *, is_decode: bool, is_listed: bool = False) -> dict[str, int]:
    """As `tiles`, by four warps: a group of keys has 16 bytes a row, which a thread loads at once.
    Each group has a product of its own beside the sum, so fewer keys fit where registers end first:
    be it two registers, they spill."""
    rows = _keys(target)
    few = (("sm_89", True), ("sm_90", False), ("gfx1100", False))
    if (target.arch, is_decode) in few or (is_listed and target.arch in ("sm_80", "gfx1100")):
        rows //= 2
    return {
        "BLOCK_N": rows,
        "BLOCK_Q": 1 if is_decode else 16,
        "num_warps": 4,
        "num_stages": _stages(target),
    }


def fp4_constants(target: Target, heads: int, block_size: int, ratio: int) -> dict[str, Any]:
    """What the kernel for an FP8 query over keys of four bits is told, but for its tiles."""
    return {
        "HEADS": heads,
        "BLOCK_H": max(16, 1 << (heads - 1).bit_length()),
        "PAGE": block_size,
        "RATIO": ratio,
        "UNIT": unit_of(target),
    }


def _fp4(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for is_decode, is_listed in _CALLS:
        options: dict[str, Any] = fp4_tiles(target, is_decode=is_decode, is_listed=is_listed)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        strides = (
            "width", "offset", "is_whole", "stride_q", "stride_weights", "stride_out",
            "stride_candidates", "stride_table", "stride_page", "scale_start",
        )  # fmt: skip
        integers = ("starts_B_ptr", "lengths_B_ptr", "table_BW_ptr")
        variants.append(
            KernelVariant(
                dtype=target.fp8_dtype,
                config=config_of("fp4_68", is_decode=is_decode, is_listed=is_listed),
                pointers={
                    "q_TD_ptr": "uint8",
                    "weights_TH_ptr": "float32",
                    "keys_ptr": "uint8",
                    "out_TE_ptr": "float32",
                    **dict.fromkeys(integers, "int32"),
                    "candidates_TN_ptr": "int32" if is_listed else "float32",
                },
                scalars={"scale": "fp32", **dict.fromkeys(strides, "i32")},
                divisible=frozenset({"stride_q", "stride_page", "scale_start"}),
                constants={**fp4_constants(target, 64, 64, 1), "IS_LISTED": is_listed, **options},
                num_warps=warps,
                num_stages=stages,
            )
        )
    return variants


KERNELS = (
    TritonKernel(
        name="index_logits.paged", op="index_logits",
        module=_MODULE, function="_index_logits_kernel",
        variants=_variants, uses_matrix_unit=True, sources=(_PACKED_ROWS,),
    ),
    TritonKernel(
        name="index_logits.fp4", op="index_logits", module="hal_kernels.index_logits.fp4_kernels",
        function="_index_logits_fp4_kernel", variants=_fp4, uses_matrix_unit=True,
        sources=(_MODULE, _PACKED_ROWS),
    ),
)  # fmt: skip
