"""The Triton rounding to four bits, and what the rounding kernels do with unusual groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import hal_kernels.quantize.triton as triton_quantize
from gpu_devices import gpu
from hal.ops.low_precision import decode_e2m1, decode_scale, unpack_nibbles
from hal.ops.quantize import QuantizeRequest, reference
from hal_kernels.quantize.code_kernels import _bits_of_e4m3
from hal_kernels.quantize.triton_limits import not_supported_reasons

SCALES = {"mxfp4": "ue8m0", "nvfp4": "e4m3"}


def fp4_request(out_dtype: Any, group: int, width: int, dtype: str) -> QuantizeRequest:
    return QuantizeRequest(
        group_size=group, out_dtype=out_dtype, scale_dtype=SCALES[out_dtype],  # type: ignore[arg-type]
        width=width, dtype=dtype,
    )  # fmt: skip


def assert_as_reference(request: QuantizeRequest, x: torch.Tensor) -> None:
    found, want = triton_quantize.bind(request, gpu("sm_90"))(x), reference(request)(x)
    for got, exact in zip(found, want, strict=True):
        assert got.dtype == exact.dtype
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("out_dtype", list(SCALES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("group", "width"), [(16, 48), (32, 96), (32, 2208)])
def test_four_bits_are_exact(out_dtype: str, dtype: str, group: int, width: int) -> None:
    request = fp4_request(out_dtype, group, width, dtype)
    x = torch.randn(9, width + 8)[:, :width] * torch.logspace(-7, 4, 9)[:, None]
    x[4] = 0.0
    assert_as_reference(request, x.to(getattr(torch, dtype)))
    assert_as_reference(request, x[:0].to(getattr(torch, dtype)))


@pytest.mark.parametrize("out_dtype", list(SCALES))
def test_ties_go_to_the_even_code(out_dtype: str) -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values = torch.cat((middles, -middles)).repeat(1, 2)
    request = fp4_request(out_dtype, 16, 32, "float32")
    for size in (1.0, 2.0**-9, 2.0**-6, 2.0**7):
        assert_as_reference(request, values * size)
    packed, _ = triton_quantize.bind(request, gpu("sm_90"))(values)
    found = decode_e2m1(unpack_nibbles(packed))[0, :16]
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(found, torch.cat((even, -even)))


def test_scales_at_the_ends_of_their_formats() -> None:
    for size in (1e-38, 1e-39, 1e-44, 3e38, 6.0 * 2.0**-9, 6.0 * 2.0**-10, 6.0 * 460, 6.0 * 1.0625):
        x = torch.rand(1, 32) * size
        x[0, 3] = -size
        for out_dtype, group in (("mxfp4", 32), ("nvfp4", 16)):
            assert_as_reference(fp4_request(out_dtype, group, 32, "float32"), x)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_group_that_is_not_finite_has_no_scale(bad: float) -> None:
    x = torch.randn(2, 64)
    x[1, 40] = bad
    for out_dtype, scale in (*SCALES.items(), ("int8", "float32"), ("fp8_e4m3fn", "ue8m0")):
        request = QuantizeRequest(
            group_size=32, out_dtype=out_dtype, scale_dtype=scale, width=64, dtype="float32"
        )  # type: ignore[arg-type]
        values, scales = triton_quantize.bind(request, gpu("sm_90"))(x)
        want, want_scales = reference(request)(x)
        decoded, wanted = (decode_scale(s, scale) for s in (scales, want_scales))
        assert torch.equal(decoded.isnan(), torch.tensor([[False, False], [False, True]]))
        assert torch.equal(decoded.nan_to_num(), wanted.nan_to_num())
        half = values.shape[1] // 2
        kept = [t.view(torch.uint8) for t in (values, want)]
        assert torch.equal(kept[0][0], kept[1][0])
        assert torch.equal(kept[0][1, :half], kept[1][1, :half])


def test_a_scale_that_is_a_power_of_two_stays_one() -> None:
    request = QuantizeRequest(
        group_size=32, out_dtype="fp8_e4m3fn", scale_dtype="ue8m0", width=32, dtype="float32"
    )
    x = torch.zeros(40, 32)
    x[:, 5] = 448.0 * 2.0 ** torch.arange(-140, 100, 6)
    assert_as_reference(request, x)


def test_what_is_refused() -> None:
    odd = fp4_request("mxfp4", 24, 48, "bfloat16")
    assert [r.what for r in not_supported_reasons(odd, gpu("sm_90"))] == [
        "quantize.fp4: group_size"
    ]


@triton.jit
def _bits_kernel(x_ptr, y_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(y_ptr + at, _bits_of_e4m3(tl.load(x_ptr + at)).to(tl.uint8))


def test_e4m3_in_integers_is_as_torch_rounds() -> None:
    """Every code, every middle between two, what is beside them, and values between."""
    codes = torch.arange(127, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([torch.nextafter(middles, torch.full_like(middles, s)) for s in (0.0, 1e9)])
    drawn = torch.exp2(torch.rand(4096 - 2 * (127 + 126 * 3) - 2) * 20 - 11).clamp(max=448.0)
    values = torch.cat((codes, middles, beside))
    tiny = torch.tensor([1e-45, float("nan")])
    x = torch.cat((values, -values, drawn, tiny))
    found = torch.full((4096,), 0xEE, dtype=torch.uint8)
    _bits_kernel[(1,)](x, found, COUNT=4096)
    assert torch.equal(found, x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("group", "width"), [(32, 96), (128, 384), (0, 130)])
def test_rows_are_rounded_to_fp8_where_triton_does_not_convert(
    group: int, width: int, dtype: str, scale: Any
) -> None:
    scale = scale if group else "float32"
    request = QuantizeRequest(
        group_size=group, out_dtype="fp8_e4m3fn", scale_dtype=scale, width=width, dtype=dtype
    )
    assert not not_supported_reasons(request, gpu("sm_80"))
    x = torch.randn(9, width + 8)[:, :width] * torch.logspace(-7, 4, 9)[:, None]
    x[4] = 0.0
    rows = x.to(getattr(torch, dtype))
    found, want = triton_quantize.bind(request, gpu("sm_80"))(rows), reference(request)(rows)
    for got, exact in zip(found, want, strict=True):
        assert got.dtype == exact.dtype
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize(
    ("arch", "out_dtype"),
    [
        ("sm_80", "int8"),
        ("sm_80", "fp8_e4m3fn"),
        ("sm_90", "fp8_e4m3fn"),
        ("gfx942", "fp8_e4m3fnuz"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_that_no_registers_hold(arch: str, out_dtype: Any, dtype: str) -> None:
    """Five steps, of which the last is not full; what is not finite, in the last one, has no scale
    and is 0 as an integer."""
    width = 33000
    request = QuantizeRequest(
        group_size=0, out_dtype=out_dtype, scale_dtype="float32", width=width, dtype=dtype
    )
    assert not not_supported_reasons(request, gpu(arch))
    x = torch.randn(7, width + 8)[:, :width] * torch.logspace(-6, 4, 7)[:, None]
    x[4] = 0.0
    x[5, width - 1], x[6, 3] = float("inf"), float("nan")
    rows = x.to(getattr(torch, dtype))
    found, want = triton_quantize.bind(request, gpu(arch))(rows), reference(request)(rows)
    for got, exact in zip(found, want, strict=True):
        assert got.dtype == exact.dtype
        assert torch.equal(got[:5].view(torch.uint8), exact[:5].view(torch.uint8))
    assert found[1][5:].isnan().all()
    if out_dtype == "int8":
        assert not found[0][5:].any()
    else:
        assert found[0][5:].float().isnan().all()
