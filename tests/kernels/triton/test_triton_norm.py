"""The Triton norm and rounding kernels in the interpreter against float64 and exact rounding."""

from __future__ import annotations

import pytest
import torch

import hal_kernels.norm.triton as triton_norm
import hal_kernels.quantize.triton as triton_quantize
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.low_precision import quantize_groups
from hal.ops.norm import RmsNormRequest, reference
from hal.ops.quantize import QuantizeRequest

EPS = 1e-6
TOLERANCE = CATALOGUE["norm.rms"].largest_errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("hidden", [64, 576, 1100], ids=lambda h: f"h{h}")
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm(dtype: str, hidden: int, tokens: int, has_residual: bool) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = RmsNormRequest(hidden_size=hidden, dtype=dtype, has_residual=has_residual)
    weight = (torch.rand(hidden) + 0.5).to(torch_dtype)
    kernel = triton_norm.bind(request, gpu("sm_90"), weight=weight, eps=EPS)
    x = (torch.randn(tokens, hidden) * torch.logspace(-3, 2, max(tokens, 1))[:tokens, None]).to(
        torch_dtype
    )
    plain = RmsNormRequest(hidden_size=hidden, dtype=dtype)
    exact_norm = reference(plain, weight=weight, eps=EPS)
    if has_residual:
        residual = torch.randn(tokens, hidden).to(torch_dtype)
        total = x + residual
        y, kept = kernel(x, residual)
        assert kept is residual
        assert torch.equal(kept, total)
        exact = exact_norm(total.double())
    else:
        y, exact = kernel(x), exact_norm(x.double())
    assert y.dtype == torch_dtype
    assert ((y.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_of_zeros_and_of_magnitudes(dtype: str, has_residual: bool) -> None:
    """A row of zeros stays; 1e-4, where eps decides, to 1e4, whose square no float16 holds."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = RmsNormRequest(hidden_size=576, dtype=dtype, has_residual=has_residual)
    weight = (torch.rand(576) + 0.5).to(torch_dtype)
    sizes = torch.cat((torch.zeros(1), torch.logspace(-4, 4, 6)))
    x = (torch.randn(7, 576).clamp(-3, 3) * sizes[:, None]).to(torch_dtype)
    kernel = triton_norm.bind(request, gpu("sm_90"), weight=weight, eps=EPS)
    residual = torch.randn(7, 576).clamp(-3, 3) * sizes[:, None]
    added = residual.to(torch_dtype)
    total = x + added if has_residual else x.clone()
    y, kept = kernel(x, added) if has_residual else (kernel(x), total)
    plain = RmsNormRequest(hidden_size=576, dtype=dtype)
    exact = reference(plain, weight=weight, eps=EPS)(total.double())
    assert torch.equal(kept, total)
    assert not y[0].any()
    assert ((y.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 1e-6).all()


def test_norm_over_each_head_and_with_int8_rows() -> None:
    heads = RmsNormRequest(hidden_size=64, dtype="bfloat16", rows_per_token=3)
    weight = torch.rand(64).bfloat16()
    x = torch.randn(5, 3 * 64).bfloat16()
    y = triton_norm.bind(heads, gpu("sm_90"), weight=weight, eps=EPS)(x)
    exact = reference(heads, weight=weight, eps=EPS)(x.double())
    assert ((y.double() - exact).abs() <= 2.0**-7 * exact.abs() + 1e-6).all()
    rows = RmsNormRequest(hidden_size=64, dtype="bfloat16", quantize="int8_per_token")
    x = torch.cat((torch.randn(5, 64), torch.zeros(1, 64))).bfloat16()
    q, scale = triton_norm.bind(rows, gpu("sm_90"), weight=weight, eps=EPS)(x)
    want, want_scale = reference(rows, weight=weight, eps=EPS)(x.double())
    assert (
        q.int() - want.int()
    ).abs().max() <= 1  # one step, where float32 falls to the other side
    assert torch.allclose(scale.double(), want_scale.double(), rtol=1e-5)


@pytest.mark.parametrize("out_dtype", ["int8", "fp8_e4m3fn", "fp8_e4m3fnuz"])
@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
@pytest.mark.parametrize("group", [32, 128, 0], ids=["g32", "g128", "row"])
def test_rounding_is_exact(out_dtype: str, scale_dtype: str, group: int) -> None:
    request = QuantizeRequest(
        group_size=group, out_dtype=out_dtype, scale_dtype=scale_dtype, width=384, dtype="bfloat16"
    )  # type: ignore[arg-type]
    x = torch.randn(7, 400)[:, :384] * torch.logspace(-6, 4, 7)[:, None]
    x[3] = 0.0
    x = x.bfloat16()
    values, scales = triton_quantize.bind(request, gpu("sm_90"))(x)
    want, want_scales = quantize_groups(
        x, group_size=group, element=out_dtype, scale_kind=scale_dtype
    )
    assert torch.equal(scales, want_scales)
    assert torch.equal(values.view(torch.uint8), want.view(torch.uint8))
