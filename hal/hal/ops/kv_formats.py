"""How a row of a latent or index cache is stored, to the byte, and how rows make a page.

A cache in the format "bf16" is a floating tensor [num_blocks, block_size, dim] (bfloat16 in
service, float64 for golden values). Every other one is bytes: uint8 [num_blocks, page_bytes].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

KvFormatName = Literal["bf16", "fp8_656", "v4_584", "v41_528", "fp4_288", "fp8_132", "fp4_68"]
Element = Literal["bfloat16", "fp8_e4m3fn", "fp4_e2m1"]
ScaleElement = Literal["", "float32", "ue8m0", "e4m3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """One row: `quantized_dim` values with a scale for each `group_size`, `plain_dim` in bfloat16.

    A row is values, bfloat16 tail, scales, padding in this order, or (fp8_656) with the scales
    before the tail. is_split_page: a page holds values and tails of all its rows first, then the
    scales of all. page_multiple: a page is padded to a multiple of so many bytes.
    """

    name: KvFormatName
    element: Element
    quantized_dim: int = 0
    group_size: int = 0
    scale: ScaleElement = ""
    plain_dim: int = 0
    padding: int = 0
    has_scales_before_plain: bool = False
    is_split_page: bool = False
    page_multiple: int = 1

    @property
    def dim(self) -> int:
        """Values of a row; 0 for "bf16", which holds any number."""
        return self.quantized_dim + self.plain_dim

    @property
    def data_bytes(self) -> int:
        """Bytes of the values of a row, quantised and plain."""
        bits = 4 if self.element == "fp4_e2m1" else 8
        return self.quantized_dim * bits // 8 + 2 * self.plain_dim

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row, with the padding."""
        if not self.group_size:
            return self.padding
        width = 4 if self.scale == "float32" else 1
        return self.quantized_dim // self.group_size * width + self.padding

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values."""
        return 2 * dim if self.name == "bf16" else self.data_bytes + self.scale_bytes

    def page_bytes(self, block_size: int, dim: int = 0) -> int:
        """Bytes of a page of `block_size` rows, with its padding."""
        rows = block_size * self.row_bytes(dim)
        return -(-rows // self.page_multiple) * self.page_multiple


# FlashMLA's README (fp8_656, v4_584), DeepGEMM's paged index logits (fp8_132, fp4_68).
KV_FORMATS: Mapping[str, KvFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            KvFormat(name="bf16", element="bfloat16"),
            KvFormat(
                name="fp8_656",
                element="fp8_e4m3fn",
                quantized_dim=512,
                group_size=128,
                scale="float32",
                plain_dim=64,
                has_scales_before_plain=True,
            ),
            KvFormat(
                name="v4_584",
                element="fp8_e4m3fn",
                quantized_dim=448,
                group_size=64,
                scale="ue8m0",
                plain_dim=64,
                padding=1,
                is_split_page=True,
                page_multiple=576,
            ),
            KvFormat(
                name="v41_528",
                element="fp8_e4m3fn",
                quantized_dim=512,
                group_size=32,
                scale="ue8m0",
                is_split_page=True,
            ),
            KvFormat(
                name="fp4_288",
                element="fp4_e2m1",
                quantized_dim=512,
                group_size=16,
                scale="e4m3",
                is_split_page=True,
            ),
            KvFormat(
                name="fp8_132",
                element="fp8_e4m3fn",
                quantized_dim=128,
                group_size=128,
                scale="float32",
                is_split_page=True,
            ),
            KvFormat(
                name="fp4_68",
                element="fp4_e2m1",
                quantized_dim=128,
                group_size=32,
                scale="ue8m0",
                is_split_page=True,
            ),
        )
    }
)
