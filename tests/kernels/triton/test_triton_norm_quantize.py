"""The Triton norm that rounds its rows, in the interpreter, against float64 and exact rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import hal_kernels.norm_quantize.triton as triton_norm_quantize
from gpu_devices import gpu
from hal.ops.low_precision import decode_scale
from hal.ops.norm_quantize import FAMILY, NormQuantizeRequest
from hal.reasons import ReasonKind
from hal_kernels.norm_quantize.triton_limits import not_supported_reasons

EPS = 1e-6
LARGEST = {"fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0, "int8": 127.0}
FORMS = [("float32", 0), ("float32", 128), ("ue8m0", 128), ("float32", 32), ("ue8m0", 32)]


def request_of(**fields: Any) -> NormQuantizeRequest:
    given: dict[str, Any] = {
        "hidden_size": 384, "dtype": "bfloat16", "out_dtype": "fp8_e4m3fn", "group_size": 128,
    }  # fmt: skip
    return NormQuantizeRequest(**(given | fields))


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_rounded(
    request: NormQuantizeRequest, values: torch.Tensor, scales: torch.Tensor, want: torch.Tensor
) -> None:
    """Scales as the norm's own values have them, values within a step of them."""
    group = request.group_size or request.hidden_size
    grouped = want.reshape(len(want), -1, group)
    peak = grouped.abs().amax(dim=-1)
    exact = torch.where(peak > 0, peak / LARGEST[request.out_dtype], 1.0)
    got = decode_scale(scales, request.scale_dtype).double()
    assert got.shape == exact.shape
    if request.scale_dtype == "ue8m0":
        # The next power of two; one of the two where float32 falls to the other side of it.
        assert ((got >= exact * (1 - 1e-5)) & (got < 2 * exact * (1 + 1e-5))).all()
        assert torch.equal(got.log2(), got.log2().round())
    else:
        assert torch.allclose(got, exact, rtol=1e-5, atol=0.0)
    tolerance = FAMILY.tolerances[request.out_dtype]
    decoded = values.double().reshape(grouped.shape)
    wanted = grouped / got[..., None]
    assert ((decoded - wanted).abs() <= tolerance.rtol * wanted.abs() + tolerance.atol).all()


@pytest.mark.parametrize("out_dtype", list(LARGEST))
@pytest.mark.parametrize(("scale_dtype", "group"), FORMS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("keeps_rows", [False, True])
def test_norm_and_rounding(
    out_dtype: str, scale_dtype: str, group: int, has_residual: bool, keeps_rows: bool
) -> None:
    """Rows of 1e-4, where eps decides, to 1e4; one of zeros; rows of x are strided."""
    request = request_of(
        out_dtype=out_dtype, group_size=group, scale_dtype=scale_dtype, has_residual=has_residual,
        keeps_rows=keeps_rows,
    )  # fmt: skip
    weight = (torch.rand(384) + 0.5).bfloat16()
    sizes = torch.cat((torch.zeros(1), torch.logspace(-4, 4, 6)))[:, None]
    x = (torch.randn(7, 400) * sizes).bfloat16()[:, :384]
    residual = (torch.randn(7, 384) * sizes).bfloat16()
    total = x + residual if has_residual else x
    kernel = triton_norm_quantize.bind(request, gpu("sm_90"), weight=weight, eps=EPS)
    values, scales, *more = kernel(x, residual) if has_residual else kernel(x)
    want = exact_norm(total, weight)
    assert_rounded(request, values, scales, want)
    if has_residual:
        assert more.pop() is residual
        assert torch.equal(residual, total)
    if keeps_rows:
        rows = more.pop()
        assert rows.dtype == torch.bfloat16
        assert ((rows.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-9).all()
    assert not more


@pytest.mark.parametrize("hidden", [384, 16640])
@pytest.mark.parametrize(("scale_dtype", "group"), FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounding_in_integers_gives_the_same_bits(
    hidden: int, scale_dtype: str, group: int, dtype: str
) -> None:
    """What sm_80 stores, which has no conversion to FP8, is what others store."""
    request = request_of(
        hidden_size=hidden, group_size=group, scale_dtype=scale_dtype, dtype=dtype, keeps_rows=True
    )
    torch_dtype: torch.dtype = getattr(torch, dtype)
    weight = (torch.rand(hidden) + 0.5).to(torch_dtype)
    # Values of a row differ by 1e6, so that many are below the least normal number of e4m3.
    x = torch.randn(4, hidden) * torch.logspace(-6, 0, hidden)
    x[1] = 0.0
    x[2, 7] = float("nan")
    x = (x * torch.logspace(-4, 4, 4)[:, None]).to(torch_dtype)
    found, wanted = (
        triton_norm_quantize.bind(request, gpu(arch), weight=weight, eps=EPS)(x)
        for arch in ("sm_80", "sm_90")
    )
    assert found[0].dtype == torch.float8_e4m3fn
    numbers = ~wanted[0].float().isnan()
    assert torch.equal(found[0].float().isnan(), ~numbers)
    assert torch.equal(found[0].view(torch.uint8)[numbers], wanted[0].view(torch.uint8)[numbers])
    assert torch.equal(found[1].view(torch.uint8), wanted[1].view(torch.uint8))
    assert torch.equal(found[2].nan_to_num(-1.0), wanted[2].nan_to_num(-1.0))
    exact = exact_norm(x, weight)[[0, 1, 3]]
    assert_rounded(request, found[0][[0, 1, 3]], found[1][[0, 1, 3]], exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("hidden", "group"), [(96, 32), (1152, 128), (100, 0), (7168, 128), (16384, 128)]
)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_widths_and_no_tokens(dtype: str, hidden: int, group: int, tokens: int) -> None:
    """Numbers of groups that are no power of two, and none of a row at all."""
    request = request_of(dtype=dtype, hidden_size=hidden, group_size=group, keeps_rows=True)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    weight, x = torch.rand(hidden).to(torch_dtype), torch.randn(tokens, hidden).to(torch_dtype)
    kernel = triton_norm_quantize.bind(request, gpu("sm_90"), weight=weight, eps=EPS)
    values, scales, rows = kernel(x)
    assert values.shape == rows.shape == x.shape
    assert scales.shape == (tokens, hidden // group if group else 1)
    if tokens:
        assert_rounded(request, values, scales, exact_norm(x, weight))


@pytest.mark.parametrize("out_dtype", list(LARGEST))
@pytest.mark.parametrize(("scale_dtype", "group"), FORMS)
@pytest.mark.parametrize("keeps_rows", [False, True])
def test_rows_that_are_walked_in_steps(
    out_dtype: str, scale_dtype: str, group: int, keeps_rows: bool
) -> None:
    """Five steps, of which the last is not full; the sum with the residual is read back."""
    hidden = 16640
    request = request_of(
        hidden_size=hidden, out_dtype=out_dtype, group_size=group, scale_dtype=scale_dtype,
        has_residual=True, keeps_rows=keeps_rows,
    )  # fmt: skip
    weight = (torch.rand(hidden) + 0.5).bfloat16()
    sizes = torch.cat((torch.zeros(1), torch.logspace(-4, 4, 3)))[:, None]
    x = (torch.randn(4, hidden + 16) * sizes).bfloat16()[:, :hidden]
    residual = (torch.randn(4, hidden) * sizes).bfloat16()
    total = x + residual
    kernel = triton_norm_quantize.bind(request, gpu("sm_90"), weight=weight, eps=EPS)
    values, scales, *more = kernel(x, residual)
    want = exact_norm(total, weight)
    assert_rounded(request, values, scales, want)
    assert more.pop() is residual
    assert torch.equal(residual, total)
    if keeps_rows:
        assert ((more.pop().double() - want).abs() <= 2.0**-8 * want.abs() + 1e-9).all()
    assert not more


def test_what_is_not_finite_in_a_row_of_steps_has_no_scale() -> None:
    x = torch.randn(3, 16640).bfloat16()
    x[1, 16639] = float("inf")
    x[2, 200] = float("nan")
    for group in (0, 128):
        request = request_of(hidden_size=16640, group_size=group)
        ones = torch.ones(16640).bfloat16()
        _, scales = triton_norm_quantize.bind(request, gpu("sm_90"), weight=ones, eps=EPS)(x)
        assert scales[0].isfinite().all()
        assert scales[1, -1].isnan()
        assert scales[2].isnan().all()


def test_what_is_not_finite_has_no_scale() -> None:
    x = torch.randn(3, 384).bfloat16()
    x[1, 7] = float("inf")
    x[2, 200] = float("nan")
    for scale_dtype in ("float32", "ue8m0"):
        request = request_of(scale_dtype=scale_dtype)
        ones = torch.ones(384).bfloat16()
        kernel = triton_norm_quantize.bind(request, gpu("sm_90"), weight=ones, eps=EPS)
        _, scales = kernel(x)
        decoded = decode_scale(scales, scale_dtype)
        assert decoded[0].isfinite().all()
        # Of an infinity only its own value is no number, of a NaN the whole row.
        assert decoded[1].isnan().tolist() == [True, False, False]
        assert decoded[2].isnan().all()


@pytest.mark.parametrize(
    ("arch", "fields", "kind"),
    [
        ("sm_90", {}, None),
        ("sm_90", {"hidden_size": 8192, "group_size": 32, "scale_dtype": "ue8m0"}, None),
        ("sm_90", {"hidden_size": 8320}, None),
        ("sm_90", {"hidden_size": 16384}, None),
        ("sm_90", {"hidden_size": 20480}, None),
        ("gfx942", {"hidden_size": 53248, "out_dtype": "fp8_e4m3fnuz"}, None),
        ("gfx1100", {"hidden_size": 20480, "out_dtype": "int8", "group_size": 0}, None),
        ("sm_90", {"dtype": "float32"}, None),
        ("sm_90", {"dtype": "float64"}, ReasonKind.MISSING),
        ("sm_90", {"group_size": 64}, ReasonKind.MISSING),
        ("sm_90", {"out_dtype": "fp8_e4m3fnuz"}, ReasonKind.HARDWARE),
        ("gfx942", {}, ReasonKind.HARDWARE),
        ("gfx942", {"out_dtype": "fp8_e4m3fnuz"}, None),
        ("gfx950", {}, None),
        ("gfx90a", {}, None),
        ("gfx1100", {}, None),
        ("gfx1100", {"group_size": 32, "scale_dtype": "ue8m0", "hidden_size": 20480}, None),
        ("sm_80", {}, None),
        ("sm_80", {"hidden_size": 20480, "dtype": "float32"}, None),
        ("sm_80", {"out_dtype": "fp8_e4m3fnuz"}, ReasonKind.HARDWARE),
        ("sm_80", {"out_dtype": "int8", "group_size": 0}, None),
        ("gfx1100", {"out_dtype": "int8", "group_size": 0}, None),
    ],
)
def test_what_is_offered(arch: str, fields: dict[str, Any], kind: ReasonKind | None) -> None:
    reasons = not_supported_reasons(request_of(**fields), gpu(arch))
    assert [reason.kind for reason in reasons] == ([] if kind is None else [kind])


def test_a_residual_is_added_as_layers_add() -> None:
    """Rounded to the activations' dtype before the norm: 1 + 2**-9 is 1 in bfloat16."""
    request = dataclasses.replace(request_of(hidden_size=32, group_size=32), has_residual=True)
    ones = torch.ones(1, 32).bfloat16()
    kernel = triton_norm_quantize.bind(request, gpu("sm_90"), weight=ones[0], eps=0.0)
    residual = torch.zeros(1, 32).bfloat16()
    residual[0, :16] = 2.0**-9
    values, scales, total = kernel(ones, residual)
    assert torch.equal(total, ones)
    # Not rounded, half of the row would be larger by 2**-10 than the root of its mean square.
    assert torch.allclose(scales.double(), torch.full((1, 1), 1 / 448).double(), rtol=1e-6)
    assert (values.double() == 448).all()
