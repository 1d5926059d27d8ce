"""The specialisations of the Triton rounding kernel that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

LARGEST = {"int8": 127.0, "fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0}
FP4 = ("mxfp4", "nvfp4")


# Name in a configuration -> most values of a group; rows are one group, padded.
GROUPS = {"g32": 32, "g128": 128, "row": 8192, "wide-row": 32768}
ROW_STEP = 8192  # columns of a step over a row that is wider than those
_PROGRAM_VALUES = 2048  # of one program, where a group has no more: 16 a thread at 4 warps


def group_block(group: int, groups: int) -> int:
    """Groups of a program, for rows of so many groups of that many values each."""
    return max(1, min(_PROGRAM_VALUES // group, 1 << (groups - 1).bit_length()))


def launch_warps(group: int, block: int) -> int:
    """Of a program of so many groups."""
    values = group * block
    return 4 if values <= _PROGRAM_VALUES else 8 if values <= GROUPS["row"] else 16


def eight_bits(target: Target) -> tuple[str, ...]:
    """What the architecture's values are rounded to. NVIDIA's converts to FP8 from sm_89 on; AMD's
    compiler converts to both kinds everywhere, bit by bit where there is no instruction."""
    if target.arch == "sm_80":
        return ("int8",)
    both = dict.fromkeys((target.fp8_dtype, "fp8_e4m3fn"))
    return ("int8", *both)


def _quantize(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(dtype, out, name, is_ue8m0=is_ue8m0)
        for dtype in ACTIVATION_DTYPES
        for out in eight_bits(target)
        for name in GROUPS
        for is_ue8m0 in (False, True)
        # A row has one scale, and integers have float32 scales.
        if not is_ue8m0 or (name in ("g32", "g128") and out != "int8")
    )


def converts_in_integers(arch: str, out_dtype: str) -> bool:
    """Whether rows are rounded to that type by `quantize.codes`: Triton does not convert to FP8 on
    NVIDIA before sm_89."""
    return arch == "sm_80" and out_dtype == "fp8_e4m3fn"


def _codes(target: Target) -> Sequence[KernelVariant]:
    if not converts_in_integers(target.arch, target.fp8_dtype):
        return ()
    variants = []
    for dtype in ACTIVATION_DTYPES:
        for name in GROUPS:
            for is_ue8m0 in (False, True) if name in ("g32", "g128") else (False,):
                given = _variant(dtype, "fp8_e4m3fn", name, is_ue8m0=is_ue8m0)
                constants = {k: v for k, v in given.constants.items() if k in _OF_CODES}
                pointers = {**given.pointers, "y_RK_ptr": "uint8"}
                variants.append(replace(given, pointers=pointers, constants=constants))
    return variants


_OF_CODES = ("GROUP", "BLOCK_G", "IS_UE8M0")


def looped_constants(out: str, arch: str) -> dict[str, Any]:
    """Of rows with one scale that are walked in steps."""
    return {
        "BLOCK_K": ROW_STEP,
        "LARGEST": LARGEST[out],
        "IS_INTEGER": out == "int8",
        "IS_BITS": converts_in_integers(arch, out),
    }


def looped_warps(warp_size: int) -> int:
    """16 values a thread: 16 bytes of what is stored."""
    return ROW_STEP // (16 * warp_size)


def _looped(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=f"{out}-looped",
            pointers={
                "x_RK_ptr": dtype,
                "y_RK_ptr": "uint8" if converts_in_integers(target.arch, out) else out,
                "scale_R_ptr": "float32",
            },
            scalars=dict.fromkeys(("stride_x", "stride_y", "K"), "i32"),
            divisible=frozenset({"stride_x", "stride_y", "K"}),
            constants=looped_constants(out, target.arch),
            num_warps=looped_warps(target.warp_size),
        )
        for dtype in ACTIVATION_DTYPES
        for out in dict.fromkeys((*eight_bits(target), target.fp8_dtype))
    )


def _variant(dtype: str, out: str, name: str, *, is_ue8m0: bool) -> KernelVariant:
    group = GROUPS[name]
    block = group_block(group, 1 << 16)
    return KernelVariant(
        dtype=dtype,
        config=f"{out}-{name}{'-ue8m0' if is_ue8m0 else ''}",
        pointers={
            "x_RK_ptr": dtype,
            "y_RK_ptr": out,
            "scale_RG_ptr": "uint8" if is_ue8m0 else "float32",
        },
        scalars=dict.fromkeys(("stride_x", "stride_y", "K", "num_groups"), "i32"),
        divisible=frozenset({"stride_x", "stride_y", "K"}),
        constants={
            "GROUP": group,
            "BLOCK_G": block,
            "LARGEST": LARGEST[out],
            "IS_INTEGER": out == "int8",
            "IS_UE8M0": is_ue8m0,
        },
        num_warps=launch_warps(group, block),
    )


def _fp4(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config=config,
            pointers={"x_RK_ptr": dtype, "y_RB_ptr": "uint8", "scale_RG_ptr": "uint8"},
            scalars=dict.fromkeys(("stride_x", "K", "num_groups"), "i32"),
            divisible=frozenset({"stride_x", "K"}),
            constants={
                "GROUP": group,
                "BLOCK_G": group_block(group, 1 << 16),
                "IS_UE8M0": is_ue8m0,
            },
        )
        for dtype in ACTIVATION_DTYPES
        for config, group, is_ue8m0 in (("mxfp4", 32, True), ("nvfp4", 16, False))
    )


KERNELS = (
    TritonKernel(
        name="quantize.groups", op="quantize", module="hal_kernels.quantize.triton_kernels",
        function="_quantize_groups_kernel", variants=_quantize, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="quantize.codes", op="quantize", module="hal_kernels.quantize.code_kernels",
        function="_quantize_codes_kernel", variants=_codes, uses_matrix_unit=False,
        sources=("hal_kernels.quantize.triton_kernels",),
    ),
    TritonKernel(
        name="quantize.looped", op="quantize", module="hal_kernels.quantize.row_kernels",
        function="_quantize_row_looped_kernel", variants=_looped, uses_matrix_unit=False,
        sources=("hal_kernels.quantize.triton_kernels", "hal_kernels.quantize.code_kernels"),
    ),
    TritonKernel(
        name="quantize.fp4", op="quantize", module="hal_kernels.quantize.triton_kernels",
        function="_quantize_fp4_kernel", variants=_fp4, uses_matrix_unit=False,
    ),
)  # fmt: skip
