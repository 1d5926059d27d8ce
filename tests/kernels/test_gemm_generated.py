"""The generated GEMM kernels against float64 products of the exact stored values."""

from __future__ import annotations

import pytest
import torch

from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.gemm import GemmRequest, apply_epilogue, quantize_rows, reference
from hal_kernels.gemm import cpu_generated, cpu_generated_int8
from hal_kernels.gemm.cpu_generated import bind_generated, is_exact_in
from hal_kernels.gemm.cpu_generated_int8 import bind_generated_int8
from hal_kernels.gemm.isa import VectorIsa, jit_requirements, vector_isa
from hal_kernels.gemm.jit_int8_block import Int8Kernel, Int8Weight

pytestmark = pytest.mark.skipif(
    bool(jit_requirements()), reason=f"generated GEMM kernels: {jit_requirements()}"
)

ROWS = (1, 2, 3, 4, 5, 13, 17, 40)
# Relative to the largest result: float32 sums of up to 200 products.
TOLERANCE = 3e-6
AVX2 = VectorIsa("haswell", "", lanes=8, registers=16, has_vnni=False)


@pytest.fixture(params=["host", "avx2"], autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VectorIsa:
    """Each test runs on the widest vectors of this CPU, and on AVX2 without VNNI."""
    chosen = vector_isa() if request.param == "host" else AVX2
    for module in (cpu_generated, cpu_generated_int8):
        monkeypatch.setattr(module, "vector_isa", lambda: chosen)
    return chosen


def random_quantized(name: str, n: int, k: int) -> QuantizedWeight:
    weight_format = FORMATS[name]
    group = weight_format.group_size
    shape = (n, k // group) if group else (n,)
    scale = torch.rand(shape) * 0.05 + 0.001
    if weight_format.bits == 8:
        data = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    else:
        data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    minimum = None if weight_format.is_symmetric else -torch.rand(shape).half()
    if group:
        scale = scale.half()
    return QuantizedWeight(format=weight_format, data=data, scale=scale, minimum=minimum)


def expected(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: str
) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return apply_epilogue(epilogue, y if bias is None else y + bias.double())  # type: ignore[arg-type]


def assert_close(y: torch.Tensor, reference: torch.Tensor) -> None:
    assert y.dtype == torch.float32
    assert y.shape == reference.shape
    # A lone result may cancel to almost nothing: then the error counts against its terms, near 1.
    size = reference.abs().max().clamp(min=1.0)
    error = (y.double() - reference).abs().max() / size
    assert error < TOLERANCE, f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (70, 101), (2, 7)], ids=["96x64", "70x101", "2x7"])
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
def test_dense_weights(dtype: torch.dtype, n: int, k: int, epilogue: str) -> None:
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    kernel = bind_generated(weight, bias, epilogue)  # type: ignore[arg-type]
    for rows in ROWS:
        x = torch.randn(rows, k)
        assert_close(kernel(x), expected(x, weight, bias, epilogue))


def test_silu_epilogue_far_from_zero() -> None:
    weight = torch.randn(32, 8) * 100
    kernel = bind_generated(weight, None, "silu")
    x = torch.randn(6, 8)
    assert_close(kernel(x), expected(x, weight, None, "silu"))


@pytest.mark.parametrize("name", ["int8_channel", "int8_g32", "int4_g32", "int4_g32_asym"])
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
def test_quantized_weights_are_the_stored_values(name: str, epilogue: str) -> None:
    for n, k in ((96, 64), (70, 96)):
        weight, bias = random_quantized(name, n, k), torch.randn(n)
        kernel = bind_generated(weight, bias, epilogue)  # type: ignore[arg-type]
        for rows in ROWS:
            x = torch.randn(rows, k)
            assert_close(kernel(x), expected(x, weight.dequantize(), bias, epilogue))


@pytest.mark.parametrize(
    "name", ["int8_channel_a8", "int8_g32_a8", "int4_g32_a8", "int4_g32_asym_a8"]
)
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
def test_int8_activations_are_those_of_quantize_rows(name: str, epilogue: str) -> None:
    shapes = [(96, 64), (70, 96)] + ([(40, 101)] if name == "int8_channel_a8" else [])
    for n, k in shapes:
        weight, bias = random_quantized(name, n, k), torch.randn(n)
        kernel = bind_generated_int8(weight, bias, epilogue)  # type: ignore[arg-type]
        for rows in ROWS:
            x = torch.randn(rows, k) * torch.logspace(-3, 3, rows)[:, None]
            x[0] = 0.0
            values, scale = quantize_rows(x)
            rounded = values.double() * scale.double()
            assert_close(kernel(x), expected(rounded, weight.dequantize(), bias, epilogue))


@pytest.mark.parametrize("name", ["int8_channel_a8", "int8_g32_a8"])
def test_the_generated_product_is_the_references(name: str) -> None:
    """What a plan may choose instead of one another, on the same rows."""
    weight, bias = random_quantized(name, 70, 160), torch.randn(70)
    request = GemmRequest(n=70, k=160, dtype="float32", weight_format=FORMATS[name], has_bias=True)
    expect = reference(request, weight=weight, bias=bias)
    kernel = bind_generated_int8(weight, bias)
    for rows in (1, 9, 33):
        x = torch.randn(rows, 160)
        assert_close(kernel(x), expect(x).double())


@pytest.mark.parametrize("name", ["int8_channel_a8", "int8_g32_a8"])
def test_extreme_bytes_do_not_saturate(name: str) -> None:
    """All weights -128 and activations at their peak: the largest sums there can be."""
    data = torch.full((32, 512), -128, dtype=torch.int8)
    data[1::2] = 127
    scale = torch.ones(32) if name == "int8_channel_a8" else torch.ones(32, 16).half()
    weight = QuantizedWeight(format=FORMATS[name], data=data, scale=scale)
    x = torch.ones(3, 512) * torch.tensor([[1.0], [-1.0], [127.0]])
    exact = x.double() @ data.double().T
    torch.testing.assert_close(bind_generated_int8(weight)(x).double(), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "int8_channel", "int8_g32", "int4_g32", "int8_channel_a8",
             "int8_g32_a8", "int4_g32_a8"]
)  # fmt: skip
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    """Bit for bit, across the row counts at which other code paths take over."""
    n, k = 64, 96
    if name in ("float32", "bfloat16"):
        kernel = bind_generated(torch.randn(n, k).to(getattr(torch, name)))
    elif name.endswith("_a8"):
        kernel = bind_generated_int8(random_quantized(name, n, k))
    else:
        kernel = bind_generated(random_quantized(name, n, k))
    x = torch.randn(61, k)
    together = kernel(x)
    for first, last in ((0, 1), (1, 3), (3, 8), (5, 18), (20, 51)):
        assert torch.equal(kernel(x[first:last].clone()), together[first:last])


def test_rows_may_be_strided() -> None:
    weight = torch.randn(32, 48)
    wide = torch.randn(9, 100)
    kernel = bind_generated(weight)
    assert_close(kernel(wide[:, 20:68]), expected(wide[:, 20:68], weight, None, "none"))
    int8 = random_quantized("int8_channel_a8", 32, 48)
    kernel = bind_generated_int8(int8)
    assert torch.equal(kernel(wide[:, 20:68]), kernel(wide[:, 20:68].contiguous()))
    assert torch.equal(kernel(wide[:1, 20:68]), kernel(wide[:, 20:68])[:1])


def test_a_non_finite_row_stays_alone() -> None:
    weight = torch.randn(32, 45)
    x = torch.randn(5, 45)
    clean = bind_generated(weight)(x)
    x[2, 44] = float("inf")
    x[2, 0] = float("nan")
    y = bind_generated(weight)(x)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert y[2].isnan().all()


def test_threads_do_not_change_bits() -> None:
    kernel = bind_generated(torch.randn(512, 96))
    x = torch.randn(20, 96)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = kernel(x)
        torch.set_num_threads(3)
        assert torch.equal(kernel(x), alone)
    finally:
        torch.set_num_threads(before)


def test_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        bind_generated(torch.randn(8, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="int8_channel_a8"):
        bind_generated(random_quantized("int8_channel_a8", 8, 8))
    with pytest.raises(ValueError, match="'int8_channel'"):
        bind_generated_int8(random_quantized("int8_channel", 8, 8))
    weight = random_quantized("int4_g32", 8, 32)
    wide = QuantizedWeight(format=weight.format, data=weight.data, scale=weight.scale.float())
    with pytest.raises(ValueError, match="float16 scales"):
        bind_generated(wide)


def test_activations_that_would_be_misread_are_refused() -> None:
    for kernel in (
        bind_generated(torch.randn(8, 32)),
        bind_generated_int8(random_quantized("int8_channel_a8", 8, 32)),
    ):
        for x in (torch.randn(2, 32).double(), torch.randn(2, 31), torch.randn(32, 2).T):
            with pytest.raises(ValueError, match="required x float32"):
                kernel(x)
        assert kernel(torch.randn(0, 32)).shape == (0, 8)


def test_exact_storage_is_found() -> None:
    weight = torch.randn(8, 8).bfloat16().float()
    assert is_exact_in(weight, torch.bfloat16)
    weight[3, 3] += 1e-4
    assert not is_exact_in(weight, torch.bfloat16)


def test_machine_code_holds_the_promised_instructions(isa: VectorIsa) -> None:
    from hal_kernels.gemm.jit_int8 import compile_int8_worker

    weights: tuple[Int8Weight, ...] = ("int8", "int8_g32", "int4")
    for weight in weights:
        text = compile_int8_worker(isa, Int8Kernel(weight, "none")).assembly()
        assert ("vpdpbusd" if isa.has_vnni else "vpmaddubsw") in text
