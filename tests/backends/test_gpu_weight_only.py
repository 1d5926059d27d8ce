"""What is said of products whose activations would stay as they are where the format rounds them:
the kernel that multiplies such a weight, or that none is written."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_devices import gpu
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal_backends.gpu.triton_kernels import candidates


@pytest.mark.parametrize(
    ("op", "name", "kernel"),
    [
        ("gemm", "fp8_block32_a8", "gemm.fp8_weight_only"),
        ("gemm", "fp8_block128_ue8m0_a8", "gemm.fp8_weight_only"),
        ("gemm", "int8_channel_a8", "gemm.weight_only"),
        ("gemm", "int4_g32_asym_a8", "gemm.weight_only"),
        ("gemm", "mxfp4_a8", ""),
        ("gemm", "nvfp4_a4", ""),
        ("grouped_gemm", "fp8_block32_a8", ""),
        ("grouped_gemm", "fp8_block32_ue8m0_a8", "grouped_gemm.weight_only"),
        ("grouped_gemm", "fp8_block128_a8", "grouped_gemm.weight_only"),
        ("grouped_gemm", "mxfp4_a8", "grouped_gemm.weight_only"),
        ("grouped_gemm", "int8_channel_a8", "grouped_gemm.integer"),
        ("grouped_gemm", "fp8_channel_a8", ""),
    ],
)
def test_what_is_missing_is_told_apart(op: str, name: str, kernel: str) -> None:
    device = dataclasses.replace(gpu("sm_90"), features=frozenset({"triton", "matrix.bfloat16"}))
    form = FORMATS[name]
    request = (
        GemmRequest(n=64, k=256, dtype="bfloat16", weight_format=form)
        if op == "gemm"
        else GroupedGemmRequest(
            num_experts=4, experts_per_token=2, n=64, k=256, dtype="bfloat16", weight_format=form
        )
    )
    (offer,) = [one for one in candidates(op, device) if one.name.endswith("triton_weight_only")]
    (reason,) = [one for one in offer.not_supported_reasons(request) if one.what == "kernel"]
    assert reason.required == f"a kernel for weights of {name} with the activations as they are"
    if kernel:
        assert reason.found.startswith(f"{kernel} takes formats with float activations only")
    else:
        assert reason.found.startswith("not written yet")
