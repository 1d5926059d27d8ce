"""The GEMM candidates of torch's libraries against float64 products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.gemm import apply_epilogue
from hal_kernels.gemm import cpu_dense, cpu_w8a8, cpu_weight_only
from hal_kernels.gemm.gguf_formats import quantize_int8_channel
from hal_kernels.gemm.semantics import FOLDED_MINIMUM

EPILOGUES = ["none", "silu", "silu_gated"]
ROWS = (1, 3, 17)


def check(
    kernel: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    epilogue: str,
    *,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Compare with float64; tolerance relative to the size of a result (see `_size`)."""
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1]).to(dtype)
        y = x.double() @ weight.double().T + bias.double()
        reference = apply_epilogue(epilogue, y)  # type: ignore[arg-type]
        result = kernel(x)
        assert result.dtype == dtype
        error = (result.double() - reference).abs().max() / _size(y, epilogue)
        assert error < tolerance, f"{rows} rows: relative error {error:.1e}"


def _size(y: torch.Tensor, epilogue: str) -> torch.Tensor:
    """The largest product; gated, the largest gate times the largest other half. The largest
    result would not do: of a few gated ones it can be small while the factors, whose errors count,
    are not (one run in 200 for 32 of them)."""
    if epilogue != "silu_gated":
        return y.abs().max()
    gate, up = y.chunk(2, dim=-1)
    return gate.abs().max() * up.abs().max()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", ["linear", "onednn"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_dense(name: str, dtype: torch.dtype, tolerance: float, epilogue: str) -> None:
    weight, bias = torch.randn(70, 101).to(dtype), torch.randn(70).to(dtype)
    bind = cpu_dense.bind_linear if name == "linear" else cpu_dense.bind_onednn
    with torch.inference_mode():
        kernel = bind(weight, bias, epilogue)  # type: ignore[arg-type]
        check(kernel, weight, bias, epilogue, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8pack(dtype: torch.dtype, epilogue: str) -> None:
    weight, bias = quantize_int8_channel(torch.randn(64, 96)), torch.randn(64).to(dtype)
    kernel = cpu_weight_only.bind_int8pack(weight, bias, epilogue)  # type: ignore[arg-type]
    check(kernel, weight.dequantize(), bias, epilogue, dtype=dtype, tolerance=3e-2)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", cpu_weight_only.INT4PACK_FORMATS)
def test_int4pack(name: str, epilogue: str) -> None:
    n, k, form = 64, 384, FORMATS[name]
    scale = (torch.rand(form.scale_shape(n, k)) * 0.1 + 0.01).half()
    minimum = torch.randint(0, 16, scale.shape).half() if form.has_zeros else -8 * scale
    weight = QuantizedWeight(
        format=FORMATS[name],
        data=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        scale=scale,
        minimum=None if form.is_symmetric else minimum,
    )
    bias = torch.randn(n)
    kernel = cpu_weight_only.bind_int4pack(weight, bias, epilogue)  # type: ignore[arg-type]
    check(kernel, weight.dequantize(), bias, epilogue, dtype=torch.float32, tolerance=3e-2)


@pytest.mark.parametrize("name", ["int4_g32_asym", "int4_g64_zero", "int4_g128_zero"])
def test_what_int4pack_adds_is_what_its_note_says(name: str) -> None:
    """Of stored values of 8 nothing else is left."""
    n, form = 16, FORMATS[name]
    scale = (torch.rand(n, 1) * 0.1 + 0.01).half()
    offset = torch.randint(0, 16, scale.shape).half() * (1.0 if form.has_zeros else -0.05)
    data = torch.full((n, int(form.group_size or 0) // 2), 0x88, dtype=torch.uint8)
    weight = QuantizedWeight(format=form, data=data, scale=scale, minimum=offset)
    x = torch.zeros(1, weight.shape[1])
    x[0, 3] = 1.0
    wide, m = scale.float(), offset.float()
    text, added = "m + 8 * scale", m + 8 * wide
    if form.has_zeros:
        text, added = "(8 - z) * scale", (8 - m) * wide
    assert text in FOLDED_MINIMUM.text
    found = cpu_weight_only.bind_int4pack(weight)(x)
    assert torch.equal(found[0], added[:, 0].bfloat16().float())


def test_int4pack_refuses_odd_widths() -> None:
    weight = QuantizedWeight(
        format=FORMATS["int4_g32"],
        data=torch.zeros((24, 16), dtype=torch.uint8),
        scale=torch.ones((24, 1), dtype=torch.float16),
    )
    with pytest.raises(ValueError, match="multiple of 16"):
        cpu_weight_only.bind_int4pack(weight)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", ["fbgemm8", "fbgemm7", "onednn"])
def test_w8a8(name: str, epilogue: str) -> None:
    missing = {
        "fbgemm8": cpu_w8a8.fbgemm_requirements(8),
        "fbgemm7": cpu_w8a8.fbgemm_requirements(7),
        "onednn": cpu_w8a8.onednn_requirements(),
    }[name]
    if missing:
        pytest.skip(str(missing))
    weight = quantize_int8_channel(torch.randn(64, 96), format_name="int8_channel_a8")
    bias = torch.randn(64)
    if name == "onednn":
        kernel = cpu_w8a8.bind_onednn_int8(weight, bias, epilogue)  # type: ignore[arg-type]
    else:
        kernel = cpu_w8a8.bind_fbgemm(weight, bias, epilogue, bits=int(name[-1]))  # type: ignore[arg-type]
    # The rounding of the activations is the error: half a step of 1/127 or 1/63 of the peak.
    tolerance = 6e-2 if name == "fbgemm7" else 3e-2
    check(kernel, weight.dequantize(), bias, epilogue, dtype=torch.float32, tolerance=tolerance)


@pytest.mark.parametrize("name", ["fbgemm7", "onednn"])
def test_w8a8_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    if name == "onednn" and cpu_w8a8.onednn_requirements():
        pytest.skip(str(cpu_w8a8.onednn_requirements()))
    weight = quantize_int8_channel(torch.randn(64, 96), format_name="int8_channel_a8")
    kernel = (
        cpu_w8a8.bind_onednn_int8(weight)
        if name == "onednn"
        else cpu_w8a8.bind_fbgemm(weight, bits=7)
    )
    x = torch.randn(7, 96) * torch.logspace(-4, 4, 7)[:, None]
    together = kernel(x)
    for row in range(7):
        torch.testing.assert_close(kernel(x[row : row + 1]), together[row : row + 1])


def test_fbgemm_takes_zero_rows() -> None:
    weight = quantize_int8_channel(torch.randn(16, 32), format_name="int8_channel_a8")
    x = torch.randn(3, 32)
    x[1] = 0
    y = cpu_w8a8.bind_fbgemm(weight, bits=7)(x)
    assert y.isfinite().all()
    assert (y[1] == 0).all()
    assert (y[0] != 0).any()
