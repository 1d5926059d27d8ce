"""Triton products with what follows them, in the interpreter, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.fused_gemm.triton as fused
import hal_kernels.gemm.triton as plain
import hal_kernels.gemm_norm.triton as gemm_norm
from gpu_devices import gpu
from hal.errors import BindingError
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.fused_gemm import FusedGemmRequest, reference
from hal.ops.gemm import GemmRequest
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from kernel_errors import assert_exact

# An e4m3 value is off by half a step of 2**-3 at most, or a whole one where the sum in float32
# fell to the other side of a tie; below 2**-6 of the scale the step is 2**-9.
ROUNDED = (2.0**-3, 2.0**-9)


def request_of(n: int, k: int, name: str, **fields: Any) -> FusedGemmRequest:
    form = FORMATS[name]
    dtype = name if form.is_dense else "bfloat16"
    return FusedGemmRequest(**({"n": n, "k": k, "dtype": dtype, "weight_format": form} | fields))


def rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different magnitude with gaps between them."""
    x = torch.randn(count, width + 16) * torch.logspace(-3, 3, count)[:, None]
    return x.to(dtype)[:, :width]


def weight_of(n: int, k: int, name: str) -> torch.Tensor | QuantizedWeight:
    form = FORMATS[name]
    values = torch.randn(n, k) / k**0.5 * torch.logspace(-1, 1, n)[:, None]
    if form.is_dense:
        return values.to(getattr(torch, name))
    if form.element != "int":
        return quantize_weight(values, form)
    if form.bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scale = torch.rand(form.scale_shape(n, k)) / 127 / k**0.5
        return QuantizedWeight(
            format=form, data=data, scale=scale.half() if form.group_size else scale
        )
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(form.scale_shape(n, k)) / 8 / k**0.5).half()
    least = (
        torch.randint(0, 16, scale.shape) if form.has_zeros else -torch.rand_like(scale) / k**0.5
    )
    return QuantizedWeight(
        format=form, data=data, scale=scale, minimum=None if form.is_symmetric else least.half()
    )


def rounded_input(x: torch.Tensor, name: str, element: str) -> torch.Tensor:
    """What an FP8 product multiplies of x, in float64."""
    form = FORMATS[name]
    group = int(form.group_size or 0)
    is_ue8m0 = form.activation.startswith("mxfp8") or "ue8m0" in form.activation
    kind = "ue8m0" if is_ue8m0 else "float32"
    values, scales = quantize_groups(x, group_size=group, element=element, scale_kind=kind)
    return dequantize_groups(values, scales, element=element, scale_kind=kind).double()


def exact_product(
    x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, name: str, arch: str
) -> torch.Tensor:
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    if isinstance(weight, torch.Tensor):
        return x.double() @ weight.double().T
    known = rounded_input(x, name, element) if FORMATS[name].activation != "float" else x.double()
    return known @ weight.dequantize().double().T


def gated(y: torch.Tensor, clamp: float) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return torch.nn.functional.silu(gate) * up


def assert_close(found: torch.Tensor, exact: torch.Tensor, times: float = 1.0) -> None:
    assert_exact("fused_gemm", found, exact, times=times, floor=1e-7)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("bfloat16", "sm_120"),
        ("float16", "gfx1100"),
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_a8", "gfx942"),
        ("fp8_block32_ue8m0_a8", "sm_90"),
        ("fp8_block32_ue8m0_a8", "sm_120"),
        ("int8_channel", "sm_89"),
        ("int4_g32_asym", "gfx90a"),
        ("int4_g128_zero", "sm_90"),
        ("fp8_block128", "sm_80"),
    ],
)
@pytest.mark.parametrize("shape", [(1, 33, 256), (19, 130, 384), (3, 48, 2176)], ids=str)
def test_residual(shape: tuple[int, int, int], name: str, arch: str) -> None:
    m, n, k = shape
    dtype = getattr(torch, name) if FORMATS[name].is_dense else torch.bfloat16
    weight, x = weight_of(n, k, name), rows(m, k, dtype)
    residual = rows(m, n, dtype)
    has_bias = FORMATS[name].activation == "float" and name != "float16"
    bias = torch.randn(n).to(dtype) if has_bias else None
    request = request_of(n, k, name, has_residual=True, has_bias=has_bias)
    kept = residual.clone()
    found = fused.bind(request, gpu(arch), weight=weight, bias=bias)(x, residual)
    exact = exact_product(x, weight, name, arch) + residual.double()
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype == dtype
    assert torch.equal(residual, kept)
    # A dequantised weight is rounded to bfloat16 before it is multiplied.
    wide = 3 * k**0.5 if FORMATS[name].element == "int" and not FORMATS[name].is_dense else 2.0
    assert_close(found, exact, wide)


@pytest.mark.parametrize("clamp", [0.0, 7.0])
@pytest.mark.parametrize(
    ("name", "arch", "group"),
    [
        ("bfloat16", "sm_120", 0),
        ("bfloat16", "sm_120", 128),
        ("bfloat16", "gfx950", 32),
        ("fp8_block128_a8", "sm_90", 0),
        ("fp8_block128_a8", "sm_120", 128),
        ("fp8_block128_a8", "gfx942", 128),
        ("fp8_block32_ue8m0_a8", "sm_90", 32),
        ("fp8_block32_ue8m0_a8", "sm_120", 0),
        ("fp8_block32_ue8m0_a8", "gfx950", 32),
        ("int8_channel", "sm_90", 0),
        ("int8_g32", "gfx942", 0),
        ("int4_g32_asym", "sm_120", 0),
        ("fp8_block128", "gfx950", 0),
        ("fp8_block32_ue8m0", "sm_80", 0),
    ],
)
@pytest.mark.parametrize("shape", [(1, 128, 256), (19, 384, 384), (2, 256, 2176)], ids=str)
@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
def test_gated_and_rounded(
    shape: tuple[int, int, int], name: str, arch: str, group: int, clamp: float, scale_dtype: str
) -> None:
    m, n, k = shape
    if not group and (scale_dtype == "ue8m0" or not clamp):
        pytest.skip("nothing to round, or what the op gemm does")
    weight, x = weight_of(2 * n, k, name), rows(m, k).clamp(-50, 50)
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    fields = {"out_group_size": group, "out_dtype": element, "out_scale_dtype": scale_dtype}
    is_alone = FORMATS[name].activation == "float"  # no FP8 operand before the bias
    bias = torch.randn(2 * n).bfloat16() if is_alone and not group else None
    request = request_of(
        2 * n, k, name, epilogue="silu_gated", clamp=clamp, has_bias=bias is not None,
        **(fields if group else {}),
    )  # fmt: skip
    found = fused.bind(request, gpu(arch), weight=weight, bias=bias)(x)
    exact = exact_product(x, weight, name, arch)
    exact = gated(exact if bias is None else exact + bias.double(), clamp)
    if not group:
        # A dequantised weight is rounded to bfloat16 before it is multiplied.
        is_integer = FORMATS[name].element == "int" and not FORMATS[name].is_dense
        assert_close(found, exact, 3 * k**0.5 if is_integer else 2.0)
        return
    assert_rounded(found, exact, group, element, scale_dtype)


def assert_rounded(
    found: Any, exact: torch.Tensor, group: int, element: str, scale_dtype: str
) -> None:
    """(values, scales) against float64: each value within a step of e4m3 of its group's scale."""
    values, scales = found
    m, n = exact.shape
    assert values.shape == (m, n)
    assert scales.shape == (m, n // group)
    largest = 240.0 if element.endswith("fnuz") else 448.0
    peak = exact.abs().unflatten(-1, (-1, group)).amax(dim=-1)
    ideal = torch.where(peak > 0, peak / largest, 1.0)
    if scale_dtype == "ue8m0":
        assert scales.dtype == torch.uint8
        wide = 2.0 ** (scales.double() - 127)
        # The next power of two; at an exact one the float32 sum decides.
        assert (wide >= ideal * (1 - 2.0**-12)).all()
        assert (wide <= 2.0 * ideal * 1.001).all()
    else:
        wide = scales.double()
        assert ((wide - ideal).abs() <= 2.0**-12 * ideal).all()
    decoded = values.double().unflatten(-1, (-1, group)) * wide[..., None]
    want = exact.unflatten(-1, (-1, group))
    allowed = ROUNDED[0] * want.abs() + 2.0 * ROUNDED[1] * wide[..., None]
    assert ((decoded - want).abs() <= allowed).all()


@pytest.mark.parametrize("name", ["bfloat16", "fp8_block128_a8", "fp8_block32_ue8m0_a8"])
def test_rows_of_zeros_and_of_what_is_not_finite(name: str) -> None:
    """A group of zeros has the scale 1, one with a value that is not finite the scale NaN."""
    group = 32 if "32" in name else 128
    request = request_of(
        256, 256, name, epilogue="silu_gated", clamp=7.0, out_group_size=group,
        out_dtype="fp8_e4m3fn",
    )  # fmt: skip
    weight, x = weight_of(256, 256, name), torch.randn(3, 256).bfloat16()
    x[1], x[2, 5] = 0.0, float("nan")
    values, scales = fused.bind(request, gpu("sm_90"), weight=weight)(x)
    assert values[1].float().abs().max() == 0
    assert (scales[1] == 1.0).all()
    assert scales[2].isnan().all()
    assert scales[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_120"),
        ("fp8_block128_a8", "gfx942"),
        ("fp8_block32_ue8m0_a8", "sm_90"),
        ("fp8_block32_ue8m0_a8", "sm_120"),
    ],
)
def test_the_next_product_rounds_nothing(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gate_up, its activation and down: the rounded rows go into the next product as they are."""
    m, hidden, width = 5, 256, 128
    form, element = FORMATS[name], "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    up, down = weight_of(2 * width, hidden, name), weight_of(hidden, width, name)
    group = int(form.group_size or 0)
    scale_dtype = "ue8m0" if group == 32 else "float32"
    request = request_of(
        2 * width, hidden, name, epilogue="silu_gated", clamp=9.0, out_group_size=group,
        out_dtype=element, out_scale_dtype=scale_dtype,
    )  # fmt: skip
    x = torch.randn(m, hidden).bfloat16()
    values, scales = fused.bind(request, gpu(arch), weight=up)(x)
    product = plain.bind(
        GemmRequest(n=hidden, k=width, dtype="bfloat16", weight_format=form),
        gpu(arch),
        weight=down,
    )
    with pytest.raises(ValueError, match="rounded rows"):
        product((values.view(torch.uint8), scales))
    found = product((values, scales))
    wide = scales.double() if scales.dtype != torch.uint8 else 2.0 ** (scales.double() - 127)
    rounded = (values.double().unflatten(-1, (-1, group)) * wide[..., None]).flatten(-2)
    assert isinstance(down, QuantizedWeight)
    assert_close(found, rounded @ down.dequantize().double().T)
    golden = reference(request, weight=up)(x)
    assert golden[0].shape == values.shape
    assert golden[1].dtype == scales.dtype


def test_no_rows() -> None:
    request = request_of(48, 64, "bfloat16", has_residual=True)
    kernel = fused.bind(request, gpu("sm_90"), weight=weight_of(48, 64, "bfloat16"))
    none = torch.empty(0, 64, dtype=torch.bfloat16)
    assert kernel(none, torch.empty(0, 48, dtype=torch.bfloat16)).shape == (0, 48)


def test_what_is_not_written_or_not_asked_for_is_refused() -> None:
    weight = weight_of(48, 64, "bfloat16")
    both = request_of(
        64, 64, "bfloat16", has_residual=True, out_group_size=32, out_dtype="fp8_e4m3fn"
    )
    with pytest.raises(BindingError, match="residual-rounded32"):
        fused.bind(both, gpu("sm_90"), weight=weight)
    request = request_of(48, 64, "bfloat16", has_residual=True)
    kernel = fused.bind(request, gpu("sm_90"), weight=weight)
    x = torch.randn(2, 64).bfloat16()
    with pytest.raises(ValueError, match="has_residual=True"):
        kernel(x)
    with pytest.raises(ValueError, match=r"required a residual \[2, 48\]"):
        kernel(x, torch.randn(3, 48).bfloat16())
    rounded = request_of(64, 64, "bfloat16", out_group_size=32, out_dtype="fp8_e4m3fn")
    with pytest.raises(BindingError, match="fp8_e4m3fnuz"):
        fused.bind(rounded, gpu("gfx942"), weight=weight)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("bfloat16", "sm_120"), ("fp8_block128_a8", "gfx942"), ("int4_g32_asym", "sm_80")],
)
@pytest.mark.parametrize("shape", [(1, 48, 2176), (19, 130, 256)], ids=str)
def test_a_product_with_residual_and_norm(
    shape: tuple[int, int, int], name: str, arch: str
) -> None:
    m, n, k = shape
    weight, x, residual = weight_of(n, k, name), rows(m, k), rows(m, n)
    norm_weight, kept = torch.rand(n).bfloat16() + 0.5, residual.clone()
    request = GemmNormRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name])
    kernel = gemm_norm.bind(request, gpu(arch), weight=weight, norm_weight=norm_weight, eps=1e-6)
    y, total = kernel(x, residual)
    assert torch.equal(residual, kept)
    wide = 3 * k**0.5 if name.startswith("int4") else 2.0
    exact = exact_product(x, weight, name, arch) + residual.double()
    assert_close(total, exact, wide)
    # Of the sum as it was stored, which is what the next sublayer adds to.
    want = torch.nn.functional.rms_norm(total.double(), (n,), norm_weight.double(), 1e-6)
    assert_close(y, want, 2.0)
