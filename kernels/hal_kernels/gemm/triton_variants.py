"""The specialisations of the Triton products that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.split_k_schedule import SPLITS
from hal_kernels.tuning.default_tables import load_default_tables

_MODULE = "hal_kernels.gemm.triton_kernels"
_CONFIGS = load_default_tables(Path(__file__).with_name("triton_configs.json"))
SIZES = {"M": "i32", "N": "i32", "K": "i32"}
STRIDES = ("stride_xm", "stride_wn", "stride_ym", "stride_rm")
SOURCES = ("hal_kernels.gemm.epilogues", "hal_kernels.quantize.triton_kernels")
# Architectures whose matrix unit multiplies scales of 32 columns in; others take blocks of FP8.
SCALED_UNITS = frozenset({"sm_100", "sm_103", "sm_120", "gfx950"})
# Those whose matrix unit has no FP8: products of it are those of `widened_variants`.
WIDENED_UNITS = frozenset({"sm_80", "gfx90a", "gfx1100"})
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


# Forms of a dense product: table of tiles, suffix, epilogue and whether it has a bias. A bias
# stands for none, and an activation too.
DENSE_KINDS = (
    ("gemm", "", 0, False),
    ("gemm", "-bias", 1, True),
    ("gemm_gated", "-gated", 2, True),
)


def _dense(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for dtype in ("bfloat16", "float16"):
        for table, suffix, epilogue, has_bias in DENSE_KINDS:
            after = {**PLAIN, "EPILOGUE": epilogue}
            for name, given in configurations(table, target).items():
                if (name, suffix) != ("wide", "-bias"):  # its registers would spill
                    config = name + suffix
                    variants.append(dense_variant(target, dtype, config, given, has_bias, after))
        # Results in float32 are those of routers and heads. Where K is split it stores parts alone.
        for name, given in configurations("gemm", target).items():
            if name != "split":
                config = f"{name}-float32"
                plain = dense_variant(target, dtype, config, given, False, PLAIN)
                variants.append(stored_as(plain, "float32"))
    return variants


def stored_as(variant: KernelVariant, dtype: str) -> KernelVariant:
    """The variant with its result in another type than its rows."""
    stored = {"y_MN_ptr": dtype, "y_scale_MG_ptr": dtype}
    return replace(variant, pointers={**variant.pointers, **stored})


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
        scalars={**SIZES, **dict.fromkeys(STRIDES, "i32")},
        divisible=frozenset({"N", "K", *STRIDES}),
        constants={**constants, **after, "HAS_BIAS": has_bias},
        num_warps=warps,
        num_stages=stages,
    )


# What may follow a product of FP8 operands, by suffix; gated ones have tiles of their own. A bias
# is a residual whose rows are all the same.
FP8_AFTER: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "-bias": {"HAS_RESIDUAL": True},
    "-silu": {"EPILOGUE": 1},
    "-float32": {},
}


def _fp8_block(target: Target) -> Sequence[KernelVariant]:
    if target.arch in WIDENED_UNITS:
        return ()
    return _of_two_fp8(target, "gemm_fp8_block", "float32", FP8_AFTER)


def _mxfp8(target: Target) -> Sequence[KernelVariant]:
    if target.arch not in SCALED_UNITS:
        return ()  # the compiler would scale and widen the operands: blocks of FP8 serve there
    return _of_two_fp8(target, "gemm_mxfp8", "uint8", FP8_AFTER)


def _of_two_fp8(
    target: Target, table: str, scale: str, forms: Mapping[str, Mapping[str, Any]]
) -> Sequence[KernelVariant]:
    variants = []
    for name, given in configurations(table, target).items():
        if "-gated" in name:
            variants.append(fp8_variant(target, name, given, scale, PLAIN | GATED))
            continue
        stem, small = name.removesuffix("-small"), "-small" * name.endswith("-small")
        for suffix, after in forms.items() if stem != "large" else (("", {}),):
            variant = fp8_variant(
                target, f"{stem}{suffix}{small}", given, scale, PLAIN | dict(after)
            )
            variants.append(stored_as(variant, "float32") if suffix == "-float32" else variant)
    return variants


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
        scalars={**SIZES, **dict.fromkeys((*STRIDES, "stride_xs", "stride_ws"), "i32")},
        divisible=frozenset({"N", "K", *STRIDES}),
        constants={**constants, **after},
        num_warps=warps,
        num_stages=stages,
    )


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
)  # fmt: skip
