"""Which matrix unit of a device multiplies the operands of a request."""

from __future__ import annotations

from typing import Any

from hal.device import DeviceSpec

_FP8_FEATURES = ("fp8_e4m3fn", "fp8_e4m3fnuz")
_FLOAT8_DTYPES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"})
_QUANTISED_UNITS = frozenset({"int8", "fp8", "mxfp4", "nvfp4"})


def unit_of(request: Any) -> str:
    """The key of `DeviceSpec.peak_flops` for the operands as the request names them."""
    weight_format = getattr(request, "weight_format", None)
    dtype = str(getattr(request, "dtype", "float32"))
    if weight_format is not None:
        return str(weight_format.compute_dtype) or dtype
    return "fp8" if dtype in _FLOAT8_DTYPES else dtype


def multiplies_quantised(request: Any) -> bool:
    """Whether both operands are quantised, so that a unit for less than 16 bits can multiply."""
    return unit_of(request) in _QUANTISED_UNITS


def fp8_kind(device: DeviceSpec) -> str:
    """The FP8 encoding that the device multiplies, "fp8_e4m3fn" where it has none.

    Weights in e4m3fn are used as e4m3fnuz exactly: the same bits are half the value there, so the
    scale doubles, and only the code of minus zero changes.
    """
    known = device.features | device.unverified_features
    return next((kind for kind in _FP8_FEATURES if f"matrix.{kind}" in known), "fp8_e4m3fn")


def matrix_feature(request: Any, device: DeviceSpec) -> str:
    """The feature that a kernel needs to multiply the request's operands as they are; "" for
    float32, which every device multiplies outside of its matrix units."""
    unit = unit_of(request)
    if unit in ("float32", "float64"):
        return ""
    return f"matrix.{fp8_kind(device) if unit == 'fp8' else unit}"


def wide_unit(device: DeviceSpec) -> str:
    """The 16-bit unit on which widened operands are multiplied."""
    return "bfloat16" if "matrix.bfloat16" in device.features else "float16"
