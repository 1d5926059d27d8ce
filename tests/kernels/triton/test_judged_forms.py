"""What limits judge is what is launched, of products: constants, tiles and types of the variant."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch

import hal_kernels.fused_gemm.triton as fused
import hal_kernels.gemm.triton as products
import hal_kernels.gemm.triton_quantised as quantised
import hal_kernels.gemm.triton_split_k as split_k
import hal_kernels.gemm.triton_stream_k as stream_k
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.errors import RequestError
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.aot.variant import KernelVariant
from hal_kernels.fused_gemm import triton_limits as fused_limits
from hal_kernels.gemm import triton_limits as gemm_limits
from recorded_launches import assert_compiled, assert_types, compiled, recorded

ARCHES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100")
N = 256


def fused_requests() -> Iterator[FusedGemmRequest]:
    """All that a request may say, consistent or not with what the kernels have."""
    outs = [("", 0, "float32"), *((name, 0, "float32") for name in ("float32", "bfloat16"))]
    outs += [
        (fp8, group, scale)
        for fp8 in ("fp8_e4m3fn", "fp8_e4m3fnuz")
        for group in (32, 128)
        for scale in ("float32", "ue8m0")
    ]
    names = (
        "bfloat16", "float16", "fp8_block128_a8", "fp8_block32_ue8m0_a8", "fp8_block128",
        "int8_channel", "int4_g32_asym", "int4_g128_zero",
    )  # fmt: skip
    gates = (("none", 0.0), ("silu", 0.0), ("silu_gated", 0.0), ("silu_gated", 7.0))
    for name, dtype, rows, k, (epilogue, clamp), has_bias, has_residual, out in itertools.product(
        names, ("bfloat16", "float16"), (1, 64), (256, 2176), gates, (False, True), (False, True),
        outs,
    ):  # fmt: skip
        try:
            yield FusedGemmRequest(
                n=N, k=k, dtype=dtype, weight_format=FORMATS[name], epilogue=epilogue, clamp=clamp,
                has_bias=has_bias, has_residual=has_residual, out_dtype=out[0],
                out_group_size=out[1], out_scale_dtype=out[2],  # type: ignore[arg-type]
                tokens=TokenRange(rows, rows),
            )  # fmt: skip
        except RequestError:
            continue


@cache
def weight_of(name: str, k: int) -> torch.Tensor | QuantizedWeight:
    form = FORMATS[name]
    if form.is_dense:
        return torch.zeros(N, k, dtype=getattr(torch, name))
    if form.element != "int":
        return quantize_weight(torch.ones(N, k), form)
    scale = torch.ones(N, k // form.group_size).half() if form.group_size else torch.ones(N)
    if form.bits == 8:
        data = torch.zeros(N, k, dtype=torch.int8)
        return QuantizedWeight(format=form, data=data, scale=scale)
    data, minimum = torch.zeros(N, k // 2, dtype=torch.uint8), scale
    return QuantizedWeight(
        format=form, data=data, scale=scale, minimum=None if form.is_symmetric else minimum
    )


FUNCTIONS = {
    "dense": "_gemm_kernel", "split_k_sum": "_split_k_kernel",
    "fp8_block": "_gemm_fp8_block_kernel", "mxfp8": "_gemm_mxfp8_kernel",
    "weight_only": "_gemm_weight_only_kernel", "fp8_weight_only": "_gemm_weight_only_kernel",
    "stream_k": "_gemm_stream_k_kernel", "stream_k_fix_up": "_stream_k_fix_up_kernel",
    "split_k": "_gemm_split_k_kernel", "fp8_widened": "_gemm_fp8_widened_kernel",
}  # fmt: skip


def quantized(group: int, fp8: str, scale: torch.dtype) -> Callable[..., Any]:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        eight = getattr(torch, fp8.replace("fp8", "float8"))
        shape = (x.shape[0], x.shape[1] // group)
        return torch.zeros(x.shape, dtype=eight), torch.zeros(shape, dtype=scale)

    return quantize


def recorded_products(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """As `recorded`, of every product and sum of parts; roundings only allocate."""
    monkeypatch.setattr(
        quantised,
        "bind_quantize_groups",
        lambda group, out_dtype, is_ue8m0: quantized(
            group, out_dtype, torch.uint8 if is_ue8m0 else torch.float32
        ),
    )
    monkeypatch.setattr(
        quantised,
        "bind_quantize_rows",
        lambda arch, group, out_dtype, is_ue8m0: quantized(
            group, out_dtype, torch.uint8 if is_ue8m0 else torch.float32
        ),
    )
    functions = dict.fromkeys(FUNCTIONS.values())
    return recorded(monkeypatch, (products, quantised, split_k, stream_k), *functions)


def with_units(arch: str, units: int) -> DeviceSpec:
    device = gpu(arch)
    return dataclasses.replace(device, attributes={**device.attributes, "compute_units": units})


@pytest.mark.parametrize("units", [0, 132], ids=["whole", "split"])
@pytest.mark.parametrize("arch", ARCHES)
def test_products_with_what_follows(arch: str, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_products(monkeypatch)
    device, accepted = with_units(arch, units), 0
    for request in fused_requests():
        if fused_limits.not_supported_reasons(request, device, allowed=("native", "emulated")):
            continue
        accepted += 1
        choices = fused_limits.choose_kernels(request, device)
        assert not isinstance(choices, Reason)
        dtype = getattr(torch, request.dtype)
        bias = torch.zeros(N, dtype=dtype) if request.has_bias else None
        x = torch.zeros(request.tokens.high, request.k, dtype=dtype)
        residual = torch.zeros(len(x), request.out_features, dtype=dtype)
        weight = weight_of(request.weight_format.name, request.k)
        kernel = fused.bind(request, device, weight=weight, bias=bias)
        kernel(x, *([residual] if request.has_residual else []))
        for choice in choices:
            variant = compiled(choice.kernel, arch, choice.dtype, choice.config)
            (launched,) = found[FUNCTIONS[choice.kernel.split(".")[1]]]
            check_product(launched, variant, request)
        assert sum(map(len, found.values())) == len(choices)
        for launches in found.values():
            launches.clear()
    assert accepted > 20


def check_product(
    launched: Mapping[str, Any], variant: KernelVariant, request: GemmRequest
) -> None:
    fused = request if isinstance(request, FusedGemmRequest) else None
    tiles = [name for name in variant.constants if name.startswith(("BLOCK", "GROUP", "SPLIT"))]
    unused = [] if fused is not None and fused.has_residual else ["residual_MN_ptr"]
    if not request.has_bias:
        unused.append("bias_N_ptr")
    if fused is None or fused.out_scale_dtype != "ue8m0":
        unused.append("y_scale_MG_ptr")
    if variant.config.startswith("split") and "x_MK_ptr" in variant.pointers:
        # It stores parts, whatever becomes of their sum: of what follows it has the gate alone.
        assert_compiled(launched, variant, *tiles)
        assert (launched["EPILOGUE"] == 2) == (variant.constants["EPILOGUE"] == 2)
        assert_types(launched, variant, *unused, "y_MN_ptr", "y_scale_MG_ptr")
        return
    if "part_SMN_ptr" in variant.pointers and "x_MK_ptr" not in variant.pointers:
        assert launched["BLOCK_N"] <= variant.constants["BLOCK_N"]  # as wide as a row needs
        launched = {**launched, "BLOCK_N": variant.constants["BLOCK_N"]}
    if request.weight_format.name == "int8_channel":
        unused.append("minimum_NG_ptr")
    if variant.pointers.get("x_scale_MG_ptr") == variant.dtype:
        unused.append("x_scale_MG_ptr")
    assert_compiled(launched, variant)
    assert_types(launched, variant, *unused)
    # A step that is asked for is one that the compiled variant has.
    for name in ("CLAMP", "HAS_BIAS", "OUT_UE8M0"):
        assert not launched.get(name) or variant.constants[name], name


def quantised_requests() -> Iterator[GemmRequest]:
    """Products of the op gemm with quantised weights, served or not."""
    names = (
        "fp8_block128_a8", "fp8_block32_ue8m0_a8", "fp8_block128", "fp8_block32_ue8m0",
        "int8_channel", "int8_g32", "int4_g32", "int4_g32_asym", "int4_g64_zero", "int4_g128",
        "fp8_block32", "fp8_block32_a8",
    )  # fmt: skip
    for name, dtype, rows, k, epilogue, has_bias, out in itertools.product(
        names, ("bfloat16", "float16"), (1, 64), (256, 2176, 4224), ("none", "silu", "silu_gated"),
        (False, True), ("", "float32"),
    ):  # fmt: skip
        yield GemmRequest(
            n=N, k=k, dtype=dtype, weight_format=FORMATS[name], epilogue=epilogue,  # type: ignore[arg-type]
            has_bias=has_bias, out_dtype=out, tokens=TokenRange(rows, rows),
        )  # fmt: skip


def dense_requests() -> Iterator[GemmRequest]:
    """Dense products of the op gemm, served or not."""
    for dtype, rows, k, epilogue, has_bias, out in itertools.product(
        ("bfloat16", "float16"), (1, 64), (256, 2176), ("none", "silu", "silu_gated"),
        (False, True), ("", "float32"),
    ):  # fmt: skip
        yield GemmRequest(
            n=N, k=k, dtype=dtype, weight_format=FORMATS[dtype], epilogue=epilogue,  # type: ignore[arg-type]
            has_bias=has_bias, out_dtype=out, tokens=TokenRange(rows, rows),
        )  # fmt: skip


@pytest.mark.parametrize("units", [0, 132], ids=["whole", "split"])
@pytest.mark.parametrize("arch", ARCHES)
def test_quantised_products(arch: str, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, device = recorded_products(monkeypatch), with_units(arch, units)
    seen = launched_as_judged(found, device, quantised_requests())
    assert ("gemm.split_k" in seen) == (units > 0)
    assert {"gemm.weight_only", "gemm.fp8_weight_only"} <= seen


@pytest.mark.parametrize("units", [0, 132], ids=["whole", "shared-out"])
@pytest.mark.parametrize("arch", ARCHES)
def test_dense_products(arch: str, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, device = recorded_products(monkeypatch), with_units(arch, units)
    seen = launched_as_judged(found, device, dense_requests())
    shared = {"gemm.stream_k", "gemm.stream_k_fix_up"}
    assert seen == {"gemm.dense", *(shared if units else {"gemm.split_k_sum"})}


@pytest.mark.parametrize("units", [0, 16, 132], ids=lambda units: f"u{units}")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_many_rows_of_dense_products(
    arch: str, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide tiles by rows alone, by the rounds of a device, and shared out over one."""
    found, device = recorded_products(monkeypatch), with_units(arch, units)
    requests = [
        dataclasses.replace(request, tokens=TokenRange(rows, rows))
        for request in dense_requests()
        for rows in (512, 2048)
        if request.tokens.high == 1
    ]
    launched_as_judged(found, device, iter(requests))
    many = request_of_rows(2048)
    choices = gemm_limits.choose_kernels(many, device)
    assert not isinstance(choices, Reason)
    shared = ["gemm.stream_k", "gemm.stream_k_fix_up"] if units == 132 else ["gemm.dense"]
    assert [choice.kernel for choice in choices] == shared
    # Over so many multiprocessors the parts of wide tiles would be more than what they save.
    assert all(choice.config == ("large" if units == 132 else "wide") for choice in choices)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_many_rows_with_a_residual(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_products(monkeypatch)
    for units, config in ((0, "wide-residual"), (16, "wide-residual"), (132, "large-residual")):
        device = with_units(arch, units)
        for dtype in ("bfloat16", "float16"):
            request = FusedGemmRequest(
                n=N, k=256, dtype=dtype, weight_format=FORMATS[dtype], has_residual=True,
                tokens=TokenRange(2048, 2048),
            )  # fmt: skip
            choices = fused_limits.choose_kernels(request, device)
            assert not isinstance(choices, Reason)
            assert [choice.config for choice in choices] == [config]
            assert not fused_limits.not_supported_reasons(request, device)
            x, residual = (torch.zeros(2048, n, dtype=getattr(torch, dtype)) for n in (256, N))
            fused.bind(request, device, weight=weight_of(dtype, 256))(x, residual)
            (launched,) = found["_gemm_kernel"]
            variant = compiled("fused_gemm.dense", arch, dtype, config)
            check_product(launched, variant, request)
            found["_gemm_kernel"].clear()


def request_of_rows(rows: int) -> GemmRequest:
    return GemmRequest(
        n=N, k=2176, dtype="bfloat16", weight_format=FORMATS["bfloat16"],
        tokens=TokenRange(rows, rows),
    )  # fmt: skip


def launched_as_judged(
    found: dict[str, list[dict[str, Any]]], device: DeviceSpec, requests: Iterator[GemmRequest]
) -> set[str]:
    """The kernels of the requests that the limits serve, each launched as it was compiled."""
    seen: set[str] = set()
    for request in requests:
        if gemm_limits.not_supported_reasons(request, device):
            continue
        choices = gemm_limits.choose_kernels(request, device)
        assert not isinstance(choices, Reason)
        weight = weight_of(request.weight_format.name, request.k)
        dtype = getattr(torch, request.dtype)
        bias = torch.zeros(N, dtype=dtype) if request.has_bias else None
        x = torch.zeros(request.tokens.high, request.k, dtype=dtype)
        products.bind(request, device, weight=weight, bias=bias)(x)
        for choice in choices:
            variant = compiled(choice.kernel, device.arch, choice.dtype, choice.config)
            (launched,) = found[FUNCTIONS[choice.kernel.split(".")[1]]]
            check_product(launched, variant, request)
            seen.add(choice.kernel)
        assert sum(map(len, found.values())) == len(choices)
        for launches in found.values():
            launches.clear()
    return seen


@pytest.mark.parametrize(
    ("name", "rows", "fields", "told"),
    [
        ("bfloat16", 64, {"epilogue": "silu", "has_residual": True}, "none or silu_gated"),
        (
            "fp8_block128_a8",
            64,
            {"epilogue": "silu_gated", "clamp": 7.0, "has_bias": True},
            "one of",
        ),
        ("int8_channel", 64, {"out_dtype": "fp8_e4m3fn", "out_group_size": 32}, "or a gate"),
        ("bfloat16", 64, {"out_dtype": "float32", "has_residual": True}, "bfloat16"),
        ("float16", 64, {"epilogue": "silu_gated", "clamp": 7.0}, "unless it adds a residual"),
        ("fp8_block128_a8", 64, {"dtype": "float16", "has_residual": True}, "quantised weights"),
    ],
)
def test_what_no_variant_is_compiled_for_is_refused(
    name: str, rows: int, fields: dict[str, Any], told: str
) -> None:
    defaults = {"dtype": "float16" if name == "float16" else "bfloat16"}
    request = FusedGemmRequest(
        n=N, k=2176, weight_format=FORMATS[name], tokens=TokenRange(rows, rows), **defaults | fields
    )
    (reason,) = fused_limits.not_supported_reasons(request, gpu("sm_90"))
    assert told in reason.required


def test_a_plain_product_adds_no_residual() -> None:
    form = FORMATS["int8_channel"]
    request = GemmRequest(n=N, k=256, dtype="bfloat16", weight_format=form)
    weight = weight_of("int8_channel", 256)
    kernel = products.bind(request, gpu("sm_90"), weight=weight)
    x, residual = torch.randn(2, 256).bfloat16(), torch.randn(2, N).bfloat16()
    with pytest.raises(ValueError, match=r"required no residual.*has_residual=True"):
        kernel(x, residual)


def test_rows_rounded_in_another_way_are_told_the_right_one() -> None:
    form = FORMATS["fp8_block32_ue8m0_a8"]
    request = GemmRequest(n=N, k=256, dtype="bfloat16", weight_format=form)
    weight = weight_of("fp8_block32_ue8m0_a8", 256)
    kernel = products.bind(request, gpu("sm_120"), weight=weight)
    values = torch.zeros(2, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scales in ue8m0, or pass x as it is"):
        kernel((values, torch.ones(2, 8)))
    with pytest.raises(ValueError, match="groups of 32 and scales in ue8m0, or pass x"):
        kernel((values, torch.ones(2, 4)))
