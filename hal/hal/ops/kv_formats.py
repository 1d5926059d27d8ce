"""How a row of a latent or index cache is stored, to the byte, and how rows make a page.

A cache in the format "bf16" or "fp16" is a floating tensor [num_blocks, block_size, dim] (of that
dtype in service, float64 for golden values). Every other one is bytes: uint8 [num_blocks,
page_bytes], and bfloat16 by definition: its scales go beyond the range of float16.
fp8_656 and v4_584 are FlashMLA's (its tests/quant.py), fp8_132 is DeepGEMM's paged index key;
fp4_288, fp4_68 and v41_528 have DeepSeek-V4.1's rows, in pages of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from hal.ops.low_precision import dequantize_groups, quantize_groups

if TYPE_CHECKING:
    import torch

KvFormatName = Literal[
    "bf16", "fp16", "fp8_656", "v4_584", "v41_528", "fp4_288", "fp8_132", "fp4_68"
]
Element = Literal["bfloat16", "float16", "fp8_e4m3fn", "fp4_e2m1"]
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
    def is_plain(self) -> bool:
        """Whether a cache is a floating tensor, without scales."""
        return self.element in ("bfloat16", "float16")

    @property
    def dim(self) -> int:
        """Values of a row; 0 for a plain format, which holds any number."""
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
        return 2 * dim if self.is_plain else self.data_bytes + self.scale_bytes

    def page_bytes(self, block_size: int, dim: int = 0) -> int:
        """Bytes of a page of `block_size` rows, with its padding."""
        rows = block_size * self.row_bytes(dim)
        return -(-rows // self.page_multiple) * self.page_multiple


# Rows of one floating dtype: the value of a key and of a latent row is what was written, rounded.
PLAIN_FORMATS: tuple[KvFormatName, ...] = ("bf16", "fp16")

KV_FORMATS: Mapping[str, KvFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            KvFormat(name="bf16", element="bfloat16"),
            KvFormat(name="fp16", element="float16"),
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


def pack_rows(name: str, rows: torch.Tensor) -> torch.Tensor:
    """rows [N, dim] -> uint8 [N, row_bytes], rounded as `hal.ops.low_precision` says.

    The order of bytes is that of one row by itself; `write_rows` places it in a page.
    """
    import torch

    kind = KV_FORMATS[name]
    if kind.is_plain:
        return _as_bytes(rows.to(getattr(torch, kind.element)))
    values, scales = quantize_groups(
        rows[:, : kind.quantized_dim],
        group_size=kind.group_size,
        element=kind.element,
        scale_kind=kind.scale,
    )
    tail = _as_bytes(rows[:, kind.quantized_dim :].to(torch.bfloat16))
    padding = tail.new_zeros(len(rows), kind.padding)
    parts = [_as_bytes(values), tail, _as_bytes(scales), padding]
    if kind.has_scales_before_plain:
        parts = [parts[0], parts[2], parts[1], padding]
    return torch.cat(parts, dim=1)


def unpack_rows(name: str, packed: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """uint8 [N, row_bytes] -> rows [N, dim] in float32 or `dtype`."""
    import torch

    kind, dtype = KV_FORMATS[name], dtype or torch.float32
    if kind.is_plain:
        return packed.contiguous().view(getattr(torch, kind.element)).to(dtype)
    plain, scales = 2 * kind.plain_dim, kind.scale_bytes - kind.padding
    sizes = [kind.data_bytes - plain, plain, scales, kind.padding]
    if kind.has_scales_before_plain:
        sizes = [sizes[0], scales, plain, kind.padding]
    values, second, third, _ = torch.split(packed, sizes, dim=1)
    tail, scale = (third, second) if kind.has_scales_before_plain else (second, third)
    quantised = dequantize_groups(
        _from_bytes(values, kind.element),
        _from_bytes(scale, kind.scale),
        element=kind.element,
        scale_kind=kind.scale,
        dtype=dtype,
    )
    return torch.cat((quantised, _from_bytes(tail, "bfloat16").to(dtype)), dim=1)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    import torch

    if not x.numel():  # whose stride may be 0, which torch views as no other size
        return x.new_empty((x.shape[0], x.shape[1] * x.element_size()), dtype=torch.uint8)
    return x.contiguous().view(torch.uint8)


def _from_bytes(packed: torch.Tensor, kind: str) -> torch.Tensor:
    import torch

    dtypes = {
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "fp8_e4m3fn": torch.float8_e4m3fn,
        "e4m3": torch.float8_e4m3fn,
    }
    dtype = dtypes.get(kind, torch.uint8)  # nibbles and exponents stay bytes
    return packed.contiguous().view(dtype) if packed.shape[1] else packed.to(dtype)


def _row_bytes_at(name: str, block_size: int, slots: torch.Tensor) -> torch.Tensor:
    """Flat byte addresses [N, row_bytes] of the slots in a cache of pages."""
    import torch

    kind = KV_FORMATS[name]
    page = slots.long().div(block_size, rounding_mode="floor") * kind.page_bytes(block_size)
    row = slots.long() % block_size
    width = kind.data_bytes if kind.is_split_page else kind.row_bytes(0)
    data = (page + row * width)[:, None] + torch.arange(width, device=slots.device)
    if not kind.is_split_page:
        return data
    start = page + block_size * kind.data_bytes + row * kind.scale_bytes
    return torch.cat(
        (data, start[:, None] + torch.arange(kind.scale_bytes, device=slots.device)), dim=1
    )


def write_rows(
    name: str, cache: torch.Tensor, block_size: int, slots: torch.Tensor, rows: torch.Tensor
) -> None:
    """rows [N, dim] into the slots (block * block_size + offset) of a cache, in place.

    cache: uint8 [num_blocks, page_bytes]; of a plain format floating [num_blocks, block_size, dim].
    """
    if KV_FORMATS[name].is_plain:
        cache.view(-1, rows.shape[1])[slots.long()] = rows.to(cache.dtype)
        return
    at = _row_bytes_at(name, block_size, slots)
    cache.view(-1)[at.flatten()] = pack_rows(name, rows).flatten()


def read_rows(
    name: str,
    cache: torch.Tensor,
    block_size: int,
    slots: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The rows [N, dim] of the slots, in float32 or `dtype`."""
    import torch

    if KV_FORMATS[name].is_plain:
        return cache.flatten(0, 1)[slots.long()].to(dtype or torch.float32)
    at = _row_bytes_at(name, block_size, slots)
    return unpack_rows(name, cache.reshape(-1)[at], dtype)


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots int64 of a sequence's positions, by its row of the block table."""
    blocks = block_table.long()[positions.long().div(block_size, rounding_mode="floor")]
    return blocks * block_size + positions.long() % block_size
