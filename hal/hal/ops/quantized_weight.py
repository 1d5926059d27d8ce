"""A weight in a quantised format: what its tensors must be, their values, and making one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal.ops.low_precision import (
    LARGEST,
    decode_e2m1,
    decode_scale,
    encode_e2m1,
    encode_fp8,
    encode_scale,
    pack_nibbles,
    unpack_nibbles,
)
from hal.ops.weight_formats import WeightFormat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A quantised weight of shape [N, K], as stored, before any implementation packs it.

    data: int8 or float8_e4m3fn [N, K] for 8 bits; for 4 bits uint8 [N, K/2], where byte j holds the
    value of column 2j in its low nibble and of column 2j+1 in its high nibble: integers unsigned
    0..15 (symmetric formats store q+8), fp4 by its code. scale: [N/block_n, K/group_size] (a last
    block may be cut where the format has square ones), or [N] with one scale per channel; uint8
    codes for ue8m0, float8_e4m3fn for e4m3. minimum: the shape of scale, for formats that are not
    symmetric: added to q * scale, or taken from q where the format has zeros. tensor_scale: one
    float32 factor of all values, which NVFP4 checkpoints have.
    Raises ValueError if they do not fit.
    """

    format: WeightFormat
    data: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.format.group_size is None:
            raise ValueError(f"quantised weight: required a quantised format, found {self.format}")
        (n, k), group = self.shape, self.format.group_size
        expected = self.format.scale_shape(n, k)
        scales = {expected, (n, 1)} if group == 0 else {expected}
        is_cut = group > 0 and k % group > 0 and self.format.block_n == 1
        if tuple(self.scale.shape) not in scales or is_cut:
            raise ValueError(
                f"quantised weight {self.format.name}: required one scale per {group or k} columns "
                f"of [{n}, {k}], found scales {list(self.scale.shape)}"
            )
        check_dtypes(self)
        found = None if self.minimum is None else self.minimum.shape
        if found != (None if self.format.is_symmetric else self.scale.shape):
            raise ValueError(
                f"quantised weight {self.format.name}: required "
                f"{'no minimum' if self.format.is_symmetric else 'a minimum for each scale'}, "
                f"found {'none' if found is None else list(found)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        columns = self.data.shape[1] * (2 if self.format.bits == 4 else 1)
        return self.data.shape[0], columns

    def dequantize(self) -> torch.Tensor:
        """The stored values as float32 [N, K], value * scale (+ minimum) or (value - zero) * scale
        as the format says, rounded once."""
        n, k = self.shape
        values = stored_values(self)
        if self.format.block_n > 1:
            rows, columns = self.format.block_n, self.format.group_size or k
            scale = decode_scale(self.scale, self.format.scale_dtype)
            scale = scale.repeat_interleave(rows, dim=0)[:n]
            return values * scale.repeat_interleave(columns, dim=1)[:, :k]
        group = self.format.group_size or k
        values = values.view(n, k // group, group)
        offset = None if self.minimum is None else self.minimum.float().view(n, -1, 1)
        if offset is not None and self.format.has_zeros:
            values, offset = values - offset, None
        values = values * decode_scale(self.scale, self.format.scale_dtype).view(n, -1, 1)
        if offset is not None:
            values = values + offset
        values = values.reshape(n, k)
        return values if self.tensor_scale is None else values * self.tensor_scale.float()


def check_dtypes(weight: QuantizedWeight) -> None:
    """Raises ValueError if data or scale of an fp8 or fp4 weight are not of the format's dtypes."""
    fmt = weight.format
    if fmt.element == "int":
        return
    data = "float8_e4m3fn" if fmt.element == "fp8_e4m3fn" else "uint8"
    scale = {"float32": "float32", "ue8m0": "uint8", "e4m3": "float8_e4m3fn"}[fmt.scale_dtype]
    found = [str(t.dtype).removeprefix("torch.") for t in (weight.data, weight.scale)]
    if found != [data, scale]:
        raise ValueError(
            f"quantised weight {fmt.name}: required data in {data} and scales in {scale}, "
            f"found {found[0]} and {found[1]}"
        )


def stored_values(weight: QuantizedWeight) -> torch.Tensor:
    """The values without their scales, float32 [N, K]."""
    fmt, data = weight.format, weight.data
    if fmt.bits != 4:
        return data.float()
    codes = unpack_nibbles(data)
    if fmt.element == "fp4_e2m1":
        return decode_e2m1(codes)
    return codes.float() - 8.0 if fmt.is_symmetric else codes.float()


def quantize_weight(weight: torch.Tensor, fmt: WeightFormat) -> QuantizedWeight:
    """A dense [N, K] in an fp8 or fp4 format, by the rules of `hal.ops.low_precision`.

    The last blocks may be cut. Raises ValueError for a format of another element.
    """
    import torch
    import torch.nn.functional as functional

    if fmt.element not in LARGEST or fmt.group_size is None:
        raise ValueError(f"quantize_weight: required an fp8 or fp4 format, found {fmt.name}")
    n, k = weight.shape
    rows, columns = fmt.block_n, fmt.group_size or k
    padded = functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    blocks = torch.unflatten(torch.unflatten(padded, 1, (-1, columns)), 0, (-1, rows))
    peak = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(peak > 0, peak / LARGEST[fmt.element], torch.ones_like(peak))
    stored = encode_scale(torch.where(peak.isfinite(), scale, float("nan")), fmt.scale_dtype)
    values = blocks / decode_scale(stored, fmt.scale_dtype)[:, None, :, None]
    values = values.flatten(2).flatten(0, 1)[:n, :k]
    if fmt.element == "fp4_e2m1":
        data = pack_nibbles(encode_e2m1(values))
    else:
        data = encode_fp8(values, fmt.element)
    return QuantizedWeight(
        format=fmt, data=data, scale=stored if fmt.group_size else stored.view(n)
    )
