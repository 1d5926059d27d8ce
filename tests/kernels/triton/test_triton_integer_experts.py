"""Triton products per expert with int8 and int4 weights in the interpreter, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import hal_kernels.gemm.triton as triton_gemm
import hal_kernels.gemm.triton_quantised as triton_quantised
import hal_kernels.grouped_gemm.triton as triton_grouped
from absent_plans import profile
from gpu_devices import gpu
from hal.errors import BindingError
from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.request import TokenRange
from hal.reasons import Reason, ReasonKind
from hal_kernels.grouped_gemm.triton_limits import choose_kernel, not_supported_reasons
from recorded_launches import recorded

ROWS = [0, 1, 16, 17, 0, 3]  # per expert: none, one, a tile exactly, a tile and one
CLAMP = 0.6  # well inside what the products reach
HALF_STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
NAMES = ["int8_channel", "int8_g32", "int4_g32", "int4_g32_asym"]


def request_of(name: str, n: int, k: int, **fields: Any) -> GroupedGemmRequest:
    given: dict[str, Any] = {
        "num_experts": len(ROWS), "experts_per_token": 2, "dtype": "bfloat16",
        "weight_format": FORMATS[name], **fields,
    }  # fmt: skip
    return GroupedGemmRequest(n=n, k=k, **given)


def weight_of(name: str, n: int, k: int) -> QuantizedWeight:
    """Every value that a format can hold, rows of different magnitude."""
    form = FORMATS[name]
    groups = (k // 32,) if form.group_size else ()
    sizes = torch.logspace(-1, 1, n)[torch.randperm(n)].reshape(n, *[1] * len(groups))
    scale = torch.rand(n, *groups) * sizes / 2**form.bits / k**0.5
    scale = scale.half() if form.group_size else scale
    if form.bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        return QuantizedWeight(format=form, data=data, scale=scale)
    minimum = None if form.is_symmetric else (-torch.rand(n, *groups) * sizes / k**0.5).half()
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return QuantizedWeight(format=form, data=data, scale=scale, minimum=minimum)


@pytest.mark.parametrize(
    ("epilogue", "clamp"), [("none", 0.0), ("silu_gated", 0.0), ("silu_gated", CLAMP)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_integers_meet_rows_as_they_are(name: str, dtype: str, epilogue: str, clamp: float) -> None:
    n, k = 68, 160  # halves of a gated weight end within a tile, K within a step
    wide = getattr(torch, dtype)
    total = sum(ROWS)
    offsets = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    x = (torch.randn(total, k) * torch.logspace(-2, 1, total)[:, None]).to(wide)
    experts = [weight_of(name, n, k) for _ in ROWS]
    arch = {"bfloat16": "sm_120", "float16": "gfx1100"}[dtype]
    request = request_of(name, n, k, dtype=dtype, epilogue=epilogue, clamp=clamp)
    kernel = triton_grouped.bind(request, gpu(arch), weight=experts)
    found = kernel(x, offsets)
    assert found.dtype == wide
    # The weight is widened to the dtype of the rows, which rounds it; the sums are exact.
    scaled = [torch.ones(1)] * len(experts)
    if name == "int8_channel":  # integers are exact, their scale is multiplied into the sum
        scaled = [e.scale.double()[:, None] for e in experts]
    stored = [
        (e.dequantize().double() / s).to(wide).double() * s
        for e, s in zip(experts, scaled, strict=True)
    ]
    y = torch.cat([x[offsets[e] : offsets[e + 1]].double() @ stored[e].T for e in range(len(ROWS))])
    if epilogue == "silu_gated":
        gate, up = y.chunk(2, dim=-1)
        if clamp:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        y = gate * torch.sigmoid(gate) * up
    peak = y.abs().amax(dim=-1, keepdim=True)
    allowed = HALF_STEP[dtype] * y.abs() * 1.01 + 2.0**-13 * peak + 1e-6
    assert ((found.double() - y).abs() <= allowed).all()
    # Alone in the first tile of its expert a row is what it is among others.
    alone = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    assert torch.equal(kernel(x[:1], alone), found[:1])
    nothing = torch.zeros(len(ROWS) + 1, dtype=torch.int64)
    assert kernel(x[:0], nothing).shape == (0, request.out_features)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ["gemm", "grouped_gemm"])
def test_scales_are_read_in_the_dtype_that_code_was_compiled_for(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a bfloat16 checkpoint are converted where nothing is lost, or refused."""
    n, k, form = 64, 128, FORMATS[name]
    given = weight_of(name, n, k)
    minimum = None if given.minimum is None else given.minimum.bfloat16()
    weight = dataclasses.replace(given, scale=given.scale.bfloat16(), minimum=minimum)
    dense = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=form)

    def bound(one: QuantizedWeight) -> Any:
        if op == "gemm":
            return triton_gemm.bind(dense, gpu("sm_90"), weight=one)
        experts = [one] * len(ROWS)
        return triton_grouped.bind(request_of(name, n, k), gpu("sm_90"), weight=experts)

    x, ends = torch.randn(6, k).bfloat16(), torch.arange(len(ROWS) + 1)
    more = () if op == "gemm" else (ends,)
    want = x.double() @ weight.dequantize().bfloat16().double().T
    allowed = 2.0**-7 * want.abs() + 2.0**-7 * want.abs().amax()
    assert ((bound(weight)(x, *more).double() - want).abs() <= allowed).all()
    modules = {"gemm": triton_quantised, "grouped_gemm": triton_grouped}
    kernel = {"gemm": "_gemm_weight_only_kernel", "grouped_gemm": "_grouped_gemm_integer_kernel"}
    seen = recorded(monkeypatch, [modules[op]], kernel[op])[kernel[op]]
    bound(weight)(x, *more)
    (launched,) = seen
    found = {launched[one].dtype for one in launched if one.startswith(("scale_", "minimum_"))}
    assert found == {torch.float16 if form.group_size else torch.float32}
    if form.group_size:
        nan = torch.where(weight.scale == weight.scale.max(), torch.nan, weight.scale)
        bound(dataclasses.replace(weight, scale=nan))  # float16 has a NaN as well
        tiny = dataclasses.replace(weight, scale=weight.scale * 2**-20)
        with pytest.raises(BindingError, match="groups that float16 holds exactly"):
            bound(tiny)
    else:
        third = dataclasses.replace(weight, scale=torch.full((n,), 1 / 3, dtype=torch.float64))
        with pytest.raises(BindingError, match="rows that float32 holds exactly"):
            bound(third)


@pytest.mark.parametrize(
    "device", ["h200-sxm", "rtx-4090", "mi300x", "radeon-pro-w7900", "a100-sxm-80g"]
)
def test_every_format_is_native_on_every_device(device: str) -> None:
    spec = profile(device)
    for name in NAMES:
        for rows in (1, 512):
            for fields in ({}, {"epilogue": "silu_gated"}, {"dtype": "float16"}):
                request = request_of(name, 1536, 2048, tokens=TokenRange(1, rows), **fields)
                assert not not_supported_reasons(request, spec)


def test_integers_whose_rows_are_rounded_are_another_kernels() -> None:
    for name in ("int8_channel_a8", "int4_g32_a8"):
        found = choose_kernel(request_of(name, 64, 64), gpu("sm_90"))
        assert isinstance(found, Reason)
        assert found.kind is ReasonKind.MISSING
    odd = dataclasses.replace(FORMATS["int8_g32"], group_size=64, name="int8_g64")
    found = choose_kernel(request_of("int8_g32", 64, 64, weight_format=odd), gpu("sm_90"))
    assert isinstance(found, Reason)
    assert found.found == "int8_g64"


@pytest.mark.parametrize("name", ["fp8_block32", "fp8_channel", "int4_g32_a8", "nvfp4", "mxfp4_a4"])
def test_a_refusal_names_what_is_served(name: str) -> None:
    """Every format that it names is, and the one that it refuses is none of them."""
    found = choose_kernel(request_of(name, 64, 256), gpu("sm_90"))
    assert isinstance(found, Reason)
    assert name not in found.required.replace(",", "").split()
    assert found.required.startswith("dense, FP8 in blocks of 128 or 32 (32 with ue8m0 scales")
    served = {form for form in FORMATS if form in found.required.replace(",", "").split()}
    served |= {f"fp8_block{group}_a8" for group in (32, 128)}
    served |= {"fp8_block128", "fp8_block128_ue8m0", "fp8_block128_ue8m0_a8", "bfloat16"}
    served |= {"fp8_block32_ue8m0", "fp8_block32_ue8m0_a8"}
    for form in FORMATS:
        choice = choose_kernel(request_of(form, 64, 256), gpu("sm_90"))
        assert isinstance(choice, Reason) == (form not in served), form
