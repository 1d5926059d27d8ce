"""The specialisations of the Triton norms that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

_WIDTHS = (1024, 4096, 8192)
_LARGEST = {"int8": 127.0, "fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0}


def _rms_norm(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=f"h{width}-{kind}",
            pointers={
                "x_RH_ptr": "bfloat16",
                "residual_RH_ptr": "bfloat16",
                "weight_H_ptr": "bfloat16",
                "y_RH_ptr": out,
                "scale_RG_ptr": "float32",
            },
            scalars={
                **dict.fromkeys(("stride_x", "stride_residual", "stride_y", "H"), "i32"),
                "eps": "fp32",
            },
            divisible=frozenset({"stride_x", "stride_residual", "stride_y", "H"}),
            constants={
                "BLOCK_H": width,
                "HAS_RESIDUAL": has_residual,
                "QUANTIZE_GROUP": group,
                "LARGEST": _LARGEST.get(out, 1.0),
                "IS_INTEGER": out == "int8",
            },
            num_warps=4 if width <= 1024 else 8,
        )
        for width in _WIDTHS
        for kind, out, has_residual, group in (
            ("plain", "bfloat16", False, 0),
            ("residual", "bfloat16", True, 0),
            ("residual-fp8", target.fp8_dtype, True, 128),
        )
        # Without FP8 in the instruction set the conversion would be emulated bit by bit.
        if out != target.fp8_dtype or target.arch not in ("sm_80", "gfx90a", "gfx1100")
    )


KERNELS = (
    TritonKernel(
        name="norm.rms", op="norm.rms", module="hal_kernels.norm.triton_kernels",
        function="_rms_norm_kernel", variants=_rms_norm, uses_matrix_unit=False,
    ),
)  # fmt: skip
