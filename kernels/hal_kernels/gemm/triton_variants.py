"""The specialisations of the Triton products that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.split_k_schedule import SPLITS
from hal_kernels.tuning.default_tables import load_default_tables

_MODULE = "hal_kernels.gemm.triton_kernels"
_CONFIGS = load_default_tables(Path(__file__).with_name("triton_configs.json"))
_SIZES = {"M": "i32", "N": "i32", "K": "i32"}
_STRIDES = ("stride_xm", "stride_wn", "stride_ym", "stride_rm")
SOURCES = ("hal_kernels.gemm.epilogues", "hal_kernels.quantize.triton_kernels")
GATED: dict[str, Any] = {"EPILOGUE": 2}
# What follows a product of the op `gemm`, as the kernels' constants have it: its bias and gate.
PLAIN: dict[str, Any] = {
    "EPILOGUE": 0,
    "CLAMP": 0.0,
    "HAS_RESIDUAL": False,
    "OUT_GROUP": 0,
    "OUT_LARGEST": 0.0,
    "OUT_UE8M0": False,
}


def result_pointers(target: Target, after: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """Types of what a product stores and adds: with scales, in eight bits."""
    is_rounded = after["OUT_GROUP"] > 0
    return {
        "y_MN_ptr": target.fp8_dtype if is_rounded else dtype,
        "y_scale_MG_ptr": "uint8" if after["OUT_UE8M0"] else "float32" if is_rounded else dtype,
        "residual_MN_ptr": dtype,
    }


def configurations(kernel: str, target: Target) -> Mapping[str, Mapping[str, int]]:
    """Name -> constants of a kernel on a target: those of the architecture, else of its vendor."""
    table = _CONFIGS[kernel]
    return table.get(target.arch, table[target.backend])


def _split(constants: Mapping[str, int]) -> tuple[dict[str, Any], int, int]:
    rest = dict(constants)
    return rest, rest.pop("num_warps"), rest.pop("num_stages")


def _dense(target: Target) -> Sequence[KernelVariant]:
    kinds = (("gemm", "", 0, False), ("gemm", "-bias", 0, True), ("gemm_gated", "-gated", 2, False))
    return tuple(
        dense_variant(target, dtype, name + suffix, given, has_bias, {**PLAIN, "EPILOGUE": gate})
        for dtype in ("bfloat16", "float16")
        for table, suffix, gate, has_bias in kinds
        for name, given in configurations(table, target).items()
    )


def dense_variant(
    target: Target,
    dtype: str,
    config: str,
    given: Mapping[str, int],
    has_bias: bool,
    after: Mapping[str, Any],
) -> KernelVariant:
    """A dense product in a configuration, with what follows it."""
    constants, warps, stages = _split(given)
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            **dict.fromkeys(("x_MK_ptr", "w_NK_ptr", "bias_N_ptr"), dtype),
            **result_pointers(target, after, dtype),
            "part_SMN_ptr": "float32",
        },
        scalars={**_SIZES, **dict.fromkeys(_STRIDES, "i32")},
        divisible=frozenset({"N", "K", *_STRIDES}),
        constants={**constants, **after, "HAS_BIAS": has_bias},
        num_warps=warps,
        num_stages=stages,
    )


def _fp8_block(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        fp8_variant(target, name, given, "float32", PLAIN | _gate_of(name))
        for name, given in configurations("gemm_fp8_block", target).items()
    )


def _mxfp8(target: Target) -> Sequence[KernelVariant]:
    if target.fp8_dtype != "fp8_e4m3fn":
        return ()  # OCP Microscaling is defined on e4m3fn
    return tuple(
        fp8_variant(target, name, given, "uint8", PLAIN | _gate_of(name))
        for name, given in configurations("gemm_mxfp8", target).items()
    )


def _gate_of(name: str) -> dict[str, Any]:
    return GATED if "-gated" in name else {}


def fp8_variant(
    target: Target, config: str, given: Mapping[str, int], scale: str, after: Mapping[str, Any]
) -> KernelVariant:
    """A product of FP8 operands in a configuration, with what follows it. scale: type of the
    operands' scales, uint8 for `_gemm_mxfp8_kernel`."""
    constants, warps, stages = _split(given)
    return KernelVariant(
        dtype=target.fp8_dtype,
        config=config,
        pointers={
            "x_MK_ptr": target.fp8_dtype,
            "x_scale_MG_ptr": scale,
            "w_NK_ptr": target.fp8_dtype,
            "w_scale_NG_ptr" if scale == "uint8" else "w_scale_ptr": scale,
            **result_pointers(target, after, "bfloat16"),
        },
        scalars={**_SIZES, **dict.fromkeys((*_STRIDES, "stride_xs", "stride_ws"), "i32")},
        divisible=frozenset({"N", "K", *_STRIDES}),
        constants={**constants, **after},
        num_warps=warps,
        num_stages=stages,
    )


def _weight_only(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        variant
        for dtype in ("bfloat16", "float16")
        for variant in weight_only_variants(target, has_residual=False, dtype=dtype)
    )


def weight_only_variants(
    target: Target, *, has_residual: bool, dtype: str = "bfloat16"
) -> Sequence[KernelVariant]:
    """Integer weights that are widened in registers, every format in every configuration."""
    kinds = (
        ("w8", 8, 0, False),
        ("w8g32", 8, 32, False),
        ("w4g32", 4, 32, False),
        ("w4g32-asym", 4, 32, True),
    )
    variants = []
    for name, given in configurations("gemm_weight_only", target).items():
        for suffix, bits, group, has_minimum in kinds:
            constants, warps, stages = _split(given)
            variants.append(
                KernelVariant(
                    dtype=dtype,
                    config=f"{name}-{suffix}",
                    pointers={
                        "x_MK_ptr": dtype,
                        "w_ptr": "int8" if bits == 8 else "uint8",
                        "scale_NG_ptr": "float16" if group else "float32",
                        "minimum_NG_ptr": "float16",
                        "y_MN_ptr": dtype,
                        "residual_MN_ptr": dtype,
                    },
                    scalars={**_SIZES, **dict.fromkeys((*_STRIDES, "stride_sn"), "i32")},
                    divisible=frozenset({"N", "K", *_STRIDES}),
                    constants={
                        **constants,
                        "BITS": bits,
                        "GROUP_K": group,
                        "HAS_MINIMUM": has_minimum,
                        "HAS_RESIDUAL": has_residual,
                    },
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return variants


def fp8_weight_tiles(target: Target, size: str) -> dict[str, int]:
    """Tile sizes and launch options of FP8 weights whose activations stay: those of other weights
    that are widened in registers. size: "large" or "small"."""
    if size == "large":
        # Of these the registers hold less beside the widened weight.
        is_rdna = target.arch.startswith(("gfx11", "gfx12"))
        return {
            "BLOCK_M": 64,
            "BLOCK_N": 32 if target.arch.startswith("gfx11") else 64,
            "GROUP_M": 8,
            "num_warps": 8 if is_rdna else 4,
            "num_stages": 2,
        }
    return {"BLOCK_M": 16, "BLOCK_N": 32, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}


def _fp8_weight(target: Target) -> Sequence[KernelVariant]:
    return fp8_weight_variants(target, has_residual=False)


def fp8_weight_variants(target: Target, *, has_residual: bool) -> Sequence[KernelVariant]:
    """FP8 weights whose activations stay as they are, every block size in every size of tiles."""
    variants = []
    for size in ("large", "small"):
        for group in (32, 128):
            constants, warps, stages = _split(fp8_weight_tiles(target, size))
            variants.append(
                KernelVariant(
                    dtype="bfloat16",
                    config=f"{size}-g{group}",
                    pointers={
                        "x_MK_ptr": "bfloat16",
                        "w_NK_ptr": "uint8",
                        "scale_BB_ptr": "float32",
                        "y_MN_ptr": "bfloat16",
                        "residual_MN_ptr": "bfloat16",
                    },
                    scalars={**_SIZES, **dict.fromkeys((*_STRIDES, "stride_sb"), "i32")},
                    divisible=frozenset({"N", "K", *_STRIDES}),
                    constants={**constants, "GROUP_K": group, "HAS_RESIDUAL": has_residual},
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return variants


def _sum_of_splits(target: Target) -> Sequence[KernelVariant]:
    # A bias stands for none, and an activation too. Results in float32 are those of heads.
    forms = [
        (dtype, kind, {"EPILOGUE": epilogue}, kind != "plain")
        for dtype in ("bfloat16", "float16")
        for kind, epilogue in (("plain", 0), ("bias", 1), ("gated", 2))
    ]
    forms.append(("float32", "plain", {}, False))
    return tuple(
        split_k_variant(
            target,
            f"split{splits}-{kind}" + f"-{dtype}" * (dtype != "bfloat16"),
            splits,
            {**PLAIN, **after},
            has_bias=has_bias,
            dtype=dtype,
        )
        for splits in SPLITS
        for dtype, kind, after, has_bias in forms
    )


def split_k_variant(
    target: Target,
    config: str,
    splits: int,
    after: Mapping[str, Any],
    *,
    has_bias: bool = False,
    dtype: str = "bfloat16",
) -> KernelVariant:
    """The sum of the parts of a product whose K was split, with what follows it. dtype: of the
    bias, the residual and what is stored."""
    return KernelVariant(
        dtype="",
        config=config,
        pointers={
            "part_SMN_ptr": "float32",
            "bias_N_ptr": dtype,
            **result_pointers(target, after, dtype),
        },
        scalars=dict.fromkeys(("M", "N", "stride_ym", "stride_rm"), "i32"),
        divisible=frozenset({"N", "stride_ym", "stride_rm"}),
        constants={"BLOCK_N": 1024, "SPLIT_K": splits, "HAS_BIAS": has_bias, **after},
    )


KERNELS = (
    TritonKernel(
        name="gemm.dense", op="gemm", module=_MODULE, function="_gemm_kernel", variants=_dense,
        uses_matrix_unit=True, sources=SOURCES,
    ),
    TritonKernel(
        name="gemm.split_k_sum", op="gemm", module=_MODULE, function="_split_k_kernel",
        variants=_sum_of_splits, uses_matrix_unit=False, sources=SOURCES,
    ),
    TritonKernel(
        name="gemm.fp8_block", op="gemm", module=_MODULE, function="_gemm_fp8_block_kernel",
        variants=_fp8_block, uses_matrix_unit=True, sources=SOURCES,
    ),
    TritonKernel(
        name="gemm.mxfp8", op="gemm", module=_MODULE, function="_gemm_mxfp8_kernel",
        variants=_mxfp8, uses_matrix_unit=True, sources=SOURCES,
    ),
    TritonKernel(
        name="gemm.weight_only", op="gemm", module=_MODULE, function="_gemm_weight_only_kernel",
        variants=_weight_only, uses_matrix_unit=True, sources=SOURCES,
    ),
    TritonKernel(
        name="gemm.fp8_weight_only", op="gemm", module="hal_kernels.gemm.fp8_weight_kernels",
        function="_gemm_fp8_weight_kernel", variants=_fp8_weight, uses_matrix_unit=True,
        sources=(_MODULE, *SOURCES, "hal_kernels.kv_write.packed_rows"),
    ),
)  # fmt: skip
