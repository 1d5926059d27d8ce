"""The specialisations of the Triton KV write that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel


def _write(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=f"row{width}",
            pointers={
                **dict.fromkeys(
                    ("k_TK_ptr", "v_TK_ptr", "k_cache_SK_ptr", "v_cache_SK_ptr"), "bfloat16"
                ),
                "slots_T_ptr": "int64",
            },
            scalars={"stride_k": "i32", "stride_v": "i32"},
            divisible=frozenset({"stride_k", "stride_v"}),
            constants={"K_WIDTH": width, "V_WIDTH": width, "BLOCK": 1024},
        )
        for width in (1024, 4096)
    )


KERNELS = (
    TritonKernel(
        name="kv_write.dense", op="kv_write", module="hal_kernels.kv_write.triton_kernels",
        function="_kv_write_kernel", variants=_write, uses_matrix_unit=False,
    ),
)  # fmt: skip
