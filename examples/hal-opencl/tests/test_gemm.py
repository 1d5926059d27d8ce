"""The matrix product against float64, with the rounding bound that holds for any input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from hal.device import DeviceSpec
from hal.ops.formats import FORMATS
from hal.ops.gemm import Epilogue, GemmRequest
from hal.ops.request import TokenRange
from hal_opencl.gemm import load_gemm

UNIT = 2.0**-24  # of float32


def _request(n: int, k: int, epilogue: Epilogue, has_bias: bool) -> GemmRequest:
    return GemmRequest(
        n=n,
        k=k,
        dtype="float32",
        weight_format=FORMATS["float32"],
        epilogue=epilogue,
        has_bias=has_bias,
        tokens=TokenRange(1, 512),
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 64, 65, 131])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product(
    any_memory: DeviceSpec, generator: torch.Generator, rows: int, has_bias: bool
) -> None:
    """|error| <= (K + 2) units of |x| @ |w|.T + |bias|, whatever the order of the sum."""
    n = int(torch.randint(1, 150, (), generator=generator))
    k = int(torch.randint(1, 200, (), generator=generator))
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    bias = torch.randn(n, generator=generator) if has_bias else None
    kernel = load_gemm(any_memory)(_request(n, k, "none", has_bias), weight=weight, bias=bias)
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    assert bool(((kernel(x).double() - want).abs() <= (k + 2) * UNIT * size).all())


@pytest.mark.parametrize("epilogue", ["silu", "silu_gated"])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_epilogues(
    any_memory: DeviceSpec, generator: torch.Generator, epilogue: Epilogue, rows: int
) -> None:
    """silu has a slope below 1.1, so a product's error grows by no more, times the other half."""
    half = int(torch.randint(1, 100, (), generator=generator))
    n, k = 2 * half, int(torch.randint(8, 120, (), generator=generator))
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    bias = torch.randn(n, generator=generator)
    kernel = load_gemm(any_memory)(_request(n, k, epilogue, True), weight=weight, bias=bias)
    y = x.double() @ weight.double().T + bias.double()
    size = (x.double().abs() @ weight.double().abs().T + bias.double().abs()) * (k + 8) * UNIT * 1.1
    if epilogue == "silu":
        want, error = functional.silu(y), size + 8 * UNIT * y.abs()
    else:
        (gate, up), (gate_size, up_size) = y.chunk(2, -1), size.chunk(2, -1)
        want = functional.silu(gate) * up
        error = gate_size * (up.abs() + up_size) + up_size * gate.abs() + 16 * UNIT * want.abs()
    assert bool(((kernel(x).double() - want).abs() <= error + 1e-30).all())


def test_rows_of_a_part_of_a_tensor(any_memory: DeviceSpec, generator: torch.Generator) -> None:
    """The rows of x may be a slice of wider rows, as parts of a packed product are."""
    whole = torch.randn(6, 96, generator=generator)
    x, weight = whole[1:5, 32:80], torch.randn(40, 48, generator=generator)
    got = load_gemm(any_memory)(_request(40, 48, "none", False), weight=weight)(x)
    want = x.double() @ weight.double().T
    assert bool(
        (
            (got.double() - want).abs() <= 50 * UNIT * (x.double().abs() @ weight.double().abs().T)
        ).all()
    )


def test_refuses_what_it_did_not_promise(device: DeviceSpec) -> None:
    with pytest.raises(ValueError, match="required the tensors of"):
        load_gemm(device)(_request(8, 8, "none", True), weight=torch.zeros(8, 8))
    with pytest.raises(ValueError, match="float32 weight"):
        load_gemm(device)(_request(8, 8, "none", False), weight=torch.zeros(8, 8).double())
