"""How a weight is stored, and what a product does to its activations: the formats by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Element = Literal["int", "fp8_e4m3fn", "fp4_e2m1"]
ActivationRounding = Literal[
    "float",
    "int8_per_token",
    "fp8_per_token",
    "fp8_group128",
    "fp8_group128_ue8m0",
    "fp8_group32",
    "mxfp8_group32",
    "mxfp4_group32",
    "nvfp4_group16",
]
# What a scale takes: dtypes, and codes that torch stores in a byte.
SCALE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "ue8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight [N, K] is stored and what the multiplication does to the activations.

    bits: of one stored value, element: what it is. group_size: values along K that share a scale,
    block_n: rows that share it; group 0 is one scale per output channel. is_symmetric: value = q *
    scale; otherwise q * scale + minimum, or (q - minimum) * scale where the format has_zeros: the
    minimum of a group is the stored integer that means 0. scale_dtype: a dtype, "ue8m0" (a power of
    two in a byte) or "e4m3". activation: "float" multiplies with the activations as they are;
    anything else first rounds them to that type with a scale per row or per group along K. Raises
    ValueError for zeros of a symmetric one.
    """

    name: str
    bits: int
    group_size: int | None = None  # None: dense floating point, no scales
    is_symmetric: bool = True
    scale_dtype: str = ""
    activation: ActivationRounding = "float"
    element: Element = "int"
    block_n: int = 1
    has_zeros: bool = False

    def __post_init__(self) -> None:
        if self.has_zeros and self.is_symmetric:
            raise ValueError(
                f"weight format {self.name}: required is_symmetric=False of a format with zero "
                "points, found True; correct the format"
            )

    @property
    def is_dense(self) -> bool:
        return self.group_size is None

    @property
    def compute_dtype(self) -> str:
        """The unit that multiplies, a key of `DeviceSpec.peak_flops`; "" is the activations' own
        dtype (a quantised weight that is widened to it)."""
        if self.activation != "float":
            return _UNITS[self.activation]
        return self.name if self.is_dense else ""

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of a [n, k] weight; a block at the edge may be cut."""
        if not self.group_size:
            return (n,)
        return -(-n // self.block_n), -(-k // self.group_size)

    def weight_bytes(self, n: int, k: int) -> int:
        """Bytes of a stored [n, k] weight with its scales."""
        data = n * k * self.bits // 8
        if self.group_size is None:
            return data
        scales = math.prod(self.scale_shape(n, k)) * SCALE_BYTES[self.scale_dtype]
        return data + scales * (1 if self.is_symmetric else 2)


_UNITS: Mapping[str, str] = {
    "int8_per_token": "int8",
    "fp8_per_token": "fp8",
    "fp8_group128": "fp8",
    "fp8_group128_ue8m0": "fp8",
    "fp8_group32": "fp8",
    "mxfp8_group32": "fp8",
    "mxfp4_group32": "mxfp4",
    "nvfp4_group16": "nvfp4",
}


def _fp8(
    name: str, group: int, scale: str = "float32", activation: ActivationRounding = "float"
) -> WeightFormat:
    """e4m3 in square blocks of `group`, or with one scale per channel for 0."""
    return WeightFormat(
        name=name,
        bits=8,
        group_size=group,
        scale_dtype=scale,
        activation=activation,
        element="fp8_e4m3fn",
        block_n=group or 1,
    )


def _int4(group: int, *, has_zeros: bool) -> WeightFormat:
    """Four bits in groups of so many columns, symmetric or with a zero point for each."""
    return WeightFormat(
        name=f"int4_g{group}" + "_zero" * has_zeros,
        bits=4,
        group_size=group,
        scale_dtype="float16",
        is_symmetric=not has_zeros,
        has_zeros=has_zeros,
    )


def _fp4(
    name: str, group: int, scale: str, activation: ActivationRounding = "float"
) -> WeightFormat:
    return WeightFormat(
        name=name,
        bits=4,
        group_size=group,
        scale_dtype=scale,
        activation=activation,
        element="fp4_e2m1",
    )


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat(name="float32", bits=32),
        WeightFormat(name="bfloat16", bits=16),
        WeightFormat(name="float16", bits=16),
        WeightFormat(name="int8_channel", bits=8, group_size=0, scale_dtype="float32"),
        WeightFormat(
            name="int8_channel_a8",
            bits=8,
            group_size=0,
            scale_dtype="float32",
            activation="int8_per_token",
        ),
        # GGUF Q8_0, Q4_0, Q4_1: blocks of 32 along K with fp16 scales (and fp16 minima).
        WeightFormat(name="int8_g32", bits=8, group_size=32, scale_dtype="float16"),
        WeightFormat(
            name="int8_g32_a8",
            bits=8,
            group_size=32,
            scale_dtype="float16",
            activation="int8_per_token",
        ),
        WeightFormat(name="int4_g32", bits=4, group_size=32, scale_dtype="float16"),
        WeightFormat(
            name="int4_g32_asym", bits=4, group_size=32, scale_dtype="float16", is_symmetric=False
        ),
        WeightFormat(
            name="int4_g32_asym_a8",
            bits=4,
            group_size=32,
            scale_dtype="float16",
            is_symmetric=False,
            activation="int8_per_token",
        ),
        WeightFormat(
            name="int4_g32_a8",
            bits=4,
            group_size=32,
            scale_dtype="float16",
            activation="int8_per_token",
        ),
        # GPTQ's, AWQ's and compressed-tensors' groups: float16 scales, zero points held as float16.
        *(_int4(group, has_zeros=zeros) for group in (64, 128) for zeros in (False, True)),
        # DeepSeek-V3's blocks (https://arxiv.org/abs/2412.19437) and V4's with powers of two.
        _fp8("fp8_channel", 0),
        _fp8("fp8_channel_a8", 0, activation="fp8_per_token"),
        _fp8("fp8_block128", 128),
        _fp8("fp8_block128_a8", 128, activation="fp8_group128"),
        _fp8("fp8_block128_ue8m0", 128, "ue8m0"),
        _fp8("fp8_block128_ue8m0_a8", 128, "ue8m0", "fp8_group128_ue8m0"),
        _fp8("fp8_block32", 32),
        _fp8("fp8_block32_a8", 32, activation="fp8_group32"),
        _fp8("fp8_block32_ue8m0", 32, "ue8m0"),
        _fp8("fp8_block32_ue8m0_a8", 32, "ue8m0", "mxfp8_group32"),
        # OCP Microscaling Formats v1.0, and NVIDIA's groups of 16 with e4m3 scales.
        _fp4("mxfp4", 32, "ue8m0"),
        _fp4("mxfp4_a8", 32, "ue8m0", "mxfp8_group32"),
        _fp4("mxfp4_a4", 32, "ue8m0", "mxfp4_group32"),
        _fp4("nvfp4", 16, "e4m3"),
        _fp4("nvfp4_a4", 16, "e4m3", "nvfp4_group16"),
    )
}
