"""The golden norm with rounding against the two ops that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.errors import RequestError
from hal.ops.low_precision import dequantize_groups
from hal.ops.norm import bytes_moved as norm_bytes
from hal.ops.norm_quantize import FAMILY, NormQuantizeRequest, bytes_moved, reference
from hal.ops.quantize import QuantizeRequest
from hal.ops.quantize import bytes_moved as rounding_bytes

T, H = 5, 256


def request_of(**fields: Any) -> NormQuantizeRequest:
    given: dict[str, Any] = {
        "hidden_size": H,
        "dtype": "bfloat16",
        "out_dtype": "fp8_e4m3fn",
        "group_size": 128,
    }
    return NormQuantizeRequest(**(given | fields))


@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("out_dtype", ["fp8_e4m3fn", "fp8_e4m3fnuz", "int8"])
def test_rows_in_eight_bits_against_torch(out_dtype: str, group: int, scale_dtype: str) -> None:
    request = request_of(
        out_dtype=out_dtype, group_size=group, scale_dtype=scale_dtype, has_residual=True,
        keeps_rows=True,
    )  # fmt: skip
    x, residual = (torch.randn(T, H).bfloat16() for _ in range(2))
    weight = (torch.rand(H) + 0.5).bfloat16()
    values, scales, y, total = reference(request, weight=weight, eps=1e-6)(x, residual)
    assert torch.equal(total, x + residual)
    want = torch.nn.functional.rms_norm(total.double(), (H,), weight.double(), 1e-6)
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=1e-6)
    got = dequantize_groups(values, scales, element=out_dtype, scale_kind=scale_dtype)
    size = group or H
    largest = want.reshape(T, -1, size).abs().amax(-1, keepdim=True).expand(T, H // size, size)
    tolerance = FAMILY.tolerances[out_dtype]
    top = {"fp8_e4m3fn": 448, "fp8_e4m3fnuz": 240, "int8": 127}[out_dtype]
    steps = tolerance.atol * 2 * largest.reshape(T, H) / top  # ue8m0 scales are up to twice these
    assert ((got - want).abs() <= tolerance.rtol * want.abs() + steps).all()


def test_what_is_returned_is_what_the_request_says() -> None:
    x, weight = torch.randn(T, H), torch.ones(H)
    for has_residual in (False, True):
        for keeps_rows in (False, True):
            request = request_of(has_residual=has_residual, keeps_rows=keeps_rows, dtype="float32")
            kernel = reference(request, weight=weight, eps=1e-6)
            found = kernel(x, x) if has_residual else kernel(x)
            assert len(found) == 2 + has_residual + keeps_rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"out_dtype": "mxfp4"}, {"scale_dtype": "e4m3"}, {"group_size": -1}, {"group_size": 100},
        {"hidden_size": 0},
    ],
)  # fmt: skip
def test_an_inconsistent_request_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="norm_quantize request"):
        request_of(**wrong)


def test_bytes_are_those_of_both_without_the_rows_between() -> None:
    request = request_of(has_residual=True)
    rounding = QuantizeRequest(
        group_size=128, out_dtype="fp8_e4m3fn", scale_dtype="float32", width=H, dtype="bfloat16"
    )
    both = norm_bytes(request.norm(), 7) + rounding_bytes(rounding, 7)
    rows = 7 * H * 2
    assert bytes_moved(request, 7) == both - 2 * rows
    assert bytes_moved(request_of(has_residual=True, keeps_rows=True), 7) == both - rows
