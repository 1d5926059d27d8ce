"""The specialisation of the Triton filter of logits that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

BLOCK_V = 1024
NUM_WARPS = 8


def _top_k_top_p(target: Target) -> Sequence[KernelVariant]:
    return (
        KernelVariant(
            dtype="",
            config="f32",
            pointers={
                "logits_BV_ptr": "float32",
                "top_k_B_ptr": "int64",
                "top_p_B_ptr": "float32",
                "y_BV_ptr": "float32",
            },
            scalars={"stride_logits": "i32", "V": "i32"},
            divisible=frozenset({"stride_logits", "V"}),
            constants={"BLOCK_V": BLOCK_V},
            num_warps=NUM_WARPS,
        ),
    )


KERNELS = (
    TritonKernel(
        name="sampling.top_k_top_p", op="sample.top_k_top_p",
        module="hal_kernels.sampling.triton_kernels", function="_top_k_top_p_kernel",
        variants=_top_k_top_p, uses_matrix_unit=False,
    ),
)  # fmt: skip
