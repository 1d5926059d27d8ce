"""Embedding gather: rows of a [vocab_size, hidden_size] table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(OpRequest):
    """ids int64 [T] -> rows [T, hidden_size]."""

    op: ClassVar[str] = "embedding"

    vocab_size: int
    hidden_size: int
    dtype: str


def reference(
    request: EmbeddingRequest, *, weight: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Golden gather."""

    def kernel(ids: torch.Tensor) -> torch.Tensor:
        return weight[ids]

    return kernel


def flops(request: EmbeddingRequest, tokens: int) -> float:
    return 0.0


def bytes_moved(request: EmbeddingRequest, tokens: int) -> float:
    return float(tokens * (2 * request.hidden_size * DTYPE_BYTES[request.dtype] + 8))


def stored_bytes(request: EmbeddingRequest) -> int:
    return request.vocab_size * request.hidden_size * DTYPE_BYTES[request.dtype]


FAMILY = OpFamily(
    name="embedding",
    request_type=EmbeddingRequest,
    summary="Embedding gather",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors=ROUNDING_ERRORS,
    weight_bytes=stored_bytes,
)
