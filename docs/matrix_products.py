"""Matrix products and what they are joined with, in the support matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.formats import FORMATS
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.request import OpRequest
from matrix_sizes import BF16, TOKENS


def _gemm(name: str, **more: Any) -> OpRequest:
    dtype = name if FORMATS[name].is_dense else "bfloat16"
    given: dict[str, Any] = {"n": 4096, "k": 7168, "dtype": dtype, "tokens": TOKENS} | more
    return GemmRequest(weight_format=FORMATS[name], **given)


def _fused(name: str, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"n": 4096, "k": 7168, **BF16} | more
    return FusedGemmRequest(weight_format=FORMATS[name], **given)


def _rounded(name: str, group: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"out_dtype": "fp8_e4m3fn", "out_group_size": group}
    return _fused(name, epilogue="silu_gated", **given, **more)


def _gemm_norm(name: str) -> OpRequest:
    return GemmNormRequest(n=7168, k=4096, weight_format=FORMATS[name], **BF16)


def _experts(name: str, **more: Any) -> OpRequest:
    return GroupedGemmRequest(
        num_experts=256,
        experts_per_token=8,
        n=4096,
        k=7168,
        weight_format=FORMATS[name],
        **(BF16 | more),
    )


PRODUCTS: Mapping[str, Mapping[str, OpRequest]] = {
    "gemm": {name: _gemm(name) for name in FORMATS}
    | {
        "bfloat16 bias": _gemm("bfloat16", has_bias=True),
        "bfloat16 gated": _gemm("bfloat16", epilogue="silu_gated"),
        "fp8_block128_a8 K 1000": _gemm("fp8_block128_a8", k=1000, n=1000),
        "bfloat16 to float32": _gemm("bfloat16", n=256, out_dtype="float32"),
    },
    "grouped_gemm": {
        name: _experts(name)
        for name in (
            "bfloat16",
            "int8_channel_a8",
            "fp8_block128_a8",
            "fp8_block128_ue8m0_a8",
            "fp8_block32_ue8m0_a8",
            "mxfp4",
            "mxfp4_a8",
            "nvfp4_a4",
        )
    }
    | {
        f"{name} gated, clamped": _experts(name, epilogue="silu_gated", clamp=10.0)
        for name in ("bfloat16", "fp8_block128_ue8m0_a8", "mxfp4_a8")
    }
    | {name: _experts(name) for name in ("int8_channel", "int8_g32", "int4_g32", "int4_g32_asym")},
    "batched_gemm": {
        "index scores": BatchedGemmRequest(n=0, k=128, dtype="float32", tokens=TOKENS),
        "bfloat16": BatchedGemmRequest(n=1024, k=4096, **BF16),
        "float64": BatchedGemmRequest(n=16, k=16, dtype="float64", tokens=TOKENS),
    },
    "fused_gemm": {
        "bfloat16 with a residual": _fused("bfloat16", has_residual=True),
        "FP8 128x128 with a residual": _fused("fp8_block128_a8", has_residual=True),
        "FP8 128x128 gated and rounded": _rounded("fp8_block128_a8", 128),
        "FP8 128x128 ue8m0 with a clamped gate": _fused(
            "fp8_block128_ue8m0_a8", epilogue="silu_gated", clamp=10.0
        ),
        "FP8 32x32 ue8m0 gated and rounded": _rounded(
            "fp8_block32_ue8m0_a8", 32, out_scale_dtype="ue8m0"
        ),
        "int4 with a residual": _fused("int4_g32", has_residual=True),
    },
    "gemm_norm": {
        "bfloat16": _gemm_norm("bfloat16"),
        "FP8 128x128": _gemm_norm("fp8_block128_a8"),
        "int4": _gemm_norm("int4_g32"),
    },
}
