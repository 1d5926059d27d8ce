"""The specialisations of the Triton choice of experts that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

# Numbers of the scorings that the kernel computes.
SCORINGS: Mapping[str, int] = MappingProxyType({"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2})
HASH_TOKENS = 16  # of one program
_LOAD_BYTES = 16

_MODULE = "hal_kernels.moe_router.triton_kernels"


def program_shape(experts: int, logit_bytes: int, arch: str, warp_size: int) -> dict[str, int]:
    """The scores of a program, T tokens of H x C experts, and its warps. C are the experts that a
    warp loads in 16 bytes a lane, or all; then a warp has as many tokens as it has lanes for."""
    padded = 1 << (experts - 1).bit_length()
    of_warp = warp_size * _LOAD_BYTES // logit_bytes
    columns = min(padded, of_warp)
    parts = padded // columns
    # Of tokens in parts the compiler takes 126 registers on RDNA, of one such token 85.
    warps = 1 if arch.startswith("gfx1") and parts > 1 else 4
    return {"T": warps * (of_warp // columns), "H": parts, "C": columns, "num_warps": warps}


def _scored(target: Target) -> Sequence[KernelVariant]:
    # The number that is chosen is an argument: the names say for which models these are.
    return tuple(
        _variant(target, config, scoring, experts, groups)
        for config, scoring, experts, groups in (
            ("softmax-e128-k8", "softmax", 128, 1),
            ("sigmoid-e256-k8-g8", "sigmoid", 256, 8),
            ("sqrt-softplus-e512-k6", "sqrt_softplus", 512, 1),
            ("sigmoid-e1024-k16", "sigmoid", 1024, 1),
        )
    )


def _variant(target: Target, config: str, scoring: str, experts: int, groups: int) -> KernelVariant:
    shape = program_shape(experts, 4, target.arch, target.warp_size)
    warps = shape.pop("num_warps")
    return KernelVariant(
        dtype="",
        config=config,
        pointers={
            "logits_TE_ptr": "float32",
            "bias_E_ptr": "float32",
            "weights_TK_ptr": "float32",
            "ids_TK_ptr": "int32",
        },
        scalars={
            **dict.fromkeys(("stride_logits", "tokens", "E", "top_k"), "i32"),
            "route_scale": "fp32",
        },
        divisible=frozenset({"stride_logits", "E"}),
        constants={
            **shape,
            "SCORING": SCORINGS[scoring],
            "HAS_BIAS": scoring != "softmax",
            "NORMALIZES": True,
            "G": groups,
            "PICKED": max(groups // 2, 1),
        },
        num_warps=warps,
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
