"""Products with what follows them: the golden ops against the ops that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.ops.formats import FORMATS, quantize_weight
from hal.ops.fused_gemm import FAMILY, FusedGemmRequest, bytes_moved, reference
from hal.ops.gemm import GemmRequest
from hal.ops.gemm import bytes_moved as product_bytes
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.gemm_norm import bytes_moved as norm_bytes
from hal.ops.gemm_norm import reference as norm_reference
from hal.ops.low_precision import dequantize_groups

T, N, K = 5, 64, 24


def request_of(dtype: str = "float32", **fields: Any) -> FusedGemmRequest:
    given = {"n": N, "k": K, "dtype": dtype, "weight_format": FORMATS[dtype]}
    return FusedGemmRequest(**(given | fields))


def test_residual_bias_and_activation_against_float64() -> None:
    x, weight, bias = torch.randn(T, K), torch.randn(N, K), torch.randn(N)
    residual = torch.randn(T, N) * 100
    request = request_of(has_residual=True, has_bias=True, epilogue="silu")
    inner = x.double() @ weight.double().T + bias.double()
    want = torch.nn.functional.silu(inner) + residual.double()
    kernel = reference(request, weight=weight, bias=bias)
    torch.testing.assert_close(kernel(x, residual).double(), want, rtol=2e-5, atol=2e-5)
    exact = kernel(x.double(), residual.double())
    torch.testing.assert_close(exact, want, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="has_residual=True"):
        kernel(x)


def test_a_residual_is_added_before_the_one_rounding() -> None:
    """A sum of 1 and 2**-9, and of it -1: rounded in between to bfloat16 nothing would be left."""
    x, weight = torch.tensor([[1.0, 2.0**-9]]).bfloat16(), torch.ones(1, 2).bfloat16()
    request = request_of("bfloat16", n=1, k=2, has_residual=True)
    y = reference(request, weight=weight)(x, torch.tensor([[-1.0]]).bfloat16())
    assert float(y) == 2.0**-9


@pytest.mark.parametrize("clamp", [0.0, 1.5])
@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
def test_a_gated_product_in_eight_bits(clamp: float, scale_dtype: str) -> None:
    x, weight = torch.randn(T, K) * torch.logspace(-3, 3, T)[:, None], torch.randn(N, K)
    request = request_of(
        "bfloat16", epilogue="silu_gated", clamp=clamp, out_dtype="fp8_e4m3fn", out_group_size=32,
        out_scale_dtype=scale_dtype,
    )  # fmt: skip
    x, weight = x.bfloat16(), weight.bfloat16()
    values, scales = reference(request, weight=weight)(x)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    want = torch.nn.functional.silu(gate) * up
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (T, 1)
    got = dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind=scale_dtype)
    wide = want.abs().amax(dim=-1, keepdim=True) / 448 * 2
    tolerance = FAMILY.tolerances["fp8_e4m3fn"]
    assert ((got - want).abs() <= tolerance.rtol * want.abs() + 2 * tolerance.atol * wide).all()


@pytest.mark.parametrize("name", ["float32", "fp8_block32_ue8m0_a8", "fp8_block32_ue8m0"])
def test_a_product_with_its_norm_is_both_ops(name: str) -> None:
    form, k = FORMATS[name], 64
    weight: Any = torch.randn(N, k)
    weight = weight if form.is_dense else quantize_weight(weight, form)
    norm_weight, eps = torch.rand(N) + 0.5, 1e-5
    x, residual = torch.randn(T, k), torch.randn(T, N)
    request = GemmNormRequest(n=N, k=k, dtype="float32", weight_format=form)
    kernel = norm_reference(request, weight=weight, norm_weight=norm_weight, eps=eps)
    kept = residual.clone()
    y, total = kernel(x.double(), residual.double())
    fused = request_of(k=k, weight_format=form, has_residual=True)
    want = reference(fused, weight=weight)(x.double(), residual.double())
    torch.testing.assert_close(total, want)
    rows = torch.nn.functional.rms_norm(want, (N,), norm_weight.double(), eps)
    torch.testing.assert_close(y, rows, rtol=1e-12, atol=1e-12)
    assert torch.equal(residual, kept)


def test_bytes_are_those_of_what_is_read_and_stored() -> None:
    plain = GemmRequest(n=N, k=K, dtype="bfloat16", weight_format=FORMATS["bfloat16"])
    assert bytes_moved(request_of("bfloat16", has_residual=True), 7) == product_bytes(plain, 7) + (
        7 * N * 2
    )
    rounded = request_of("bfloat16", out_dtype="fp8_e4m3fn", out_group_size=32)
    assert bytes_moved(rounded, 7) == product_bytes(plain, 7) - 7 * N + 7 * (N // 32) * 4
    norm = GemmNormRequest(n=N, k=K, dtype="bfloat16", weight_format=FORMATS["bfloat16"])
    # Besides the product: the residual in, the sum in again, the norm's weight and its result.
    assert norm_bytes(norm, 7) == product_bytes(plain, 7) + 3 * 7 * N * 2 + N * 2
