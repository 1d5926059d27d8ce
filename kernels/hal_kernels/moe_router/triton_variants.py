"""The specialisations of the Triton choice of experts that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

# Numbers of the scorings that the kernel computes.
SCORINGS: Mapping[str, int] = MappingProxyType({"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2})
HASH_TOKENS = 16  # of one program

_MODULE = "hal_kernels.moe_router.triton_kernels"


def _scored(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=config,
            pointers={
                "logits_TE_ptr": "float32",
                "bias_E_ptr": "float32",
                "weights_TK_ptr": "float32",
                "ids_TK_ptr": "int32",
            },
            scalars={"stride_logits": "i32", "E": "i32", "route_scale": "fp32"},
            divisible=frozenset({"stride_logits", "E"}),
            constants={
                "BLOCK_E": block,
                "TOP_K": top_k,
                "BLOCK_K": 16 if top_k > 8 else 8,
                "SCORING": SCORINGS[scoring],
                "HAS_BIAS": scoring != "softmax",
                "NORMALIZES": True,
                "G": groups,
                "PICKED": max(groups // 2, 1),
            },
            num_warps=1,
        )
        for config, scoring, block, top_k, groups in (
            ("softmax-e128-k8", "softmax", 128, 8, 1),
            ("sigmoid-e256-k8-g8", "sigmoid", 256, 8, 8),
            ("sqrt-softplus-e512-k6", "sqrt_softplus", 512, 6, 1),
            ("sigmoid-e1024-k16", "sigmoid", 1024, 16, 1),
        )
    )


def _hash(target: Target) -> Sequence[KernelVariant]:
    return (
        KernelVariant(
            dtype="",
            config="k6",
            pointers={
                "logits_TE_ptr": "float32",
                "token_ids_T_ptr": "int64",
                "table_VK_ptr": "int64",
                "weights_TK_ptr": "float32",
                "ids_TK_ptr": "int32",
            },
            scalars={"stride_logits": "i32", "T": "i32", "route_scale": "fp32"},
            divisible=frozenset({"stride_logits"}),
            constants={"BLOCK_T": HASH_TOKENS, "TOP_K": 6, "BLOCK_K": 8, "NORMALIZES": True},
            num_warps=1,
        ),
    )


KERNELS = (
    TritonKernel(
        name="moe_router.scored", op="moe_router", module=_MODULE,
        function="_moe_router_kernel", variants=_scored, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="moe_router.hash", op="moe_router", module=_MODULE,
        function="_moe_router_hash_kernel", variants=_hash, uses_matrix_unit=False,
    ),
)  # fmt: skip
