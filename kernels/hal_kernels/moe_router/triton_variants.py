"""The specialisations of the Triton choice of experts that targets are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

# Numbers of the scorings that the kernel computes.
SCORINGS: Mapping[str, int] = MappingProxyType({"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2})
HASH_TOKENS = 16  # of one program
# What is compiled: experts of any scoring, of them those in groups, groups, experts by hash.
_SIZES, _GROUPED_SIZES, MAX_GROUPS, _HASHED = (128, 256, 512, 1024), (256, 1024), 8, (6, 24)
MAX_EXPERTS = _SIZES[-1]
MAX_TOP_K = 32
WITHOUT_BIAS = ("softmax",)  # scorings that no form with a bias is compiled of
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


def scored_config(scoring: str, experts: int, *, is_grouped: bool) -> str:
    """The form that a choice by scores is judged by: as many scores of a token in a warp's
    registers, or more. The number that is chosen is an argument."""
    sizes = _GROUPED_SIZES if is_grouped else _SIZES
    size = next(size for size in sizes if size >= experts)
    return _config(scoring, size, is_grouped=is_grouped)


def hash_config(top_k: int) -> str:
    """The form that a choice by a table is judged by: of as many columns or more."""
    return f"k{next(k for k in _HASHED if _columns(k) >= top_k)}"


def _columns(top_k: int) -> int:
    return 1 << (top_k - 1).bit_length()


def _config(scoring: str, size: int, *, is_grouped: bool) -> str:
    return f"{scoring.replace('_', '-')}-e{size}" + (f"-g{MAX_GROUPS}" if is_grouped else "")


def _scored(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, scoring, size, is_grouped=is_grouped)
        for scoring in SCORINGS
        for is_grouped, sizes in ((False, _SIZES), (True, _GROUPED_SIZES))
        for size in sizes
    )


def _variant(target: Target, scoring: str, experts: int, *, is_grouped: bool) -> KernelVariant:
    groups = MAX_GROUPS if is_grouped else 1
    shape = program_shape(experts, 4, target.arch, target.warp_size)
    warps = shape.pop("num_warps")
    return KernelVariant(
        dtype="",
        config=_config(scoring, experts, is_grouped=is_grouped),
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
            # A form with one stands for those without, which have a load less.
            "HAS_BIAS": scoring not in WITHOUT_BIAS,
            "NORMALIZES": True,
            "G": groups,
            "PICKED": max(groups // 2, 1),
        },
        num_warps=warps,
    )


def _hash(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype="",
            config=f"k{top_k}",
            pointers={
                "logits_TE_ptr": "float32",
                "token_ids_T_ptr": "int64",
                "table_VK_ptr": "int64",
                "weights_TK_ptr": "float32",
                "ids_TK_ptr": "int32",
            },
            scalars={"stride_logits": "i32", "T": "i32", "route_scale": "fp32"},
            divisible=frozenset({"stride_logits"}),
            constants={
                "BLOCK_T": HASH_TOKENS,
                "TOP_K": top_k,
                "BLOCK_K": _columns(top_k),
                "NORMALIZES": True,
            },
            num_warps=1,
        )
        for top_k in _HASHED
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
