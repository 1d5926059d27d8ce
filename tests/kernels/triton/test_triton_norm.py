"""The Triton norm and rounding kernels in the interpreter against float64 and exact rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.norm.triton as triton_norm
import hal_kernels.quantize.triton as triton_quantize
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.low_precision import quantize_groups
from hal.ops.norm import RmsNormRequest, reference
from hal.ops.quantize import QuantizeRequest
from hal_kernels.aot.catalogue import CATALOGUE as CATALOGUE_OF_KERNELS
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.norm.triton_limits import not_supported_reasons

EPS = 1e-6
TOLERANCE = CATALOGUE["norm.rms"].largest_errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("hidden", [64, 576, 1100, 16384, 16385], ids=lambda h: f"h{h}")
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm(dtype: str, hidden: int, tokens: int, has_residual: bool) -> None:
    """Several short rows share a program; the widest is walked in steps of which the last is not
    full, and its sum is read back from the residual."""
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


@pytest.mark.parametrize("hidden", [48, 700, 16384, 20480], ids=lambda h: f"h{h}")
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_int8_rows_of_any_width(hidden: int, has_residual: bool, arch: str) -> None:
    """Rows of zeros have scale 1; from 1e-4, where eps decides, to 1e4. Rows of x are strided."""
    request = RmsNormRequest(
        hidden_size=hidden, dtype="bfloat16", quantize="int8_per_token", has_residual=has_residual
    )
    weight = (torch.rand(hidden) + 0.5).bfloat16()
    sizes = torch.cat((torch.zeros(1), torch.logspace(-4, 4, 6)))[:, None]
    x = torch.randn(7, hidden) * sizes
    residual = (torch.randn(7, hidden) * sizes).bfloat16()
    x = x.bfloat16()
    total = x + residual if has_residual else x
    kernel = triton_norm.bind(request, gpu(arch), weight=weight, eps=EPS)
    (q, scale), *kept = kernel(x, residual) if has_residual else (kernel(x),)
    plain = RmsNormRequest(hidden_size=hidden, dtype="bfloat16", quantize="int8_per_token")
    want, want_scale = reference(plain, weight=weight, eps=EPS)(total.double())
    assert torch.allclose(scale.double(), want_scale.double(), rtol=1e-5, atol=0.0)
    assert scale[0] == 1.0
    assert not q[0].any()
    # One step, where float32 falls to the other side, and seldom.
    assert (q.int() - want.int()).abs().max() <= 1
    assert (q != want).double().mean() < 0.01
    assert not kept or torch.equal(kept[0], total)


def test_rows_of_a_wider_matrix() -> None:
    for hidden in (40, 300, 16400):
        request = RmsNormRequest(hidden_size=hidden, dtype="float32", has_residual=True)
        wide, beside = torch.randn(5, hidden + 24), torch.randn(5, hidden)
        kernel = triton_norm.bind(request, gpu("sm_90"), weight=torch.rand(hidden), eps=EPS)
        x, residuals = wide[:, 8 : hidden + 8], (beside.clone(), beside.clone())
        found = [
            kernel(rows, kept) for rows, kept in zip((x, x.contiguous()), residuals, strict=True)
        ]
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(*residuals)


@pytest.mark.parametrize("arch", [target.arch for target in TARGETS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quantize", ["none", "int8_per_token"])
def test_every_width_is_served(arch: str, dtype: str, quantize: str) -> None:
    for hidden, kernel in (
        (64, "norm.rms"), (8192, "norm.rms"), (16384, "norm.rms"), (16385, "norm.rms_looped"),
        (53248, "norm.rms_looped"),
    ):  # fmt: skip
        for has_residual in (False, True):
            request = RmsNormRequest(
                hidden_size=hidden, dtype=dtype, has_residual=has_residual, quantize=quantize
            )  # type: ignore[arg-type]
            assert not not_supported_reasons(request, gpu(arch))
            (asked,) = evidence_asked(not_supported_reasons, request, gpu(arch))
            assert asked.kernel == kernel


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("hidden", [64, 128, 1024, 4096, 8192, 16384, 18432])
def test_what_is_judged_is_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, arch: str, hidden: int
) -> None:
    """Warps, and of the widths that are compiled the tiles too."""
    found: list[dict[str, Any]] = []
    for name in ("_rms_norm_kernel", "_rms_norm_looped_kernel"):
        monkeypatch.setattr(triton_norm, name, Recorder(found))
    request = RmsNormRequest(hidden_size=hidden, dtype="bfloat16")
    weight = torch.ones(hidden).bfloat16()
    triton_norm.bind(request, gpu(arch), weight=weight, eps=EPS)(torch.ones(3, hidden).bfloat16())
    (asked,) = evidence_asked(not_supported_reasons, request, gpu(arch))
    variants = CATALOGUE_OF_KERNELS[asked.kernel].variants(find_target(arch))
    variant = next(
        v for v in variants if (v.dtype, v.config) == (asked.dtype, asked.config)
    )  # fmt: skip
    threads = found[0]["num_warps"] * find_target(arch).warp_size
    assert threads <= 1024
    if hidden in (128, 1024, 8192, 16384, 18432):
        assert found == [dict(variant.constants) | {"num_warps": variant.num_warps}]
    else:
        assert found[0]["BLOCK_R"] * found[0]["BLOCK_H"] <= 16 * threads


class Recorder:
    """Takes a kernel's place: keeps each launch's constants, and computes nothing."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self._found = found

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **constants: self._found.append(constants)


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
