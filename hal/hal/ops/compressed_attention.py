"""Attention over a sliding window and compressed entries with per-head sinks (DeepSeek V4, V4.1).

Keys are values: one cached row of head_dim values serves all heads. A query at position p sees the
rows p-window+1..p of the window cache and, of the main cache, the entries w < (p+1) // ratio that
its list names (all of them where the request has no lists). One softmax over both, and the sink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from hal.ops.checks import entries_read, one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS, read_rows, slots_of
from hal.ops.masking import accumulation_dtype, listed, softmax_of_seen
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

WindowFormat = Literal["bf16", "fp16", "v4_584", "v41_528"]
MainFormat = Literal["bf16", "fp16", "v4_584", "fp4_288", "v41_528"]


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
            one_of("window_format", self.window_format, get_args(WindowFormat)),
            one_of("main_format", self.main_format, get_args(MainFormat)),
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
                self.head_dim == 512 or {self.window_format, self.main_format} <= {*PLAIN_FORMATS},
            ),
            (
                "rope_dim 64 for v4_584",
                self.rope_dim,
                self.rope_dim == 64 or "v4_584" not in (self.window_format, self.main_format),
            ),
        )


@dataclass(slots=True)
class CompressedAttentionMetadata:
    """Which rows of q belong to which sequence, and where its keys are. All int32, on the device.

    query_start_loc: [B+1], seq_lens: [B] (context including the new tokens), block tables
    [B, max_blocks] of positions (window) and of entries (main). Only pages that a query still sees
    are looked up, so a ring is a table that names the same pages again and again.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    window_block_table: torch.Tensor
    main_block_table: torch.Tensor | None
    max_query_len: int
    max_seq_len: int


def reference(
    request: CompressedAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """Golden attention: kernel(q, window_cache, main_cache, meta, indices=None) in float32
    (float64 for float64 q).

    Caches: of `hal.ops.kv_formats`; main_cache is None for the window only. indices: int32
    [T, top_k] entries of the query's own sequence, none of them twice; negative ones and ones that
    are not complete at the query are padding. A query that sees no key is zero. The rotation of
    the output is not undone here (op `rope`, inverse). Raises ValueError if sinks or lists are
    given and the request has none, or the reverse.
    """
    import torch

    if (sinks is not None) != request.has_sinks:
        raise ValueError(
            f"compressed_attention: required sinks as has_sinks={request.has_sinks} says, "
            f"found {'none' if sinks is None else list(sinks.shape)}"
        )

    def kernel(
        q: torch.Tensor,
        window_cache: torch.Tensor,
        main_cache: torch.Tensor | None,
        meta: CompressedAttentionMetadata,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _check_arguments(request, main_cache, indices)
        out = torch.zeros_like(q)
        starts = meta.query_start_loc.tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            span = slice(starts[i], starts[i + 1])
            if span.start == span.stop:
                continue
            at = torch.arange(seq_len - (span.stop - span.start), seq_len, device=q.device)
            rows, seen = _window(request, window_cache, meta.window_block_table[i], at, q)
            if main_cache is not None and meta.main_block_table is not None:
                lists = None if indices is None else indices[span]
                more = _entries(request, main_cache, meta.main_block_table[i], at, q, lists)
                rows, seen = torch.cat((rows, more[0])), torch.cat((seen, more[1]), dim=1)
            heads = q[span].to(rows.dtype).view(-1, request.num_heads, request.head_dim)
            scores = torch.einsum("qhd,kd->hqk", heads, rows) * scale
            weights = softmax_of_seen(scores, seen, sinks)
            out[span] = torch.einsum("hqk,kd->qhd", weights, rows).flatten(1).to(q.dtype)
        return out

    return kernel


def _check_arguments(
    request: CompressedAttentionRequest,
    main_cache: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> None:
    found = 0 if indices is None else indices.shape[1]
    if found != request.top_k or (main_cache is not None) != (request.compress_ratio > 0):
        raise ValueError(
            f"compressed_attention: required index lists of {request.top_k} entries (0: none) and "
            f"{'a' if request.compress_ratio else 'no'} main cache, found lists of {found} and "
            f"{'none' if main_cache is None else 'a cache'}"
        )


def _window(
    request: CompressedAttentionRequest,
    cache: torch.Tensor,
    table: torch.Tensor,
    at: torch.Tensor,
    q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that any of the queries at these positions sees in the window, and who sees which."""
    import torch

    first = max(0, int(at[0]) - request.window + 1)  # pages before it may be gone
    positions = torch.arange(first, int(at[-1]) + 1, device=q.device)
    slots = slots_of(table, positions, request.block_size)
    rows = read_rows(request.window_format, cache, request.block_size, slots, accumulation_dtype(q))
    distance = at[:, None] - positions
    return rows, (distance >= 0) & (distance < request.window)


def _entries(
    request: CompressedAttentionRequest,
    cache: torch.Tensor,
    table: torch.Tensor,
    at: torch.Tensor,
    q: torch.Tensor,
    lists: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Complete entries of the sequence, and which query sees which."""
    import torch

    complete = (at + 1) // request.compress_ratio
    entries = torch.arange(int(complete[-1]), device=q.device)
    slots = slots_of(table, entries, request.block_size)
    rows = read_rows(request.main_format, cache, request.block_size, slots, accumulation_dtype(q))
    seen = entries < complete[:, None]
    return rows, seen if lists is None else seen & listed(lists, len(entries))


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
