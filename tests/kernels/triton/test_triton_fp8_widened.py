"""Products of FP8 operands that are decoded to float16, in the interpreter, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import hal_kernels.fused_gemm.triton as fused
import hal_kernels.gemm.triton as plain
import hal_kernels.gemm_norm.triton as gemm_norm
import hal_kernels.grouped_gemm.triton as grouped
from gpu_devices import gpu
from hal.errors import BindingError
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest, GroupedGemmRequest, apply_epilogue
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.request import TokenRange
from hal.reasons import ReasonKind
from hal_kernels.fused_gemm.triton_limits import not_supported_reasons as fused_limits
from hal_kernels.gemm.triton_limits import choose_kernel
from hal_kernels.gemm.triton_limits import not_supported_reasons as gemm_limits
from hal_kernels.gemm.widened_kernels import _half_of_e4m3
from hal_kernels.grouped_gemm.triton_limits import not_supported_reasons as grouped_limits
from kernel_errors import assert_exact

BLOCKS = ["fp8_block128_a8", "fp8_block128_ue8m0_a8", "fp8_block32_ue8m0_a8"]
ARCHES = ["gfx1100", "gfx90a", "sm_80"]


@triton.jit
def _decode_kernel(codes_ptr, y_ptr):
    at = tl.arange(0, 256)
    tl.store(y_ptr + at, _half_of_e4m3(tl.load(codes_ptr + at)))


def test_every_code_but_nan_is_exact_in_float16() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    found = torch.full((256,), float("nan"), dtype=torch.float16)
    _decode_kernel[(1,)](codes, found)
    known = codes.view(torch.float8_e4m3fn).double()
    is_number = ~known.isnan()
    assert int(is_number.sum()) == 254
    assert torch.equal(found.double()[is_number], known[is_number])
    assert float(found[is_number & (known != 0)].abs().min()) >= 2.0**-14  # normal in float16


def rows(count: int, width: int) -> torch.Tensor:
    """Rows of very different magnitude with gaps between them."""
    x = torch.randn(count, width + 16) * torch.logspace(-3, 3, count)[:, None]
    return x.bfloat16()[:, :width]


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """What a product multiplies of x, in float64."""
    form = FORMATS[name]
    is_ue8m0 = "ue8m0" in form.activation or form.activation.startswith("mxfp8")
    kind = "ue8m0" if is_ue8m0 else "float32"
    group = int(form.group_size or 0)
    width = x.shape[1]
    x = torch.nn.functional.pad(x, (0, -width % group))  # zeros change no group's largest value
    values, scales = quantize_groups(x, group_size=group, element="fp8_e4m3fn", scale_kind=kind)
    back = dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind=kind)
    return back.double()[:, :width]


def weight_of(n: int, k: int, name: str) -> QuantizedWeight:
    values = torch.randn(n, k) / k**0.5 * torch.logspace(-1, 1, n)[torch.randperm(n)][:, None]
    return quantize_weight(values, FORMATS[name])


def request_of(n: int, k: int, name: str, **fields: Any) -> GemmRequest:
    return GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name], **fields)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("form", ["plain", "bias", "silu", "gated", "float32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 384), (3, 130, 200), (37, 160, 288)], ids=str)
def test_product(m: int, n: int, k: int, form: str, name: str, arch: str) -> None:
    """Tails of rows, columns and K: within a step, a group, and a group that has one step only."""
    k = k if "128" in name else -(-k // 32) * 32
    epilogue = {"silu": "silu", "gated": "silu_gated"}.get(form, "none")
    stored = 2 * n if form == "gated" else n
    weight, x = weight_of(stored, k, name), rows(m, k).clamp(-50, 50)
    bias = (torch.randn(stored) * 2).bfloat16() if form == "bias" else None
    request = request_of(
        stored, k, name, has_bias=bias is not None, epilogue=epilogue, tokens=TokenRange(1, m),
        out_dtype="float32" if form == "float32" else "",
    )  # fmt: skip
    choice = choose_kernel(request, gpu(arch))
    assert getattr(choice, "kernel", "") == "gemm.fp8_widened"
    found = plain.bind(request, gpu(arch), weight=weight, bias=bias)(x)
    exact = rounded(x, name) @ weight.dequantize().double().T
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype == (torch.float32 if form == "float32" else torch.bfloat16)
    assert_exact("gemm", found, apply_epilogue(epilogue, exact), times=2.0, floor=1e-6)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("m", [2, 19])
def test_the_largest_and_the_smallest_codes(m: int, arch: str) -> None:
    """448 times 448 in every column is far beyond float16, and is summed in float32; a product of
    the two smallest codes is 2**-18."""
    k, name = 512, "fp8_block128_a8"
    request = request_of(128, k, name)
    large = QuantizedWeight(
        format=FORMATS[name], data=torch.full((128, k), 448.0).to(torch.float8_e4m3fn),
        scale=torch.ones(1, 4),
    )  # fmt: skip
    small = QuantizedWeight(
        format=FORMATS[name], data=torch.full((128, k), 2.0**-9).to(torch.float8_e4m3fn),
        scale=torch.ones(1, 4),
    )  # fmt: skip
    scales = torch.ones(m, 4)
    for weight, code in ((large, 448.0), (small, 2.0**-9)):
        x = torch.full((m, k), code).to(torch.float8_e4m3fn)
        found = plain.bind(request, gpu(arch), weight=weight)((x, scales))
        exact = torch.full((m, 128), k * code * code, dtype=torch.float64)
        assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("arch", ARCHES)
def test_a_row_that_is_no_number_stays_one(arch: str) -> None:
    """The codes of its groups mean nothing: their scales are NaN."""
    name, k = "fp8_block128_a8", 384
    weight, x = weight_of(96, k, name), rows(5, k)
    x[2, 200] = float("nan")
    x[3, 7] = float("inf")
    found = plain.bind(request_of(96, k, name), gpu(arch), weight=weight)(x)
    assert found[2:4].isnan().all()
    assert found[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["fp8_block128_a8", "fp8_block32_ue8m0_a8"])
@pytest.mark.parametrize("m", [3, 21])
def test_what_follows(m: int, name: str, arch: str) -> None:
    """A residual, a clamped gate, a rounded result and both."""
    n, k, group = 256, 320, int(FORMATS[name].group_size or 0)
    weight, x, residual = weight_of(n, k, name), rows(m, k).clamp(-50, 50), rows(m, n)
    exact = rounded(x, name) @ weight.dequantize().double().T
    shape: dict[str, Any] = {
        "n": n, "k": k, "dtype": "bfloat16", "weight_format": FORMATS[name],
        "tokens": TokenRange(1, m),
    }  # fmt: skip
    added = FusedGemmRequest(**shape, has_residual=True)
    found = fused.bind(added, gpu(arch), weight=weight)(x, residual)
    assert_exact("fused_gemm", found, exact + residual.double(), times=2.0, floor=1e-7)
    gate, up = exact.chunk(2, dim=-1)
    gated = torch.nn.functional.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)
    clamped = FusedGemmRequest(**shape, epilogue="silu_gated", clamp=7.0)
    found = fused.bind(clamped, gpu(arch), weight=weight)(x)
    assert_exact("fused_gemm", found, gated, times=2.0, floor=1e-7)
    if arch == "sm_80":  # a product's store leaves the rounding to Triton, which has none there
        return
    more: dict[str, Any] = {"out_dtype": "fp8_e4m3fn", "out_group_size": group}
    for request, y in (
        (FusedGemmRequest(**shape, **more), exact),
        (FusedGemmRequest(**shape, **more, epilogue="silu_gated", clamp=7.0), gated),
    ):
        values, scales = fused.bind(request, gpu(arch), weight=weight)(x)
        back = dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind="float32")
        # Half a step of 2**-3 at most, or a whole one on the other side of a tie.
        largest = y.reshape(m, -1, group).abs().amax(-1).repeat_interleave(group, dim=-1)
        assert ((back.double() - y).abs() <= y.abs() * 2.0**-3 + largest * 2.0**-9).all()


@pytest.mark.parametrize("arch", ["gfx1100", "gfx90a"])
@pytest.mark.parametrize("m", [3, 21])
def test_a_product_its_residual_and_the_norm_behind_it(m: int, arch: str) -> None:
    name, n, k = "fp8_block128_a8", 192, 320
    weight, x, residual = weight_of(n, k, name), rows(m, k).clamp(-50, 50), rows(m, n)
    norm_weight = torch.randn(n).bfloat16()
    request = GemmNormRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name])
    kernel = gemm_norm.bind(request, gpu(arch), weight=weight, norm_weight=norm_weight, eps=1e-6)
    y, total = kernel(x, residual)
    exact = rounded(x, name) @ weight.dequantize().double().T + residual.double()
    assert_exact("fused_gemm", total, exact, times=2.0, floor=1e-7)
    # Of the sum as it was stored, which is what the next sublayer adds to.
    want = torch.nn.functional.rms_norm(total.double(), (n,), norm_weight.double(), 1e-6)
    assert_exact("fused_gemm", y, want, times=2.0, floor=1e-7)


ROWS = [0, 1, 32, 97, 0, 3]  # of experts: none, one, a tile exactly, tiles and one


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
@pytest.mark.parametrize("tokens", [4, 4096], ids=["small", "large"])
@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        ("fp8_block128_a8", 256, 256),
        ("fp8_block128_a8", 320, 200),  # the second half begins within a block; a cut group
        ("fp8_block32_ue8m0_a8", 136, 96),
    ],
)
def test_experts(name: str, n: int, k: int, tokens: int, epilogue: Any, arch: str) -> None:
    offsets = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    x = torch.randn(sum(ROWS), k) * torch.logspace(-2, 2, sum(ROWS))[:, None]
    x = x.bfloat16()[: int(offsets[3]) if tokens == 4 else sum(ROWS)]
    offsets = offsets.clamp(max=x.shape[0])
    experts = [weight_of(n, k, name) for _ in ROWS]
    request = GroupedGemmRequest(
        num_experts=len(ROWS), experts_per_token=2, n=n, k=k, dtype="bfloat16",
        weight_format=FORMATS[name], epilogue=epilogue, tokens=TokenRange(1, tokens),
    )  # fmt: skip
    found = grouped.bind(request, gpu(arch), weight=experts)(x, offsets)
    known = rounded(x, name)
    exact = torch.cat(
        [
            known[offsets[e] : offsets[e + 1]] @ experts[e].dequantize().double().T
            for e in range(len(ROWS))
        ]
    )
    assert_exact("grouped_gemm", found, apply_epilogue(epilogue, exact), floor=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("tokens", [16, 512])
def test_emulated_code_that_spills_nothing_serves_as_tuned(tokens: int, name: str) -> None:
    """And is never called native."""
    known = TokenRange(1, tokens)
    shape: dict[str, Any] = {
        "n": 2048, "k": 7168, "dtype": "bfloat16", "weight_format": FORMATS[name], "tokens": known,
    }  # fmt: skip
    experts = GroupedGemmRequest(num_experts=8, experts_per_token=2, **shape)
    for arch in ARCHES:
        for limits, request in (
            (gemm_limits, GemmRequest(**shape)),
            (gemm_limits, GemmRequest(**shape, epilogue="silu_gated")),
            (fused_limits, FusedGemmRequest(**shape, has_residual=True)),
            (grouped_limits, experts),
        ):
            assert not limits(request, gpu(arch), allowed=("emulated",))
            (reason,) = limits(request, gpu(arch))
            assert reason.kind is ReasonKind.HARDWARE
            assert " 0 spills" in reason.found


@pytest.mark.parametrize("arch", ARCHES)
def test_a_weight_that_is_no_number_is_refused(arch: str) -> None:
    name = "fp8_block128_a8"
    weight = weight_of(128, 128, name)
    weight.data.view(torch.uint8)[5, 7] = 0xFF
    with pytest.raises(BindingError, match="NaN among them"):
        plain.bind(request_of(128, 128, name), gpu(arch), weight=weight)
    request = GroupedGemmRequest(
        num_experts=1, experts_per_token=1, n=128, k=128, dtype="bfloat16",
        weight_format=FORMATS[name],
    )  # fmt: skip
    with pytest.raises(BindingError, match="NaN among them"):
        grouped.bind(request, gpu(arch), weight=[weight])
