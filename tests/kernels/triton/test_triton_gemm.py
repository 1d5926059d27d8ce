"""Triton products in the interpreter against float64 products of the stored values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import hal_kernels.gemm.triton as triton_gemm
from gpu_devices import gpu
from hal.errors import BindingError
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.gemm import GemmRequest, apply_epilogue, reference
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.gemm.triton_limits import KernelChoice, choose_kernel, not_supported_reasons
from hal_kernels.gemm.triton_variants import configurations
from kernel_errors import assert_exact

SHAPES = [(1, 48, 64), (3, 33, 80), (17, 130, 96), (40, 64, 2080)]
IDS = ["m1n48k64", "m3n33k80", "m17n130k96", "m40n64k2080"]


def request_of(shape: tuple[int, int, int], dtype: str, **fields: Any) -> GemmRequest:
    _, n, k = shape
    defaults: dict[str, Any] = {"n": n, "k": k, "dtype": dtype, "weight_format": FORMATS[dtype]}
    return GemmRequest(**(defaults | fields))


def assert_close(found: torch.Tensor, exact: torch.Tensor, times: float = 1.0) -> None:
    assert_exact("gemm", found, exact, times=times, floor=1e-6)


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different magnitude, not contiguous."""
    x = torch.randn(count, width + 16) * torch.logspace(-2, 2, count)[:, None]
    return x.to(dtype)[:, :width]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("form", ["plain", "bias", "silu", "gated", "gated-bias"])
def test_dense(shape: tuple[int, int, int], dtype: str, form: str) -> None:
    m, n, k = shape
    torch_dtype: torch.dtype = getattr(torch, dtype)
    is_gated, has_bias = "gated" in form, "bias" in form
    epilogue = "silu_gated" if is_gated else ("silu" if form == "silu" else "none")
    stored = 2 * n if is_gated else n
    weight = (torch.randn(stored, k) / k**0.5).to(torch_dtype)
    bias = torch.randn(stored).to(torch_dtype) if has_bias else None
    x = rows(m, k, torch_dtype).clamp(-50, 50)
    request = request_of(shape, dtype, n=stored, has_bias=has_bias, epilogue=epilogue)
    kernel = triton_gemm.bind(request, gpu("sm_120"), weight=weight, bias=bias)
    exact = reference(request, weight=weight, bias=bias)(x.double())
    assert_close(kernel(x), exact, 2.0)


def test_a_split_product_does_not_depend_on_the_other_rows() -> None:
    request = request_of((16, 48, 4096), "bfloat16")
    weight = torch.randn(48, 4096).bfloat16()
    kernel = triton_gemm.bind(request, gpu("sm_90"), weight=weight)
    x = rows(16, 4096, torch.bfloat16)
    assert torch.equal(kernel(x)[:1], kernel(x[:1]))


def test_no_rows_and_float32_results() -> None:
    request = request_of((1, 48, 64), "bfloat16", out_dtype="float32")
    weight = torch.randn(48, 64).bfloat16()
    kernel = triton_gemm.bind(request, gpu("gfx942"), weight=weight)
    assert kernel(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 48)
    x = torch.randn(5, 64).bfloat16()
    assert kernel(x).dtype == torch.float32
    assert_close(kernel(x), x.double() @ weight.double().T)


def integer_weight(n: int, k: int, name: str) -> QuantizedWeight:
    """Random codes with random scales: every value that the format can hold."""
    form = FORMATS[name]
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


def weight_only(n: int, k: int, name: str) -> QuantizedWeight:
    form = FORMATS[name]
    if form.element == "int":
        return integer_weight(n, k, name)
    return quantize_weight(torch.randn(n, k) / k**0.5, form)


WEIGHTS_ALONE = [
    "int8_channel", "int8_g32", "int4_g32", "int4_g32_asym", "int4_g64", "int4_g64_zero",
    "int4_g128", "int4_g128_zero", "fp8_block128", "fp8_block32", "fp8_block32_ue8m0",
]  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=IDS[:3])
@pytest.mark.parametrize("arch", ["sm_89", "gfx942"])
def test_weight_only(arch: str, shape: tuple[int, int, int], name: str) -> None:
    m, n, k = shape
    group = max(32, FORMATS[name].group_size or 0)
    k = -(-k // group) * group
    weight = weight_only(n, k, name)
    request = request_of((m, n, k), "bfloat16", weight_format=FORMATS[name])
    x = rows(m, k, torch.bfloat16)
    kernel = triton_gemm.bind(request, gpu(arch), weight=weight)
    exact = x.double() @ weight.dequantize().double().T
    # A dequantised integer is rounded to bfloat16 before it is multiplied.
    assert_close(kernel(x), exact, 3.0 * k**0.5 if weight.format.element == "int" else 2.0)


@pytest.mark.parametrize("epilogue", ["none", "silu", "silu_gated"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", WEIGHTS_ALONE)
@pytest.mark.parametrize(("m", "dtype"), [(3, "bfloat16"), (19, "float16")], ids=["few", "many"])
def test_what_follows_a_weight_alone(
    m: int, dtype: str, name: str, has_bias: bool, epilogue: Any
) -> None:
    form, n = FORMATS[name], 70
    k = 384 if (form.group_size or 0) > 32 and form.bits == 4 else 224
    dtype = dtype if form.element == "int" else "bfloat16"
    torch_type = getattr(torch, dtype)
    weight, bias = weight_only(n, k, name), (torch.randn(n) * 2).to(torch_type)
    request = request_of((m, n, k), dtype, weight_format=form, has_bias=has_bias, epilogue=epilogue)
    assert not not_supported_reasons(request, gpu("sm_90"))
    x = rows(m, k, torch_type).clamp(-50, 50)
    found = triton_gemm.bind(request, gpu("sm_90"), weight=weight, bias=bias if has_bias else None)(
        x
    )
    exact = x.double() @ weight.dequantize().double().T
    exact = apply_epilogue(epilogue, exact + bias.double() if has_bias else exact)
    assert_close(found, exact, 3.0 * k**0.5 if form.element == "int" else 2.0)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_a8", "gfx942"),
        ("fp8_block32_ue8m0_a8", "sm_90"),
        ("fp8_block32_ue8m0_a8", "sm_120"),
        ("fp8_block32_a8", "sm_120"),
    ],
)
@pytest.mark.parametrize("follows", ["bias", "silu", "float32"])
@pytest.mark.parametrize("m", [1, 19])
def test_what_follows_two_fp8_operands(m: int, follows: str, name: str, arch: str) -> None:
    n, k, form = 70, 384, FORMATS[name]
    weight, x = quantize_weight(torch.randn(n, k) / k**0.5, form), rows(m, k, torch.bfloat16)
    bias = (torch.randn(n) * 2).bfloat16() if follows == "bias" else None
    request = request_of(
        (m, n, k), "bfloat16", weight_format=form, has_bias=bias is not None,
        epilogue="silu" if follows == "silu" else "none",
        out_dtype="float32" if follows == "float32" else "",
    )  # fmt: skip
    assert not not_supported_reasons(request, gpu(arch))
    found = triton_gemm.bind(request, gpu(arch), weight=weight, bias=bias)(x)
    assert found.dtype == (torch.float32 if follows == "float32" else torch.bfloat16)
    exact = fp8_product(x, weight, arch)
    exact = exact if bias is None else exact + bias.double()
    assert_close(found, apply_epilogue(request.epilogue, exact), 2.0)


def test_more_than_one_step_behind_two_fp8_operands_is_refused() -> None:
    form = FORMATS["fp8_block128_a8"]
    request = request_of(
        (4, 64, 256), "bfloat16", weight_format=form, has_bias=True, epilogue="silu_gated"
    )
    (reason,) = not_supported_reasons(request, gpu("sm_90"))
    assert reason.found == "gated and bias"
    wide = request_of((4, 64, 256), "bfloat16", has_bias=True, out_dtype="float32")
    (reason,) = not_supported_reasons(wide, gpu("sm_90"))
    assert "float32" in reason.required


def test_a_bias_that_the_request_does_not_name_is_refused() -> None:
    form = FORMATS["int8_channel"]
    request = request_of((4, 64, 64), "bfloat16", weight_format=form)
    with pytest.raises(BindingError, match="has_bias=False"):
        triton_gemm.bind(
            request, gpu("sm_90"), weight=integer_weight(64, 64, "int8_channel"),
            bias=torch.randn(64).bfloat16(),
        )  # fmt: skip


def fp8_product(x: torch.Tensor, weight: QuantizedWeight, arch: str) -> torch.Tensor:
    """In float64, of the rows as the format rounds them."""
    form = weight.format
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    is_ue8m0 = form.activation.startswith("mxfp8") or "ue8m0" in form.activation
    kind = "ue8m0" if is_ue8m0 else "float32"
    values, scales = quantize_groups(
        x, group_size=int(form.group_size or 0), element=element, scale_kind=kind
    )
    rounded = dequantize_groups(values, scales, element=element, scale_kind=kind)
    return rounded.double() @ weight.dequantize().double().T


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_a8", "gfx942"),  # the fnuz encoding: the same bits mean half
        ("fp8_block32_ue8m0_a8", "sm_90"),  # no scaled matrix instruction: scales outside
        ("fp8_block32_ue8m0_a8", "sm_120"),
    ],
)
@pytest.mark.parametrize("shape", [(1, 130, 256), (19, 64, 384)], ids=["m1", "m19"])
def test_fp8_blocks(shape: tuple[int, int, int], name: str, arch: str) -> None:
    m, n, k = shape
    form = FORMATS[name]
    weight = quantize_weight(torch.randn(n, k) / k**0.5, form)
    request = request_of(shape, "bfloat16", weight_format=form)
    x = rows(m, k, torch.bfloat16)
    kernel = triton_gemm.bind(request, gpu(arch), weight=weight)
    exact = fp8_product(x, weight, arch)
    assert_close(kernel(x), exact)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_ue8m0_a8", "sm_120"),
        ("fp8_block128_a8", "gfx942"),
        ("fp8_block32_ue8m0_a8", "gfx1201"),
        ("fp8_block32_ue8m0_a8", "sm_120"),
        ("fp8_block32_ue8m0_a8", "gfx950"),
    ],
)
@pytest.mark.parametrize("shape", [(1, 65, 256), (19, 200, 384)], ids=["m1", "m19"])
def test_fp8_blocks_of_a_gated_product(shape: tuple[int, int, int], name: str, arch: str) -> None:
    """Halves that end inside a block of scales, and rows of any size."""
    m, n, k = shape
    form = FORMATS[name]
    weight = quantize_weight(
        torch.randn(2 * n, k) / k**0.5 * torch.logspace(-1, 1, 2 * n)[:, None], form
    )
    request = request_of(shape, "bfloat16", n=2 * n, weight_format=form, epilogue="silu_gated")
    x = rows(m, k, torch.bfloat16)
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    group, kind = int(form.group_size or 0), "ue8m0" if "ue8m0" in name else "float32"
    values, scales = quantize_groups(x, group_size=group, element=element, scale_kind=kind)
    rounded = dequantize_groups(values, scales, element=element, scale_kind=kind)
    gate, up = (rounded.double() @ weight.dequantize().double().T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert_close(triton_gemm.bind(request, gpu(arch), weight=weight)(x), exact, 2.0)


@pytest.mark.parametrize("arch", ["sm_120", "sm_100", "gfx950"])
def test_few_rows_of_scaled_blocks_have_tiles_of_their_own(arch: str) -> None:
    """A decode of the scaled matrix unit: fewer rows or columns in a tile than a prefill."""
    device = gpu(arch)
    for epilogue in ("none", "silu_gated"):
        request = request_of(
            (1, 256, 256), "bfloat16", weight_format=FORMATS["fp8_block32_ue8m0_a8"],
            epilogue=epilogue,
        )  # fmt: skip
        few = choose_kernel(dataclasses.replace(request, tokens=TokenRange(1, 16)), device)
        many = choose_kernel(dataclasses.replace(request, tokens=TokenRange(1, 17)), device)
        assert isinstance(few, KernelChoice)
        assert isinstance(many, KernelChoice)
        assert few.kernel == many.kernel == "gemm.mxfp8"
        assert few.config == f"{many.config}-small"
        table = configurations("gemm_mxfp8", triton_gemm.target_of(device))
        sizes = [table[c.config]["BLOCK_M"] * table[c.config]["BLOCK_N"] for c in (few, many)]
        assert sizes[0] <= sizes[1] // 2


@pytest.mark.parametrize(
    "name", ["fp8_block32_ue8m0", "fp8_block128_ue8m0", "fp8_block128"], ids=str
)
@pytest.mark.parametrize("shape", [(1, 130, 256), (19, 48, 200)], ids=["m1", "m19-cut"])
def test_fp8_weights_with_the_activations_as_they_are(
    shape: tuple[int, int, int], name: str
) -> None:
    """Nothing is rounded but the result: weights of any size meet activations in 16 bits."""
    m, n, k = shape
    sizes = torch.logspace(-6, 4, n)[:, None] * torch.logspace(-2, 2, k)
    weight = quantize_weight(torch.randn(n, k) * sizes, FORMATS[name])
    request = request_of(shape, "bfloat16", weight_format=FORMATS[name])
    x = (torch.randn(m, k + 16) / torch.logspace(-2, 2, k + 16)).bfloat16()[:, :k]
    found = triton_gemm.bind(request, gpu("gfx942"), weight=weight)(x)
    exact = reference(request, weight=weight)(x.double())
    assert found.dtype == torch.bfloat16
    # Each element against the magnitudes that it is the sum of: its block's scale is its own.
    most = x.double().abs() @ weight.dequantize().double().abs().T
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * most).all()


def test_fp8_weights_that_are_not_numbers_are_refused() -> None:
    weight = quantize_weight(torch.randn(32, 32), FORMATS["fp8_block32_ue8m0"])
    weight.data.view(torch.uint8)[3, 5] = 0xFF
    request = request_of((1, 32, 32), "bfloat16", weight_format=weight.format)
    with pytest.raises(BindingError, match="NaN among them"):
        triton_gemm.bind(request, gpu("sm_90"), weight=weight)


@pytest.mark.parametrize("name", ["fp8_block32_ue8m0", "fp8_block128_a8", "int8_channel"])
def test_quantised_weights_with_results_in_float32(name: str) -> None:
    shape, form = (3, 48, 256), FORMATS[name]
    weight = (
        integer_weight(48, 256, name)
        if form.element == "int"
        else quantize_weight(torch.randn(48, 256), form)
    )
    request = request_of(shape, "bfloat16", weight_format=form, out_dtype="float32")
    x = torch.randn(3, 256).bfloat16()
    found = triton_gemm.bind(request, gpu("sm_90"), weight=weight)(x)
    assert found.dtype == torch.float32
    # int8's values are rounded to the activations' dtype in the product.
    assert_close(found, reference(request, weight=weight)(x.double()), 10.0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"dtype": "float16"}, "bfloat16 for FP8 weights"),
        ({"out_dtype": "float16"}, "bfloat16 or float32"),
    ],
)
@pytest.mark.parametrize("name", ["fp8_block128_a8", "fp8_block32_ue8m0"])
def test_results_of_which_no_code_is_compiled_are_refused(
    name: str, fields: dict[str, Any], told: str
) -> None:
    request = request_of((1, 48, 256), "bfloat16", weight_format=FORMATS[name])
    found = choose_kernel(dataclasses.replace(request, **fields), gpu("sm_90"))
    assert isinstance(found, Reason)
    assert found.required == told


def test_what_no_kernel_is_written_for_is_refused() -> None:
    request = request_of((1, 48, 64), "bfloat16", weight_format=FORMATS["nvfp4"])
    with pytest.raises(BindingError, match="nvfp4"):
        triton_gemm.bind(request, gpu("sm_120"), weight=torch.empty(48, 64))


@pytest.mark.parametrize("name", ["int4_g128", "int8_g32"])
def test_scales_in_bfloat16_are_read_as_float16_where_nothing_is_lost(name: str) -> None:
    m, n, k = 3, 48, 256
    given = integer_weight(n, k, name)
    weight = dataclasses.replace(given, scale=given.scale.bfloat16())
    request = request_of((m, n, k), "bfloat16", weight_format=FORMATS[name])
    x = rows(m, k, torch.bfloat16)
    found = triton_gemm.bind(request, gpu("sm_90"), weight=weight)(x)
    assert_close(found, x.double() @ weight.dequantize().double().T, 3.0 * k**0.5)
    tiny = dataclasses.replace(weight, scale=weight.scale * 2**-20)
    with pytest.raises(BindingError, match="float16 holds exactly"):
        triton_gemm.bind(request, gpu("sm_90"), weight=tiny)
