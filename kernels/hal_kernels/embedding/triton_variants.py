"""The specialisations of the Triton gather that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel


def _gather(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config="h2048",
            pointers={"ids_T_ptr": "int64", "weight_VH_ptr": dtype, "y_TH_ptr": dtype},
            scalars={"H": "i32"},
            divisible=frozenset({"H"}),
            constants={"BLOCK_H": 2048},
        )
        for dtype in ACTIVATION_DTYPES
    )


KERNELS = (
    TritonKernel(
        name="embedding.gather", op="embedding", module="hal_kernels.embedding.triton_kernels",
        function="_embedding_kernel", variants=_gather, uses_matrix_unit=False,
    ),
)  # fmt: skip
