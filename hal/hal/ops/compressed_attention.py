"""Attention over a sliding window and compressed entries with per-head sinks (DeepSeek V4, V4.1).

Keys are values: one cached row of head_dim values serves all heads. A query at position p sees the
rows p-window+1..p of the window cache and, of the main cache, the entries w < (p+1) // ratio that
its list names (all of them where the request has no lists). One softmax over both, and the sink.
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

WindowFormat = Literal["bf16", "v4_584", "v41_528"]
MainFormat = Literal["bf16", "v4_584", "fp4_288", "v41_528"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionRequest(OpRequest):
    """q[T, H * head_dim] -> out[T, H * head_dim].

    compress_ratio: tokens that one entry of the main cache stands for; 0 is the window only.
    top_k: entries that a query's list names; 0 with a ratio is all complete entries. rope_dim: the
    trailing values of a row that carry the rotation (kept in bfloat16 by v4_584). block_size: rows
    of a page, in both caches. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "compressed_attention"

    num_heads: int
    head_dim: int
    rope_dim: int
    window: int
    top_k: int
    compress_ratio: int
    has_sinks: bool
    window_format: WindowFormat
    main_format: MainFormat
    block_size: int
    dtype: str
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        require(
            "compressed_attention request",
            one_of("window_format", self.window_format, ("bf16", "v4_584", "v41_528")),
            one_of("main_format", self.main_format, ("bf16", "v4_584", "fp4_288", "v41_528")),
            *positive(
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                window=self.window,
                block_size=self.block_size,
            ),
            (
                "0 <= rope_dim <= head_dim",
                (self.rope_dim, self.head_dim),
                0 <= self.rope_dim <= self.head_dim,
            ),
            (
                "top_k >= 0 and compress_ratio >= 0",
                (self.top_k, self.compress_ratio),
                min(self.top_k, self.compress_ratio) >= 0,
            ),
            (
                "a compress_ratio for lists of compressed entries",
                f"top_k={self.top_k} and compress_ratio=0",
                self.compress_ratio > 0 or not self.top_k,
            ),
            (
                "head_dim 512 for packed rows",
                self.head_dim,
                self.head_dim == 512 or {self.window_format, self.main_format} == {"bf16"},
            ),
            (
                "rope_dim 64 for v4_584",
                self.rope_dim,
                self.rope_dim == 64 or "v4_584" not in (self.window_format, self.main_format),
            ),
        )


def reference(
    request: CompressedAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    raise NotImplementedError


def _pairs(request: CompressedAttentionRequest, tokens: int) -> tuple[float, float]:
    """Query-key pairs of the window and of the compressed entries."""
    phase, context = request.phase, request.context_tokens
    window = entries_read(phase, tokens, context, most=request.window)
    if not request.compress_ratio:
        return window, 0.0
    return window, entries_read(phase, tokens, context, request.compress_ratio, request.top_k)


def flops(request: CompressedAttentionRequest, tokens: int) -> float:
    return 4.0 * request.num_heads * request.head_dim * sum(_pairs(request, tokens))


def bytes_moved(request: CompressedAttentionRequest, tokens: int) -> float:
    """Decode reads the rows of each query; a prompt's rows are read once for all its queries."""
    window, main = _pairs(request, tokens)
    if request.phase != "decode":
        window = float(tokens)
        main = float(tokens // request.compress_ratio) if request.compress_ratio else 0.0
    rows = window * KV_FORMATS[request.window_format].row_bytes(request.head_dim)
    rows += main * KV_FORMATS[request.main_format].row_bytes(request.head_dim)
    q_and_out = 2 * tokens * request.num_heads * request.head_dim * DTYPE_BYTES[request.dtype]
    sinks = request.num_heads * 4 if request.has_sinks else 0
    return rows + q_and_out + sinks + tokens * request.top_k * 4


FAMILY = OpFamily(
    name="compressed_attention",
    request_type=CompressedAttentionRequest,
    summary="Attention over a window and compressed entries, with sinks",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
