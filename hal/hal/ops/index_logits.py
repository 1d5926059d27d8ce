"""Scores of the sparse-attention indexer: which cached entries matter to a query.

The lightning indexer of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556):
I[t, s] = scale * sum_h w[t, h] * relu(q[t, h] . k[s]), over paged index keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import entries_read, one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

IndexKeyFormat = Literal["bf16", "fp8_132", "fp4_68"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLogitsRequest(OpRequest):
    """q[T, H * head_dim], weights float32 [T, H] -> logits float32 [T, entries].

    compress_ratio: tokens that one key stands for; query p sees the keys s < (p + 1) // ratio.
    dtype: of q (float8_e4m3fn for a quantised query, whose scale is folded into the weights).
    Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "index_logits"

    num_heads: int
    head_dim: int
    key_format: IndexKeyFormat
    block_size: int
    dtype: str
    compress_ratio: int = 1
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        require(
            "index_logits request",
            one_of("key_format", self.key_format, ("bf16", "fp8_132", "fp4_68")),
            *positive(
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                block_size=self.block_size,
                compress_ratio=self.compress_ratio,
            ),
            (
                f"head_dim 128 for {self.key_format}",
                self.head_dim,
                self.key_format == "bf16" or self.head_dim == 128,
            ),
        )


def reference(request: IndexLogitsRequest, *, scale: float) -> Callable[..., torch.Tensor]:
    raise NotImplementedError


def _pairs(request: IndexLogitsRequest, tokens: int) -> float:
    return entries_read(request.phase, tokens, request.context_tokens, request.compress_ratio)


def flops(request: IndexLogitsRequest, tokens: int) -> float:
    return 2.0 * request.num_heads * (request.head_dim + 1) * _pairs(request, tokens)


def bytes_moved(request: IndexLogitsRequest, tokens: int) -> float:
    """Queries, weights, the keys (a prompt's once), and the logits that are written."""
    pairs = _pairs(request, tokens)
    keys = pairs if request.phase == "decode" else float(tokens // request.compress_ratio)
    query = request.head_dim * DTYPE_BYTES[request.dtype] + 4
    row = KV_FORMATS[request.key_format].row_bytes(request.head_dim)
    return tokens * request.num_heads * query + keys * row + pairs * 4


FAMILY = OpFamily(
    name="index_logits",
    request_type=IndexLogitsRequest,
    summary="Indexer scores of cached entries for sparse attention",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
