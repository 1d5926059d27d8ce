"""The specialisations of the Triton KV write that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS, KvFormat
from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.kv_write.cache_dtypes import compiled_fp8

PACKED_DTYPES = ("bfloat16",)  # of rows: packed formats are bfloat16 by definition
_DENSE_WIDTHS = (1024, 4096)
_BLOCK = 1024  # values of a program of dense rows
ROUNDING = ("hal_kernels.kv_write.cache_rounding", "hal_kernels.kv_write.packed_kernels")
_LOAD_BYTES = 16  # that a thread takes at once


def dense_launch(width: int, dtype: str, warp_size: int) -> tuple[int, int]:
    """(values, warps) of a program of dense rows of so many values: threads for 16 bytes each, four
    warps at most."""
    block = min(_BLOCK, 1 << max(0, width - 1).bit_length())
    threads = block * DTYPE_BYTES[dtype] // _LOAD_BYTES
    return block, min(4, max(1, threads // warp_size))


def _write(target: Target) -> Sequence[KernelVariant]:
    """Into caches of the activations' own dtype, and rounded to the architecture's FP8."""
    caches = [(dtype, dtype, "") for dtype in ACTIVATION_DTYPES]
    caches += [
        (dtype, compiled_fp8(target), suffix)
        for dtype in ("bfloat16", "float16")
        for suffix in ("-fp8", "-fp8-scaled")
    ]
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"row{width}{suffix}",
            pointers={
                **dict.fromkeys(("k_TK_ptr", "v_TK_ptr"), dtype),
                **dict.fromkeys(("k_cache_SK_ptr", "v_cache_SK_ptr"), cache),
                "slots_T_ptr": "int64",
            },
            scalars={"stride_k": "i32", "stride_v": "i32", "k_scale": "fp32", "v_scale": "fp32"},
            divisible=frozenset({"stride_k", "stride_v"}),
            constants={
                "K_WIDTH": width,
                "V_WIDTH": width,
                "BLOCK": _BLOCK,
                "HAS_SCALES": suffix.endswith("scaled"),
            },
            num_warps=dense_launch(width, dtype, target.warp_size)[1],
        )
        for dtype, cache, suffix in caches
        for width in _DENSE_WIDTHS
    )


def row_warps(form: KvFormat, warp_size: int) -> int:
    """Warps of a program of one packed row, whose threads load 16 bytes each: a block of one warp
    leaves room for more warps than a multiprocessor takes blocks."""
    held = (1 << (form.quantized_dim - 1).bit_length()) * DTYPE_BYTES["bfloat16"]
    return max(1, held // _LOAD_BYTES // warp_size)


def packed_constants(form: KvFormat, block_size: int) -> dict[str, Any]:
    """What the kernel of packed rows is told about a format."""
    groups = form.quantized_dim // form.group_size
    return {
        "GROUPS": groups,
        "GROUP": form.group_size,
        "BLOCK_G": 1 << (groups - 1).bit_length(),
        "SCALES": groups + form.padding,
        "PLAIN": form.plain_dim,
        "BLOCK_P": max(16, form.plain_dim),
        "PAGE": block_size,
        "IS_UE8M0": form.scale == "ue8m0",
    }


def _packed(target: Target) -> Sequence[KernelVariant]:
    strides = (
        "stride_x", "stride_page", "stride_row", "stride_scale_page", "stride_scale_row",
        "scale_start", "stride_tail_page", "stride_tail_row", "tail_start",
    )  # fmt: skip
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=name,
            pointers={
                "x_TD_ptr": dtype,
                "values_ptr": "uint8",
                "scales_ptr": KV_FORMATS[name].scale.replace("ue8m0", "uint8"),
                "tails_ptr": "bfloat16" if KV_FORMATS[name].plain_dim else "uint8",
                "slots_T_ptr": "int64",
            },
            scalars=dict.fromkeys(strides, "i32"),
            divisible=frozenset({"stride_x", "stride_page", "stride_row"}),
            constants=packed_constants(KV_FORMATS[name], 64),
            num_warps=row_warps(KV_FORMATS[name], target.warp_size),
        )
        for dtype in PACKED_DTYPES
        for name in ("fp8_656", "v4_584", "v41_528", "fp8_132")
    )


def fp4_constants(form: KvFormat, block_size: int) -> dict[str, Any]:
    """What the kernel of rows of four bits is told about a format."""
    return {
        "GROUPS": form.quantized_dim // form.group_size,
        "GROUP": form.group_size,
        "PAGE": block_size,
        "IS_UE8M0": form.scale == "ue8m0",
    }


def _fp4(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=name,
            pointers={"x_TD_ptr": dtype, "cache_ptr": "uint8", "slots_T_ptr": "int64"},
            scalars=dict.fromkeys(("stride_x", "stride_page", "scale_start"), "i32"),
            divisible=frozenset({"stride_x", "stride_page", "scale_start"}),
            constants=fp4_constants(KV_FORMATS[name], 64),
            num_warps=row_warps(KV_FORMATS[name], target.warp_size),
        )
        for dtype in PACKED_DTYPES
        for name in ("fp4_68", "fp4_288")
    )


KERNELS = (
    TritonKernel(
        name="kv_write.dense", op="kv_write", module="hal_kernels.kv_write.triton_kernels",
        function="_kv_write_kernel", variants=_write, uses_matrix_unit=False, sources=ROUNDING,
    ),
    TritonKernel(
        name="kv_write.packed", op="kv_write", module="hal_kernels.kv_write.packed_kernels",
        function="_kv_write_packed_kernel", variants=_packed, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="kv_write.fp4", op="kv_write", module="hal_kernels.kv_write.fp4_kernels",
        function="_kv_write_fp4_kernel", variants=_fp4, uses_matrix_unit=False,
        sources=("hal_kernels.kv_write.packed_kernels", "hal_kernels.kv_write.packed_rows"),
    ),
)  # fmt: skip
