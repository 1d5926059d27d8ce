"""The specialisations of the Triton products with what follows them. Free of torch.

The kernels are those of the package `gemm`, in its configurations; of weights alone quantised:
`gemm.weight_only_variants`. A form is compiled with all that it may have to do, so that it stands
for those with less: a gate with a clamp, a gate and a residual with a bias, scales as ue8m0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.ops.low_precision import LARGEST
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.split_k_schedule import SPLITS
from hal_kernels.gemm.triton_variants import (
    GATED,
    PLAIN,
    SCALED_UNITS,
    SOURCES,
    WIDENED_UNITS,
    configurations,
    dense_variant,
    fp8_variant,
    split_k_variant,
)
from hal_kernels.gemm.widened_variants import GROUPS, WIDENED_SOURCES, widened_variant
from hal_kernels.gemm.widened_variants import MODULE as _WIDENED

_MODULE = "hal_kernels.gemm.triton_kernels"
FLOAT16_SUFFIX = "-float16"  # of sums of parts, whose operands are float32 whatever is stored
WITH_BIAS = frozenset({"residual", "gated"})  # forms of which a bias may be before
_RESIDUAL: dict[str, Any] = {"HAS_RESIDUAL": True}
_CLAMPED: dict[str, Any] = {**GATED, "CLAMP": 10.0}


def _rounded(target: Target, group: int) -> dict[str, Any]:
    largest = LARGEST[target.fp8_dtype]
    return {"OUT_GROUP": group, "OUT_LARGEST": largest, "OUT_UE8M0": True}


def _converts(target: Target) -> bool:
    """Without FP8 in the instruction set Triton does not convert to it on NVIDIA."""
    return target.arch != "sm_80"


def _forms(target: Target, groups: Sequence[int]) -> list[tuple[str, Mapping[str, Any]]]:
    """What may follow a product, by name, as constants."""
    forms: list[tuple[str, Mapping[str, Any]]] = [
        ("residual", PLAIN | _RESIDUAL),
        ("gated", PLAIN | _CLAMPED),
    ]
    for group in groups if _converts(target) else ():
        rounded = _rounded(target, group)
        forms.append((f"rounded{group}", PLAIN | rounded))
        forms.append((f"gated-rounded{group}", PLAIN | _CLAMPED | rounded))
    return forms


def dense_table(form: str) -> str:
    """The table of configurations of a dense product with what follows it."""
    if "rounded" in form:
        return "gemm_rounded"
    return "gemm_gated" if "gated" in form else "gemm"


def _dense(target: Target) -> Sequence[KernelVariant]:
    variants = []
    for form, after in _forms(target, (32, 128)):
        for name, given in configurations(dense_table(form), target).items():
            for dtype in ("bfloat16", "float16") if form == "residual" else ("bfloat16",):
                # Where K is split this kernel stores parts alone: as that of `gemm.dense`.
                if name != "split":
                    config = f"{name}-{form}"
                    has_bias = form in WITH_BIAS
                    variants.append(dense_variant(target, dtype, config, given, has_bias, after))
    return variants


def _sum_of_splits(target: Target) -> Sequence[KernelVariant]:
    variants = [
        split_k_variant(target, f"split{n}-{form}", n, after, has_bias=form in WITH_BIAS)
        for n in SPLITS
        for form, after in _forms(target, (32, 128))
    ]
    name, after = f"split4-residual{FLOAT16_SUFFIX}", PLAIN | _RESIDUAL
    half = split_k_variant(target, name, 4, after, has_bias=True, dtype="float16")
    return (*variants, half)


def fp8_table_entry(stem: str, form: str, *, is_small: bool) -> str:
    """The configuration of an FP8 product: what is not merely added to needs whole groups."""
    return stem + "-gated" * (form != "residual") + "-small" * is_small


def _fp8_block(target: Target) -> Sequence[KernelVariant]:
    if target.arch in WIDENED_UNITS:
        return ()
    table = configurations("gemm_fp8_block", target)
    return tuple(
        fp8_variant(
            target,
            f"g{group}-{form}{'-small' * small}",
            table[fp8_table_entry(f"g{group}", form, is_small=small)],
            "float32",
            after,
        )
        for group in (128, 32)
        for form, after in _forms(target, (group,))
        for small in (False, True)
    )


def _fp8_widened(target: Target) -> Sequence[KernelVariant]:
    if target.arch not in WIDENED_UNITS:
        return ()
    return tuple(
        widened_variant(target, f"g{group}-{form}{'-small' * small}", group, after)
        for group in GROUPS
        for form, after in _forms(target, (group,))
        for small in (False, True)
    )


def _mxfp8(target: Target) -> Sequence[KernelVariant]:
    if target.arch not in SCALED_UNITS:
        return ()
    table = configurations("gemm_mxfp8", target)
    return tuple(
        fp8_variant(
            target,
            f"weight32-{form}{'-small' * small}",
            table[fp8_table_entry("weight32", form, is_small=small)],
            "uint8",
            after,
        )
        for form, after in _forms(target, (32,))
        for small in (False, True)
    )


KERNELS = (
    TritonKernel(
        name="fused_gemm.dense", op="fused_gemm", module=_MODULE, function="_gemm_kernel",
        variants=_dense, uses_matrix_unit=True, sources=SOURCES,
    ),
    TritonKernel(
        name="fused_gemm.split_k_sum", op="fused_gemm", module=_MODULE, function="_split_k_kernel",
        variants=_sum_of_splits, uses_matrix_unit=False, sources=SOURCES,
    ),
    TritonKernel(
        name="fused_gemm.fp8_block", op="fused_gemm", module=_MODULE,
        function="_gemm_fp8_block_kernel", variants=_fp8_block, uses_matrix_unit=True,
        sources=SOURCES,
    ),
    TritonKernel(
        name="fused_gemm.fp8_widened", op="fused_gemm", module=_WIDENED,
        function="_gemm_fp8_widened_kernel", variants=_fp8_widened, uses_matrix_unit=True,
        sources=WIDENED_SOURCES,
    ),
    TritonKernel(
        name="fused_gemm.mxfp8", op="fused_gemm", module=_MODULE, function="_gemm_mxfp8_kernel",
        variants=_mxfp8, uses_matrix_unit=True, sources=SOURCES,
    ),
)  # fmt: skip
