"""What products are measured with while they are tuned: a weight of each format that they take."""

from __future__ import annotations

import pytest
import torch

from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.quantized_weight import QuantizedWeight
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.targets import find_target
from hal_kernels.gemm.triton_tuning import shape_of
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx950", "gfx1100"])
def test_a_call_ends_in_the_kernel_and_class_that_it_is_made_for(arch: str) -> None:
    """Or a measurement would refuse what a plan names."""
    target, seen = find_target(arch), 0
    for kernel, form in CALLS:
        dtypes = {variant.dtype for variant in find_kernel(kernel).variants(target)}
        for dtype in dtypes & set(TUNABLE[kernel].dtypes(target)):
            shape = shape_class(dtype, form, 512, {"n": 512, "k": 4096})
            call = TUNABLE[kernel].call(shape, "cpu")
            assert shape_of(call.request, gpu(arch)) == (kernel, shape)  # type: ignore[arg-type]
            seen += 1
    assert seen >= 20
