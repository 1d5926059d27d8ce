"""The specialisation of the Triton filter of logits that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

BLOCK_V = 1024  # logits of a step: 16 bytes for each of 256 threads


def constants_of(arch: str) -> dict[str, int]:
    """Sixteen sums for each of a thread's four logits take 64 registers, for two of them at a time
    32, and twice the warps are resident. For sm_80 the compiler takes too few registers then, and
    spills."""
    return {"BLOCK_V": BLOCK_V, "PARTS": 1 if arch == "sm_80" else 2}


def launch_warps(warp_size: int) -> int:
    """256 threads."""
    return 256 // warp_size


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
            constants=constants_of(target.arch),
            num_warps=launch_warps(target.warp_size),
        ),
    )


KERNELS = (
    TritonKernel(
        name="sampling.top_k_top_p", op="sample.top_k_top_p",
        module="hal_kernels.sampling.triton_kernels", function="_top_k_top_p_kernel",
        variants=_top_k_top_p, uses_matrix_unit=False,
    ),
)  # fmt: skip
