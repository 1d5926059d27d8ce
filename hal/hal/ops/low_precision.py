"""Values of eight and four bits, their scales, and quantisation in groups: the exact rounding.

Everything is decided in float32 and rounds to nearest, ties to even. Values beyond the largest one
saturate. A group of zeros has the scale 1. A group with a value that is not finite has the scale
NaN, so all of it reads back as NaN. Formats: https://arxiv.org/abs/2209.05433 (e4m3, e5m2), OCP
Microscaling Formats v1.0 (e2m1, ue8m0).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Element -> its largest finite value (127 of int8, so that it is symmetric).
LARGEST: Mapping[str, float] = MappingProxyType(
    {
        "fp8_e4m3fn": 448.0,
        "fp8_e4m3fnuz": 240.0,
        "fp8_e5m2": 57344.0,
        "int8": 127.0,
        "fp4_e2m1": 6.0,
    }
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_SMALLEST = 2.0**-9


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """x -> codes uint8 0..15: sign, two bits of exponent, one of mantissa."""
    import torch

    a = x.float().abs()
    code = torch.zeros_like(a, dtype=torch.uint8)
    # The middle between neighbours goes to the even code.
    for middle, goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1) * 4, strict=False):
        code += (a >= middle if goes_up else a > middle).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """codes uint8 0..15 -> float32."""
    import torch

    table = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of 0..15 -> uint8 [..., K/2]; the even column is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    import torch

    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales > 0 -> uint8 exponent codes, rounded up to a power of two; NaN is 255."""
    import torch

    bits = scale.float().contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    code = exponent + (mantissa > 0).int()
    # Below 2^-126 a float32 is denormal; 2^-127 is the least power of two that a code has.
    code = torch.where((exponent == 0) & (mantissa <= 0x400000), 0, code).clamp(max=254)
    return torch.where(scale.isfinite(), code, 255).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes -> float32 2^(code - 127); 255 is NaN."""
    import torch

    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x400000, bits)  # a denormal
    return torch.where(codes == 255, 0x7FC00000, bits).int().view(torch.float32)


def encode_scale(scale: torch.Tensor, kind: str) -> torch.Tensor:
    """float32 scales as `kind`: float32, ue8m0 (uint8, rounded up), e4m3 (to nearest, not 0)."""
    import torch

    if kind == "float32":
        return scale.float()
    if kind == "ue8m0":
        return encode_ue8m0(scale)
    least = torch.where(scale > 0, scale.clamp(min=_E4M3_SMALLEST), scale)
    return encode_fp8(least, "fp8_e4m3fn")


def decode_scale(scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Stored scales as float32."""
    import torch

    return decode_ue8m0(scale) if kind == "ue8m0" else scale.to(torch.float32)


def encode_fp8(x: torch.Tensor, element: str) -> torch.Tensor:
    """x saturated and rounded, as torch's dtype of `element` (fp8_e4m3fn, fp8_e4m3fnuz, …)."""
    import torch

    largest = LARGEST[element]
    dtype: torch.dtype = getattr(torch, element.replace("fp8", "float8"))
    # torch turns what is too large into NaN, so it is cut before.
    return x.float().clamp(-largest, largest).to(dtype)


def quantize_groups(
    x: torch.Tensor, *, group_size: int, element: str, scale_kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x[..., K] -> (values, scales [..., K / group_size]); group_size 0 is the whole of K.

    values: int8 or a float8 dtype [..., K]; for fp4_e2m1 uint8 [..., K / 2].
    """
    import torch

    rows = torch.unflatten(x.float(), -1, (-1, group_size or x.shape[-1]))
    peak = rows.abs().amax(dim=-1)
    scale = torch.where(peak > 0, peak / LARGEST[element], torch.ones_like(peak))
    scale = torch.where(peak.isfinite(), scale, float("nan"))
    stored = encode_scale(scale, scale_kind)
    values = (rows / decode_scale(stored, scale_kind).unsqueeze(-1)).flatten(-2)
    if element == "fp4_e2m1":
        return pack_nibbles(encode_e2m1(values)), stored
    if element == "int8":
        # An integer has no NaN: it is 0, and the scale says that the group is none.
        return torch.round(values).clamp(-127, 127).nan_to_num(0.0).to(torch.int8), stored
    return encode_fp8(values, element), stored


def dequantize_groups(
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    element: str,
    scale_kind: str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The values that `quantize_groups` stored, in float32 or `dtype`."""
    import torch

    dtype = dtype or torch.float32
    if element == "fp4_e2m1":
        values = decode_e2m1(unpack_nibbles(values))
    rows = torch.unflatten(values.to(dtype), -1, (scales.shape[-1], -1))
    return (rows * decode_scale(scales, scale_kind).to(dtype).unsqueeze(-1)).flatten(-2)


# Rounding of activations -> element, values per scale (0: the row), what the scale is.
_ACTIVATIONS: Mapping[str, tuple[str, int, str]] = MappingProxyType(
    {
        "fp8_per_token": ("fp8_e4m3fn", 0, "float32"),
        "fp8_group128": ("fp8_e4m3fn", 128, "float32"),
        "fp8_group128_ue8m0": ("fp8_e4m3fn", 128, "ue8m0"),
        "fp8_group32": ("fp8_e4m3fn", 32, "float32"),
        "mxfp8_group32": ("fp8_e4m3fn", 32, "ue8m0"),
        "mxfp4_group32": ("fp4_e2m1", 32, "ue8m0"),
        "nvfp4_group16": ("fp4_e2m1", 16, "e4m3"),
    }
)


def round_activations(x: torch.Tensor, rounding: str) -> torch.Tensor:
    """x[..., K] in float32 as a product with rounded activations sees it; a last group may be cut.

    rounding: of `ActivationRounding`, but "float" and int8. Raises KeyError for another one.
    """
    import torch.nn.functional as functional

    element, group, kind = _ACTIVATIONS[rounding]
    columns = x.shape[-1]
    padded = functional.pad(x.float(), (0, -columns % group if group else 0))
    values, scales = quantize_groups(padded, group_size=group, element=element, scale_kind=kind)
    return dequantize_groups(values, scales, element=element, scale_kind=kind)[..., :columns]
