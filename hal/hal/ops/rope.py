"""Rotary position embedding (https://arxiv.org/abs/2104.09864), in place on q and k, or undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRequest(OpRequest):
    """Rotates `rotary_dim` values of each head from `rotary_start` on; pairs are
    (i, i + rotary_dim/2) for "half_split" and (2i, 2i + 1) for "interleaved".

    is_inverse: by the negative angle. num_kv_heads 0: there is no k, and it is not looked at.
    Raises RequestError if the values are not all inside a head.
    """

    op: ClassVar[str] = "rope"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: str
    style: Literal["half_split", "interleaved"] = "half_split"
    is_inverse: bool = False
    rotary_start: int = 0

    def __post_init__(self) -> None:
        require(
            "rope request",
            (
                f"0 <= rotary_start and rotary_start + rotary_dim <= head_dim {self.head_dim}",
                f"{self.rotary_start} + {self.rotary_dim}",
                self.rotary_start >= 0 and self.rotary_start + self.rotary_dim <= self.head_dim,
            ),
        )

    @property
    def is_interleaved(self) -> bool:
        return self.style == "interleaved"


def reference(
    request: RopeRequest, *, cos_sin_cache: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """Golden rotation. cos_sin_cache: [max_position, rotary_dim], cosines then sines."""
    import torch

    half, start = request.rotary_dim // 2, request.rotary_start
    columns = slice(start, start + request.rotary_dim)

    def rotate(x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        view = x.view(x.shape[0], heads, request.head_dim)
        part = view[..., columns].to(dtype)
        if request.style == "half_split":
            a, b = part[..., :half], part[..., half:]
        else:
            a, b = part[..., 0::2], part[..., 1::2]
        first, second = a * cos - b * sin, b * cos + a * sin
        if request.style == "half_split":
            rotated = torch.cat((first, second), dim=-1)
        else:
            rotated = torch.stack((first, second), dim=-1).flatten(-2)
        view[..., columns] = rotated.to(x.dtype)

    def kernel(q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor) -> None:
        rows = cos_sin_cache[positions]
        cos, sin = rows[:, None, :half], rows[:, None, half:]
        sin = -sin if request.is_inverse else sin
        rotate(q, request.num_heads, cos, sin)
        if k is not None and request.num_kv_heads:
            rotate(k, request.num_kv_heads, cos, sin)

    return kernel


def _values(request: RopeRequest, tokens: int) -> int:
    return tokens * (request.num_heads + request.num_kv_heads) * request.rotary_dim


def flops(request: RopeRequest, tokens: int) -> float:
    return 3.0 * _values(request, tokens)


def bytes_moved(request: RopeRequest, tokens: int) -> float:
    table = tokens * (request.rotary_dim * 4 + 8)  # with the positions
    return float(2 * _values(request, tokens) * DTYPE_BYTES[request.dtype] + table)


FAMILY = OpFamily(
    name="rope",
    request_type=RopeRequest,
    summary="Rotary position embedding, in place",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors=ROUNDING_ERRORS,
)
