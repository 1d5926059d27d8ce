"""Triton products per expert in the interpreter against float64 products of the stored values."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

import hal_kernels.grouped_gemm.triton as triton_grouped
from gpu_devices import gpu
from hal.errors import BindingError, RequestError
from hal.ops.formats import FORMATS, quantize_weight
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.request import TokenRange
from hal.reasons import Reason, ReasonKind
from hal_kernels.grouped_gemm.triton_limits import choose_kernel, not_supported_reasons
from hal_kernels.grouped_gemm.triton_rounding import bind_round_rows
from kernel_errors import assert_exact

# Rows per expert: none, one, a tile exactly, a tile and one, none again.
ROWS = [0, 1, 16, 17, 0, 3]


MXFP4_ARCHS = ("sm_80", "sm_120", "sm_90", "gfx942", "gfx950")
CLAMP = 0.6  # well inside what the products reach
EPILOGUES = pytest.mark.parametrize(
    ("epilogue", "clamp"),
    [("none", 0.0), ("silu_gated", 0.0), ("silu_gated", CLAMP)],
    ids=["plain", "gated", "clamped"],
)


def request_of(
    name: str, n: int, k: int, epilogue: str = "none", clamp: float = 0.0
) -> GroupedGemmRequest:
    return GroupedGemmRequest(
        num_experts=len(ROWS), experts_per_token=2, n=n, k=k, dtype="bfloat16",
        weight_format=FORMATS[name], epilogue=epilogue, clamp=clamp,
    )  # type: ignore[arg-type]  # fmt: skip


def inputs(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum(ROWS)
    offsets = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    x = torch.randn(total, k) * torch.logspace(-2, 2, total)[:, None]
    return x.bfloat16(), offsets


def exact(
    x: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor, epilogue: str, clamp: float = 0.0
) -> torch.Tensor:
    """Written out here: silu(g) * u of halves that were limited before."""
    y = torch.cat([x[offsets[e] : offsets[e + 1]] @ weights[e].T for e in range(len(ROWS))])
    if epilogue == "none":
        return y
    gate, up = y.chunk(2, dim=-1)
    if clamp:
        gate, up = torch.clamp(gate, max=clamp), torch.clamp(up, -clamp, clamp)
    return gate * torch.sigmoid(gate) * up


def clamped_share(
    x: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor, clamp: float
) -> float:
    y = torch.cat([x[offsets[e] : offsets[e + 1]] @ weights[e].T for e in range(len(ROWS))])
    return float((y.abs() > clamp).double().mean())


def assert_close(found: torch.Tensor, want: torch.Tensor) -> None:
    assert_exact("grouped_gemm", found, want, floor=1e-6)


@EPILOGUES
@pytest.mark.parametrize(("n", "k"), [(130, 96), (48, 70), (300, 64)])
def test_dense(n: int, k: int, epilogue: str, clamp: float) -> None:
    x, offsets = inputs(k)
    weight = (torch.randn(len(ROWS), n, k) / k**0.5).bfloat16()
    kernel = triton_grouped.bind(
        request_of("bfloat16", n, k, epilogue, clamp), gpu("sm_90"), weight=weight
    )
    assert_close(kernel(x, offsets), exact(x.double(), offsets, weight.double(), epilogue, clamp))
    nothing = torch.zeros(len(ROWS) + 1, dtype=torch.int64)
    assert kernel(x[:0], nothing).shape[0] == 0


@pytest.mark.parametrize("half", ["gate", "up"])
def test_a_clamp_keeps_what_is_not_a_number(half: str) -> None:
    n, k = 130, 96
    x, offsets = inputs(k)
    weight = (torch.randn(len(ROWS), n, k) / k**0.5).bfloat16()
    feature = 3
    weight[:, feature + (0 if half == "gate" else n // 2)] = float("nan")
    kernel = triton_grouped.bind(
        request_of("bfloat16", n, k, "silu_gated", CLAMP), gpu("sm_90"), weight=weight
    )
    found = kernel(x, offsets).isnan()
    assert found[:, feature].all()
    assert int(found.sum()) == found.shape[0]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("fp8_block128_a8", 256),  # a gated weight's halves begin at whole blocks
        ("fp8_block128_a8", 320),  # the second half begins within one
        ("fp8_block128_ue8m0_a8", 256),
        ("fp8_block32_ue8m0_a8", 256),
    ],
)
def test_fp8_blocks(name: str, n: int, epilogue: str, arch: str) -> None:
    clamp = CLAMP if epilogue == "silu_gated" and name == "fp8_block128_a8" else 0.0
    k = 256
    form = FORMATS[name]
    x, offsets = inputs(k)
    experts = [quantize_weight(torch.randn(n, k) / k**0.5, form) for _ in ROWS]
    request = request_of(name, n, k, epilogue, clamp)
    kernel = triton_grouped.bind(request, gpu(arch), weight=experts)
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    is_ue8m0 = "ue8m0" in form.activation or form.activation.startswith("mxfp8")
    kind = "ue8m0" if is_ue8m0 else "float32"
    values, scales = quantize_groups(
        x, group_size=int(form.group_size or 0), element=element, scale_kind=kind
    )
    rounded = dequantize_groups(values, scales, element=element, scale_kind=kind).double()
    weights = torch.stack([expert.dequantize().double() for expert in experts])
    want = exact(rounded, offsets, weights, epilogue, clamp)
    assert_close(kernel(x, offsets), want)
    # As a plan has them: rounded by a call of its own.
    assert_close(kernel((values, scales), offsets), want)
    with pytest.raises(ValueError, match="grouped_gemm: required rounded rows"):
        kernel((values, scales[:, :1]), offsets)


@pytest.mark.parametrize(
    ("arch", "epilogue", "clamp"),
    [
        *((arch, "none", 0.0) for arch in MXFP4_ARCHS),
        *((arch, "silu_gated", CLAMP) for arch in MXFP4_ARCHS),
        ("sm_120", "silu_gated", 0.0),
    ],
)
def test_mxfp4_weights_and_mxfp8_rows(arch: str, epilogue: str, clamp: float) -> None:
    """Scaled by the unit or outside of it, in either FP8 encoding, FP4 widened or as it is; and
    both operands in 16 bits, where nothing takes FP8."""
    n, k = 68, 160  # halves of a gated weight end within a tile
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    x, offsets = inputs(k)
    experts = [quantize_weight(torch.randn(n, k) / k**0.5, FORMATS["mxfp4_a8"]) for _ in ROWS]
    request = request_of("mxfp4_a8", n, k, epilogue, clamp)
    kernel = triton_grouped.bind(request, gpu(arch), weight=experts)
    values, scales = quantize_groups(x, group_size=32, element=element, scale_kind="ue8m0")
    rounded = dequantize_groups(values, scales, element=element, scale_kind="ue8m0").double()
    weights = torch.stack([expert.dequantize().double() for expert in experts])
    want = exact(rounded, offsets, weights, epilogue, clamp)
    assert_close(kernel(x, offsets), want)
    assert_close(kernel((values, scales), offsets), want)
    if clamp:
        assert 0.1 < clamped_share(rounded, offsets, weights, clamp) < 0.9


@EPILOGUES
@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        ("fp8_block32_ue8m0", 136, 96),  # the halves of a gated weight end within a block
        ("fp8_block32_ue8m0", 64, 70),  # a cut block along K
        ("fp8_block128", 320, 256),
        ("fp8_block128_ue8m0", 256, 200),
        ("mxfp4", 68, 160),
    ],
)
def test_quantised_weights_meet_rows_as_they_are(
    name: str, n: int, k: int, epilogue: str, clamp: float
) -> None:
    arch = random.choice(["sm_120", "gfx1100"])  # steps of a whole group, or of half of one
    x, offsets = inputs(k)
    scales = torch.logspace(-3, 3, n)[torch.randperm(n)][:, None]
    experts = [quantize_weight(torch.randn(n, k) * scales / k**0.5, FORMATS[name]) for _ in ROWS]
    kernel = triton_grouped.bind(request_of(name, n, k, epilogue, clamp), gpu(arch), weight=experts)
    weights = torch.stack([expert.dequantize().double() for expert in experts])
    found = kernel(x, offsets)
    assert_close(found, exact(x.double(), offsets, weights, epilogue, clamp))
    # Alone in the first tile of its expert a row is what it is among others.
    alone = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    assert torch.equal(kernel(x[:1], alone), found[:1])


def test_a_group_of_every_token_is_an_expert_of_all_rows() -> None:
    """The output projection of V4.1: as many experts as there are groups, one of them a device."""
    n, k, rows = 96, 128, 37
    x = torch.randn(rows, k).bfloat16()
    weight = quantize_weight(torch.randn(n, k) / k**0.5, FORMATS["fp8_block32_ue8m0"])
    request = GroupedGemmRequest(
        num_experts=1, experts_per_token=1, n=n, k=k, dtype="bfloat16",
        weight_format=weight.format, tokens=TokenRange(1, rows),
    )  # fmt: skip
    kernel = triton_grouped.bind(request, gpu("sm_90"), weight=[weight])
    found = kernel(x, torch.tensor([0, rows]))
    assert_close(found, x.double() @ weight.dequantize().double().T)


def test_a_weight_that_is_no_number_is_refused_by_what_cannot_read_it() -> None:
    name = "fp8_block32_ue8m0"
    experts = [quantize_weight(torch.randn(64, 64), FORMATS[name]) for _ in ROWS]
    experts[3].data.view(torch.uint8)[5, 7] = 0xFF
    with pytest.raises(BindingError, match="NaN among them"):
        triton_grouped.bind(request_of(name, 64, 64), gpu("sm_90"), weight=experts)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_a8", "fp8_block32_ue8m0", "fp8_block128_a8"])
def test_rows_of_quantised_weights_have_to_be_bfloat16(name: str) -> None:
    request = dataclasses.replace(request_of(name, 64, 64), dtype="float16")
    found = choose_kernel(request, gpu("sm_90"))
    assert isinstance(found, Reason)
    assert found.kind is ReasonKind.MISSING


@pytest.mark.parametrize("k", [1, 16, 48, 96])
def test_rows_of_mxfp4_weights_are_whole_scales(k: int) -> None:
    """They are read 16 bytes at a time: a row that ends within that is another kernel's."""
    reasons = not_supported_reasons(request_of("mxfp4_a8", n=64, k=k), gpu("sm_100"))
    wanted = [] if k % 32 == 0 else [f"grouped_gemm.mxfp4: k: required a multiple of 32, found {k}"]
    assert [str(reason) for reason in reasons] == wanted


@pytest.mark.parametrize("width", [32, 96, 4128])
def test_rows_that_stay_in_16_bits_are_those_of_the_rounding(width: int) -> None:
    """Bit by bit what the op quantize keeps: groups of any magnitude, of zeros, and not finite."""
    x = torch.randn(9, width) * torch.logspace(-30, 30, 9)[:, None]
    x[:, :32] *= torch.logspace(-4, 0, 32)  # down to the denormals of a group
    x[3, :32] = 0.0
    x = x.bfloat16()
    values, scales = quantize_groups(x, group_size=32, element="fp8_e4m3fn", scale_kind="ue8m0")
    want = dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind="ue8m0")
    kernel = bind_round_rows()
    assert torch.equal(kernel(x).float(), want.float())
    assert torch.equal(want.bfloat16().float(), want.float())
    x[2, 5], x[4, 0] = torch.inf, torch.nan
    found = kernel(x)
    assert found[2, :32].isnan().all()
    assert found[4, :32].isnan().all()
    assert int(found.isnan().sum()) == 64


def test_rows_of_fp8_where_nothing_takes_them_are_no_native_path() -> None:
    request = dataclasses.replace(request_of("mxfp4_a8", 64, 64), tokens=TokenRange(1, 1))
    (reason,) = not_supported_reasons(request, gpu("sm_80"))
    assert reason.kind is ReasonKind.HARDWARE
    assert not not_supported_reasons(request, gpu("sm_80"), allowed=("emulated",))
    assert not not_supported_reasons(request, gpu("sm_90"))


def test_every_row_is_written_and_nothing_else() -> None:
    """Into a result that was NaN before: the rows of each expert, whole and only they."""
    n, k = 68, 64
    x, offsets = inputs(k)
    experts = [quantize_weight(torch.randn(n, k) / k**0.5, FORMATS["mxfp4_a8"]) for _ in ROWS]
    request = request_of("mxfp4_a8", n, k, "silu_gated", CLAMP)
    kernel = triton_grouped.bind(request, gpu("sm_120"), weight=experts)
    found = kernel(x, offsets)
    assert found.shape == (sum(ROWS), n // 2)
    poisoned = torch.full((sum(ROWS) + 4, n // 2), torch.nan, dtype=torch.bfloat16)
    empty = torch.empty

    def with_poison(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        is_result = shape == (sum(ROWS), n // 2)
        return poisoned[: sum(ROWS)] if is_result else empty(shape, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", with_poison)
        again = kernel(x, offsets)
    assert again.data_ptr() == poisoned.data_ptr()
    assert torch.equal(again, found)
    assert poisoned[sum(ROWS) :].isnan().all()


def test_what_no_kernel_is_written_for_is_refused() -> None:
    with pytest.raises(BindingError, match="nvfp4"):
        triton_grouped.bind(
            request_of("nvfp4", 64, 64, "silu_gated"),
            gpu("sm_120"),
            weight=torch.empty(6, 64, 64),
        )


def test_a_clamp_of_nothing_gated_is_refused() -> None:
    with pytest.raises(RequestError, match="silu_gated"):
        request_of("bfloat16", 64, 64, "none", 1.0)
