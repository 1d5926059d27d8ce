"""What products are measured with while they are tuned: a weight of each format that they take."""

from __future__ import annotations

import pytest
import torch

from hal.ops import CATALOGUE
from hal.ops.quantized_weight import QuantizedWeight
from hal_kernels.tuning.shapes import shape_class
from hal_kernels.tuning.tunable_kernels import TUNABLE

CALLS = [
    (kernel, form)
    for kernel in (
        "gemm.fp8_block",
        "gemm.fp8_weight_only",
        "gemm.fp8_widened",
        "gemm.mxfp8",
        "gemm.weight_only",
    )
    for form in TUNABLE[kernel].forms
]


@pytest.mark.parametrize(("kernel", "form"), CALLS)
def test_the_reference_takes_the_call(kernel: str, form: str) -> None:
    shape = shape_class("bfloat16", form, 16, {"n": 64, "k": 256})
    call = TUNABLE[kernel].call(shape, "cpu")
    weight = call.static["weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.scale.shape == weight.format.scale_shape(*weight.shape)
    got = CATALOGUE["gemm"].reference(call.request, **call.static)(*call.args)
    assert got.shape[0] == 16
    assert torch.isfinite(got).all()
    assert got.abs().max() > 0
