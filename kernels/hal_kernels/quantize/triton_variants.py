"""The specialisations of the Triton rounding kernel that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

LARGEST = {"int8": 127.0, "fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0}
FP4 = ("mxfp4", "nvfp4")


def _quantize(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=config,
            pointers={
                "x_RK_ptr": "bfloat16",
                "y_RK_ptr": out,
                "scale_RG_ptr": "uint8" if is_ue8m0 else "float32",
            },
            scalars=dict.fromkeys(("stride_x", "stride_y", "K", "num_groups"), "i32"),
            divisible=frozenset({"stride_x", "stride_y", "K"}),
            constants={
                "GROUP": group,
                "BLOCK_G": 2048 // group,
                "LARGEST": LARGEST[out],
                "IS_INTEGER": out == "int8",
                "IS_UE8M0": is_ue8m0,
            },
        )
        for config, out, group, is_ue8m0 in (
            ("fp8-g128", target.fp8_dtype, 128, False),
            ("fp8-g128-ue8m0", target.fp8_dtype, 128, True),
            ("fp8-g32-ue8m0", target.fp8_dtype, 32, True),
            ("int8-g128", "int8", 128, False),
        )
        # Without FP8 in the instruction set Triton does not convert to it on NVIDIA.
        if out == "int8" or target.arch != "sm_80"
    )


def _fp4(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=config,
            pointers={"x_RK_ptr": "bfloat16", "y_RB_ptr": "uint8", "scale_RG_ptr": "uint8"},
            scalars=dict.fromkeys(("stride_x", "K", "num_groups"), "i32"),
            divisible=frozenset({"stride_x", "K"}),
            constants={"GROUP": group, "BLOCK_G": 2048 // group, "IS_UE8M0": is_ue8m0},
        )
        for config, group, is_ue8m0 in (("mxfp4", 32, True), ("nvfp4", 16, False))
    )


KERNELS = (
    TritonKernel(
        name="quantize.groups", op="quantize", module="hal_kernels.quantize.triton_kernels",
        function="_quantize_groups_kernel", variants=_quantize, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="quantize.fp4", op="quantize", module="hal_kernels.quantize.triton_kernels",
        function="_quantize_fp4_kernel", variants=_fp4, uses_matrix_unit=False,
    ),
)  # fmt: skip
