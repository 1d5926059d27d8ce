"""Triton products of rows that come rounded, values and scales: which scales each kernel takes, in
the interpreter against float64 products of what the rows hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hal_kernels.gemm.triton as triton_gemm
import hal_kernels.grouped_gemm.triton as triton_grouped
import hal_kernels.quantize.triton as triton_quantize
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import TokenRange
from hal_kernels.grouped_gemm.triton_limits import choose_kernels
from kernel_errors import assert_exact

ROWS = [0, 1, 16, 2]  # per expert


def rows_of(k: int) -> torch.Tensor:
    total = sum(ROWS)
    return (torch.randn(total, k) * torch.logspace(-2, 2, total)[:, None]).bfloat16()


def experts_of(name: str, n: int, k: int) -> list[QuantizedWeight]:
    form = FORMATS[name]
    if form.element != "int":
        return [quantize_weight(torch.randn(n, k) / k**0.5, form) for _ in ROWS]
    scale = torch.rand(form.scale_shape(n, k))
    shape, dtype = ((n, k), torch.int8) if form.bits == 8 else ((n, k // 2), torch.uint8)
    data = torch.randint(0, 100, shape, dtype=dtype)
    return [QuantizedWeight(format=form, data=data, scale=scale.half()) for _ in ROWS]


def grouped(name: str, n: int, k: int, **fields: Any) -> GroupedGemmRequest:
    return GroupedGemmRequest(
        num_experts=len(ROWS), experts_per_token=2, n=n, k=k, dtype="bfloat16",
        weight_format=FORMATS[name], **fields,
    )  # fmt: skip


def product_of(
    op: str, name: str, device: DeviceSpec, n: int, k: int
) -> tuple[Callable[[Any], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """A bound product, and the same of rows in float64."""
    experts = experts_of(name, n, k)
    stored = [expert.dequantize().double() for expert in experts]
    if op == "gemm":
        request = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name])
        bound = triton_gemm.bind(request, device, weight=experts[0])
        return bound, lambda rows: rows @ stored[0].T
    ends = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    kernel = triton_grouped.bind(grouped(name, n, k), device, weight=experts)

    def exact(rows: torch.Tensor) -> torch.Tensor:
        parts = [rows[ends[e] : ends[e + 1]] @ stored[e].T for e in range(len(ROWS))]
        return torch.cat(parts)

    return lambda x: kernel(x, ends), exact


@pytest.mark.parametrize("kind", ["float32", "ue8m0"])
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_a8", "gfx942"),
        ("fp8_block128_ue8m0_a8", "sm_120"),
        ("fp8_block32_ue8m0_a8", "sm_90"),  # scaled outside of the unit
        ("fp8_block32_a8", "sm_120"),
        ("fp8_block128_a8", "gfx1100"),  # widened
    ],
)
@pytest.mark.parametrize("op", ["gemm", "grouped_gemm"])
def test_scales_are_read_as_what_they_are(op: str, name: str, arch: str, kind: str) -> None:
    """A kernel that multiplies by float32 scales is given codes decoded, whatever the format."""
    n, k, form = 64, 256, FORMATS[name]
    x, element = rows_of(k), "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    group = int(form.group_size or 0)
    values, scales = quantize_groups(x, group_size=group, element=element, scale_kind=kind)
    kernel, exact = product_of(op, name, gpu(arch), n, k)
    rounded = dequantize_groups(values, scales, element=element, scale_kind=kind).double()
    assert_exact(op, kernel((values, scales)), exact(rounded), floor=1e-6)
    for other in (scales.half(), scales.double(), scales.int()):
        with pytest.raises(ValueError, match=r"in float32 or ue8m0 codes \(uint8\), found"):
            kernel((values, other))
    with pytest.raises(ValueError, match="required rounded rows"):
        kernel((values.to(torch.float8_e5m2), scales))


@pytest.mark.parametrize(
    ("op", "name", "arch"),
    [
        ("gemm", "fp8_block32_ue8m0_a8", "sm_120"),
        ("grouped_gemm", "mxfp4_a8", "sm_120"),
        ("grouped_gemm", "mxfp4_a8", "sm_90"),
        ("grouped_gemm", "mxfp4_a8", "sm_80"),  # widened before the product
    ],
)
def test_a_kernel_that_reads_codes_refuses_other_scales(op: str, name: str, arch: str) -> None:
    n, k = 64, 256
    kernel, exact = product_of(op, name, gpu(arch), n, k)
    values, codes = quantize_groups(
        rows_of(k), group_size=32, element="fp8_e4m3fn", scale_kind="ue8m0"
    )
    rounded = dequantize_groups(values, codes, element="fp8_e4m3fn", scale_kind="ue8m0").double()
    assert_exact(op, kernel((values, codes)), exact(rounded), floor=1e-6)
    for other in (codes.float(), codes.half(), codes.int()):
        with pytest.raises(ValueError, match=r"in ue8m0 codes \(uint8\), found") as refused:
            kernel((values, other))
        assert str(refused.value).startswith(f"{op}: ")
    with pytest.raises(ValueError, match=r"with scales \[19, 8\]"):
        kernel((values, codes[:, :1]))


@pytest.mark.parametrize("units", [0, 132])
def test_experts_on_a100_are_what_their_plan_calls(units: int) -> None:
    """A call that rounds the rows and the product behind it, whole and in parts along K: bit by bit
    the product that rounds by itself, not finite rows and the least scales among them."""
    device = dataclasses.replace(gpu("sm_80"), attributes={"warp_size": 32, "compute_units": units})
    n, k = 64, 2048
    x = rows_of(k)
    x[3, :64], x[5, 7], x[6, 40], x[7] = 0.0, torch.nan, torch.inf, x[7] * 2.0**-118
    request = grouped("mxfp4_a8", n, k, tokens=TokenRange(1, 1))
    names = [choice.kernel for choice in choose_kernels(request, device)]  # type: ignore[union-attr]
    assert ("grouped_gemm.split_k" in names) == bool(units)
    rounding = QuantizeRequest(
        group_size=32, out_dtype="fp8_e4m3fn", scale_dtype="ue8m0", width=k, dtype="bfloat16"
    )
    pair = triton_quantize.bind(rounding, device)(x)
    kernel = triton_grouped.bind(request, device, weight=experts_of("mxfp4_a8", n, k))
    ends = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    found, own = kernel(pair, ends), kernel(x, ends)
    torch.testing.assert_close(found, own, rtol=0.0, atol=0.0, equal_nan=True)
    assert found.isnan().any(dim=1).nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("gemm", name) for name in ("fp8_block128", "int4_g32", "int8_channel")),
        *(("grouped_gemm", name) for name in ("fp8_block128", "mxfp4", "int4_g32", "int8_channel")),
    ],
)
def test_rows_that_stay_as_they_are_are_no_pair(op: str, name: str) -> None:
    kernel, _ = product_of(op, name, gpu("sm_90"), 64, 256)
    assert_refuses_a_pair(op, kernel)


def test_rows_of_a_dense_product_of_experts_are_no_pair() -> None:
    weight = torch.randn(len(ROWS), 64, 256).bfloat16()
    kernel = triton_grouped.bind(grouped("bfloat16", 64, 256), gpu("sm_90"), weight=weight)
    ends = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    assert_refuses_a_pair("grouped_gemm", lambda x: kernel(x, ends))


def assert_refuses_a_pair(op: str, kernel: Callable[[Any], torch.Tensor]) -> None:
    pair = quantize_groups(rows_of(256), group_size=128, element="fp8_e4m3fn", scale_kind="float32")
    with pytest.raises(ValueError, match=r"required rows \[M, K\] as they are") as refused:
        kernel(pair)
    assert str(refused.value).startswith(f"{op}: ")
