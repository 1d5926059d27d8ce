"""Split-K with quantised weights: when K is cut, and that the parts' sum is the product."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal_kernels.fused_gemm.triton as triton_fused
import hal_kernels.gemm.triton as triton_gemm
import hal_kernels.gemm.triton_split_k as split_k
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest, apply_epilogue
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.fused_gemm import triton_limits as fused_limits
from hal_kernels.gemm.split_k_schedule import (
    LEAST_COLUMNS,
    PROGRAMS_PER_UNIT,
    SPLITS,
    splits_of,
)
from hal_kernels.gemm.triton_limits import FEW_ROWS, choose_kernels, not_supported_reasons
from hal_kernels.gemm.triton_tuning import shape_of
from hal_kernels.tuning.store import forced_configuration

HALF_STEP = 2.0**-8  # of bfloat16
UNITS = 132


def device_of(arch: str, units: int = UNITS) -> DeviceSpec:
    device = gpu(arch)
    return dataclasses.replace(device, attributes={**device.attributes, "compute_units": units})


def weight_of(n: int, k: int, name: str) -> QuantizedWeight:
    """Every value that a format can hold, rows of different magnitude."""
    form = FORMATS[name]
    if form.element != "int":
        sizes = torch.logspace(-1, 1, n)[torch.randperm(n)][:, None]
        return quantize_weight(torch.randn(n, k) / k**0.5 * sizes, form)
    groups = (k // form.group_size,) if form.group_size else ()
    scale = torch.rand(n, *groups) / 2**form.bits / k**0.5
    scale = scale if form.group_size == 0 else scale.half()
    if form.bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        return QuantizedWeight(format=form, data=data, scale=scale)
    least = (
        torch.randint(0, 16, scale.shape) if form.has_zeros else -torch.rand_like(scale) / k**0.5
    )
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return QuantizedWeight(
        format=form, data=data, scale=scale, minimum=None if form.is_symmetric else least.half()
    )


def request_of(n: int, k: int, name: str, **fields: Any) -> GemmRequest:
    return GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name], **fields)


def rows_of(count: int, k: int) -> torch.Tensor:
    """Rows of very different magnitude with gaps between them, and one of zeros."""
    x = torch.randn(count, k + 16) * torch.logspace(-2, 2, count)[:, None]
    if count > 2:
        x[1] = 0.0
    return x.bfloat16()[:, :k]


def exact_product(x: torch.Tensor, weight: QuantizedWeight, arch: str) -> torch.Tensor:
    """In float64, of what the format multiplies of x."""
    form = weight.format
    if form.activation == "float":
        return x.double() @ weight.dequantize().double().T
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    is_ue8m0 = "ue8m0" in form.activation or form.activation.startswith("mxfp8")
    kind = "ue8m0" if is_ue8m0 else "float32"
    values, scales = quantize_groups(
        x, group_size=int(form.group_size or 0), element=element, scale_kind=kind
    )
    rounded = dequantize_groups(values, scales, element=element, scale_kind=kind)
    return rounded.double() @ weight.dequantize().double().T


def assert_close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert found.shape == exact.shape
    assert found.isfinite().all()
    peak = exact.abs().amax(dim=-1, keepdim=True)
    assert ((found.double() - exact).abs() <= tolerance * peak + 1e-6).all()


class Splits:
    """Takes a place between a launch and its kernel: how many parts were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        launch = split_k.SplitK.launch

        def counted(one: split_k.SplitK, *arguments: Any) -> None:
            self.seen.append(one.splits)
            launch(one, *arguments)

        monkeypatch.setattr(split_k.SplitK, "launch", counted)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40_000), st.integers(0, 400))
def test_k_is_cut_only_where_the_device_would_be_idle(tiles: int, k: int, units: int) -> None:
    found = splits_of(tiles, k, units)
    wanted = PROGRAMS_PER_UNIT * units
    if found == 1:
        assert tiles >= wanted or k < SPLITS[0] * LEAST_COLUMNS
        return
    assert tiles < wanted
    assert k >= found * LEAST_COLUMNS  # no part is empty, whatever the step
    more = [splits for splits in SPLITS if splits > found and k >= splits * LEAST_COLUMNS]
    fewer = [splits for splits in SPLITS if splits < found]
    assert tiles * found >= wanted or not more
    assert all(tiles * splits < wanted for splits in fewer)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_a8", "gfx942"),  # the fnuz encoding: the same bits mean half
        ("fp8_block128_ue8m0_a8", "sm_120"),
        ("fp8_block32_ue8m0_a8", "sm_89"),
        ("fp8_block32_ue8m0_a8", "sm_120"),  # the unit scales by itself
        ("fp8_block32_ue8m0", "sm_80"),
        ("fp8_block128", "gfx1100"),
        ("int8_channel", "sm_80"),
        ("int8_g32", "gfx1100"),
        ("int4_g32", "sm_100"),
        ("int4_g32_asym", "gfx90a"),
        ("int4_g128", "gfx942"),
        ("int4_g128_zero", "sm_90"),
        ("fp8_block32_a8", "sm_120"),
        ("fp8_block32", "gfx942"),
    ],
)
@pytest.mark.parametrize(
    ("shape", "splits"), [((1, 40, 4192), 8), ((16, 130, 2080), 4)], ids=["m1", "m16"]
)
def test_the_sum_of_the_parts_is_the_product(
    shape: tuple[int, int, int], splits: int, name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = shape
    if FORMATS[name].activation.startswith("fp8_group128") or name.startswith("int4_g128"):
        k = -(-k // 128) * 128  # rows are rounded in whole groups; others end within a block
    weight, x, counted = weight_of(n, k, name), rows_of(m, k), Splits(monkeypatch)
    request = request_of(n, k, name, tokens=TokenRange(1, 16))
    kernel = triton_gemm.bind(request, device_of(arch), weight=weight)
    found = kernel(x)
    assert counted.seen == [splits]
    # Values of an integer weight are rounded to bfloat16 before they are multiplied.
    wide = 3 * k**0.5 if weight.format.element == "int" else 1.0
    assert_close(found, exact_product(x, weight, arch), wide * HALF_STEP)
    assert torch.equal(kernel(x[:1]), found[:1])  # a row does not depend on the others
    assert kernel(x[:0]).shape == (0, n)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block32_ue8m0_a8", "gfx1201"),
        ("fp8_block32_ue8m0_a8", "sm_120"),
        ("fp8_block128", "sm_80"),
        ("int8_channel", "sm_90"),
        ("int8_g32", "gfx942"),
        ("int4_g32_asym", "sm_120"),
        ("int4_g64_zero", "gfx1100"),
    ],
)
def test_a_gated_product_has_two_parts_of_a_split(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 5, 65, 2176  # halves that end within a block of scales
    weight, x, counted = weight_of(2 * n, k, name), rows_of(m, k), Splits(monkeypatch)
    request = request_of(2 * n, k, name, epilogue="silu_gated", tokens=TokenRange(1, 16))
    found = triton_gemm.bind(request, device_of(arch), weight=weight)(x)
    gate, up = exact_product(x, weight, arch).chunk(2, dim=-1)
    assert counted.seen == [4]
    wide = 3 * k**0.5 if weight.format.element == "int" else 2.0
    assert_close(found, torch.nn.functional.silu(gate) * up, wide * HALF_STEP)


@pytest.mark.parametrize("epilogue", ["none", "silu", "silu_gated"])
@pytest.mark.parametrize("name", ["int4_g32", "fp8_block128"])
def test_a_bias_is_added_to_the_sum(
    name: str, epilogue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 3, 96, 2176
    weight, x, counted = weight_of(n, k, name), rows_of(m, k), Splits(monkeypatch)
    bias = (torch.randn(n) * 4).bfloat16()
    request = request_of(n, k, name, has_bias=True, epilogue=epilogue, tokens=TokenRange(1, 16))
    device = device_of("sm_90")
    assert not not_supported_reasons(request, device)
    found = triton_gemm.bind(request, device, weight=weight, bias=bias)(x)
    assert counted.seen == [4]
    exact = apply_epilogue(epilogue, exact_product(x, weight, "sm_90") + bias.double())
    wide = 3 * k**0.5 if weight.format.element == "int" else 2.0
    assert_close(found, exact, wide * HALF_STEP)


def test_a_bias_of_two_fp8_operands_is_added_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, name = 2, 48, 2176, "fp8_block128_a8"
    weight, x, counted = weight_of(n, k, name), rows_of(m, k), Splits(monkeypatch)
    bias = (torch.randn(n) * 4).bfloat16()
    request = request_of(n, k, name, has_bias=True, tokens=TokenRange(1, 16))
    found = triton_gemm.bind(request, device_of("sm_90"), weight=weight, bias=bias)(x)
    assert counted.seen == [4]
    assert_close(found, exact_product(x, weight, "sm_90") + bias.double(), 2 * HALF_STEP)


@pytest.mark.parametrize("name", ["fp8_block128_a8", "int4_g32", "fp8_block32_ue8m0"])
def test_a_residual_is_added_to_the_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = 3, 48, 4096
    weight, x, counted = weight_of(n, k, name), rows_of(m, k), Splits(monkeypatch)
    residual = rows_of(m, n)
    request = FusedGemmRequest(
        n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name], has_residual=True,
        tokens=TokenRange(1, 16),
    )  # fmt: skip
    found = triton_fused.bind(request, device_of("sm_90"), weight=weight)(x, residual)
    assert counted.seen == [8]
    wide = 3 * k**0.5 if weight.format.element == "int" else 2.0
    exact = exact_product(x, weight, "sm_90") + residual.double()
    assert_close(found, exact, wide * HALF_STEP)
    choices = fused_limits.choose_kernels(request, device_of("sm_90"))
    assert not isinstance(choices, Reason)
    assert [(choice.kernel, choice.config) for choice in choices][1] == (
        "fused_gemm.split_k_sum",
        "split8-residual",
    )


def test_a_gate_and_a_rounding_follow_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, name = 3, 128, 2176, "fp8_block128_a8"
    weight, x, counted = weight_of(2 * n, k, name), rows_of(m, k), Splits(monkeypatch)
    request = FusedGemmRequest(
        n=2 * n, k=k, dtype="bfloat16", weight_format=FORMATS[name], epilogue="silu_gated",
        clamp=7.0, out_dtype="fp8_e4m3fn", out_group_size=128, tokens=TokenRange(1, 16),
    )  # fmt: skip
    values, scales = triton_fused.bind(request, device_of("sm_90"), weight=weight)(x)
    assert counted.seen == [4]
    gate, up = exact_product(x, weight, "sm_90").chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)
    want = torch.where(exact.abs().amax(-1, keepdim=True) > 0, exact.abs().amax(-1, True) / 448, 1)
    assert torch.allclose(scales.double(), want, rtol=2.0**-11)
    # Half a step of e4m3, or a whole one where the float32 sum is on the other side of a tie.
    allowed = 2.0**-3 * exact.abs() + 2.0**-8 * scales.double()
    assert ((values.double() * scales.double() - exact).abs() <= allowed).all()


def test_results_in_float32_and_rows_in_float16() -> None:
    n, k = 40, 2080
    weight = weight_of(n, k, "int8_g32")
    head = request_of(n, k, "int8_g32", out_dtype="float32", tokens=TokenRange(1, 16))
    x = rows_of(3, k)
    found = triton_gemm.bind(head, device_of("sm_90"), weight=weight)(x)
    assert found.dtype == torch.float32
    assert_close(found, exact_product(x, weight, "sm_90"), 3 * k**0.5 * HALF_STEP)
    half = dataclasses.replace(head, out_dtype="", dtype="float16")
    x = x.clamp(-50, 50).half()
    found = triton_gemm.bind(half, device_of("sm_90"), weight=weight)(x)
    assert found.dtype == torch.float16
    assert_close(found, exact_product(x, weight, "sm_90"), 3 * k**0.5 * 2.0**-11)


def test_many_rows_and_busy_devices_take_the_whole_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, k, name = 200, 2080, "int4_g32"
    weight, counted = weight_of(n, k, name), Splits(monkeypatch)
    request = request_of(n, k, name)
    triton_gemm.bind(request, device_of("sm_90"), weight=weight)(rows_of(FEW_ROWS + 1, k))
    for units in (0, 1):  # not known, and fewer programs wanted than there are tiles
        triton_gemm.bind(request, device_of("sm_90", units), weight=weight)(rows_of(2, k))
    # Where configurations are measured nothing else is launched than what is measured.
    with forced_configuration("gemm.weight_only", {
        "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 1, "num_warps": 4, "num_stages": 3,
    }) as forced:  # fmt: skip
        triton_gemm.bind(request, device_of("sm_90"), weight=weight)(rows_of(2, k))
    assert forced.is_launched
    assert counted.seen == []


def test_a_plan_judges_the_parts_and_their_sum() -> None:
    request = request_of(1536, 7168, "fp8_block128_a8", tokens=TokenRange(1, 16))
    choices = choose_kernels(request, device_of("sm_90"))
    assert not isinstance(choices, Reason)
    assert [(choice.kernel, choice.config) for choice in choices] == [
        ("gemm.split_k", "g128"),
        ("gemm.split_k_sum", "split8-plain"),
    ]
    assert not not_supported_reasons(request, device_of("sm_90"))
    shape = shape_of(request, device_of("sm_90"))
    assert shape is not None
    assert (shape[0], shape[1].form, shape[1].rows) == ("gemm.split_k", "g128", 16)
    for other, device in (
        (dataclasses.replace(request, tokens=TokenRange(1, 17)), device_of("sm_90")),
        (dataclasses.replace(request, n=65_536), device_of("sm_90")),
        (request, gpu("sm_90")),
        (request, device_of("gfx1100")),  # FP8 is widened there: parts of it are not native
    ):
        whole = choose_kernels(other, device)
        assert not isinstance(whole, Reason)
        name = "fp8_widened" if device.arch == "gfx1100" else "fp8_block"
        assert [choice.kernel for choice in whole] == [f"gemm.{name}"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"dtype": "float16", "weight_format": FORMATS["fp8_block128_a8"]},
            "bfloat16 for FP8 weights",
        ),
        ({"out_dtype": "float16"}, "bfloat16 or float32"),
    ],
)
def test_results_of_which_no_code_is_compiled_are_refused(
    fields: dict[str, Any], told: str
) -> None:
    request = dataclasses.replace(request_of(64, 2048, "int4_g32"), **fields)
    (reason,) = not_supported_reasons(request, device_of("sm_90"))
    assert reason.required == told


def test_a_sum_stores_what_follows_as_it_was_compiled() -> None:
    fields: dict[str, Any] = {"tokens": TokenRange(1, 16), "weight_format": FORMATS["bfloat16"]}
    for more, config in (
        ({}, "split4-plain"),
        ({"has_bias": True}, "split4-bias"),
        ({"epilogue": "silu"}, "split4-bias"),
        ({"epilogue": "silu_gated", "has_bias": True}, "split4-gated"),
        ({"out_dtype": "float32"}, "split4-plain-float32"),
    ):
        request = GemmRequest(n=512, k=4096, dtype="bfloat16", **fields, **more)
        choices = choose_kernels(request, gpu("sm_90"))
        assert not isinstance(choices, Reason)
        assert choices[1].config == config
        assert not not_supported_reasons(request, gpu("sm_90"))
    biased = GemmRequest(
        n=512, k=4096, dtype="bfloat16", has_bias=True, out_dtype="float32", **fields
    )
    (reason,) = not_supported_reasons(biased, gpu("sm_90"))
    assert "float32" in reason.required
