"""Cases of products that store what follows them: a residual added, a gate, a rounding to FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional

from gpu_cases.case import BF16, FP8_RATE, Bench, Case, CaseMaker, reference_case
from gpu_cases.judging import error_of
from gpu_cases.products import integer_weight, rows_of
from hal.ops.formats import FORMATS, quantize_weight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.low_precision import dequantize_groups
from hal.ops.request import TokenRange
from hal_kernels.fused_gemm import triton as fused_gemm
from hal_kernels.gemm_norm import triton as gemm_norm

_SUM = 2.0**-6
# One step of e4m3, for a tie that fell to the other side: of a row's largest value, which is 448
# times its scale, or at least 256 times one that is a power of two where the step is that wide.
_ONE_STEP = {"float32": 0.08, "ue8m0": 0.13}
_SPLIT = ("gemm.dense", "fused_gemm.split_k_sum")


def makers() -> Iterator[CaseMaker]:
    for rows, kernels in (("few", _SPLIT), ("many", ("fused_gemm.dense",))):
        for form in ("residual", "gated", "rounded128", "rounded32-ue8m0"):
            yield CaseMaker(
                name=f"gemm bf16 with {form}, {rows} rows",
                kernels=kernels,
                make=lambda b, r=rows, f=form: fused_case(b, "bfloat16", r, f),
            )
    for name, kernel, arch in (
        ("fp8_block128_a8", "fused_gemm.fp8_block", ""),
        ("fp8_block32_ue8m0_a8", "fused_gemm.mxfp8", "sm_120"),
    ):
        group = FORMATS[name].group_size
        for form in ("residual", f"gated-rounded{group}", f"gated-rounded{group}-ue8m0"):
            yield CaseMaker(
                name=f"gemm {name} with {form}, by {kernel}",
                kernels=(kernel, "quantize.groups"),
                make=lambda b, n=name, f=form, a=arch: fused_case(b, n, "many", f, a),
            )
    for form in ("residual", "gated"):
        yield CaseMaker(
            name=f"gemm fp8_block128_a8 with {form}, decoded to float16",
            kernels=("fused_gemm.fp8_widened", "quantize.codes"),
            make=lambda b, f=form: fused_case(b, "fp8_block128_a8", "many", f, "sm_80"),
        )
    for name, form, kernel in (
        ("int4_g32", "residual", "fused_gemm.weight_only"),
        ("int4_g32", "gated", "gemm.weight_only"),
        ("fp8_block128", "residual", "fused_gemm.fp8_weight_only"),
        ("fp8_block128", "gated", "gemm.fp8_weight_only"),
    ):
        yield CaseMaker(
            name=f"gemm {name} with {form}",
            kernels=(kernel,),
            make=lambda b, n=name, f=form: fused_case(b, n, "many", f),
        )
    yield CaseMaker(
        name="gemm bf16 with residual and norm",
        kernels=("fused_gemm.dense", "norm.rms"),
        make=gemm_norm_case,
    )


def fused_case(bench: Bench, name: str, rows: str, form: str, arch: str = "") -> Case:
    """form: what follows the product, as the names of configurations have it."""
    tokens, n = rows_of(bench, rows), bench.size(8192, 256)
    k = bench.size(4096, 2048 if rows == "few" and name == "bfloat16" else 256)
    kind, has_residual, is_gated = FORMATS[name], "residual" in form, "gated" in form
    scale_kind: Any = "ue8m0" if form.endswith("-ue8m0") else "float32"
    group = int(form.removesuffix("-ue8m0").rpartition("rounded")[2]) if "rounded" in form else 0
    epilogue: Any = "silu_gated" if is_gated else "none"
    request = FusedGemmRequest(
        n=n, k=k, dtype="bfloat16", weight_format=kind, epilogue=epilogue,
        clamp=7.0 if is_gated else 0.0, has_residual=has_residual, out_group_size=group,
        out_dtype="fp8_e4m3fn" if group else "", out_scale_dtype=scale_kind,
        tokens=TokenRange(1, tokens),
    )  # fmt: skip
    weight = _weight(bench, name, n, k)
    wide = weight if kind.is_dense else weight.dequantize().to(BF16)
    x, residual = bench.bf16(tokens, k), bench.bf16(tokens, request.out_features)

    def theirs() -> torch.Tensor:
        y = functional.linear(x, wide)
        if is_gated:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)
        return y + residual if has_residual else y

    def judge(found: Any, exact: Any) -> float:
        if not group:
            return error_of(found, exact)
        return error_of(_decoded(found, scale_kind), _decoded(exact, scale_kind))

    return reference_case(
        f"gemm {name} with {form} {tokens}x{n}x{k}",
        request,
        fused_gemm.bind,
        bench,
        (x, residual) if has_residual else (x,),
        tokens=tokens,
        tolerance=_ONE_STEP[scale_kind] if group else _SUM,
        judge=judge,
        spec=bench.as_arch(arch) if arch else None,
        static={"weight": weight},
        theirs=theirs,
        library="cuBLAS on bf16 and what follows" + (", without the rounding" if group else ""),
        rate=FP8_RATE if kind.activation != "float" else 1.0,
    )


def _weight(bench: Bench, name: str, n: int, k: int) -> Any:
    kind, dense = FORMATS[name], bench.randn(n, k) / k**0.5
    if kind.is_dense:
        return dense.to(BF16)
    return (
        integer_weight(bench, name, n, k) if kind.element == "int" else quantize_weight(dense, kind)
    )


def _decoded(result: Any, scale_kind: str) -> torch.Tensor:
    """The numbers of values and scales."""
    values, scales = result
    return dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind=scale_kind).double()


def gemm_norm_case(bench: Bench) -> Case:
    tokens, n, k = bench.size(4096, 20), bench.size(4096, 96), bench.size(4096, 128)
    weight, norm_weight = (bench.randn(n, k) / k**0.5).to(BF16), (bench.randn(n).abs() + 0.5)
    x, residual = bench.bf16(tokens, k), bench.bf16(tokens, n)
    scale = norm_weight.to(BF16)

    def theirs() -> torch.Tensor:
        return functional.rms_norm(functional.linear(x, weight) + residual, (n,), scale, 1e-6)

    return reference_case(
        f"gemm bf16 with residual and norm {tokens}x{n}x{k}",
        GemmNormRequest(
            n=n, k=k, dtype="bfloat16", weight_format=FORMATS["bfloat16"],
            tokens=TokenRange(1, tokens),
        ),
        gemm_norm.bind,
        bench,
        (x, residual),
        tokens=tokens,
        tolerance=_SUM,
        static={"weight": weight, "norm_weight": scale, "eps": 1e-6},
        theirs=theirs,
        library="cuBLAS, sum and rms_norm",
    )  # fmt: skip
