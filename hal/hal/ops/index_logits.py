"""Scores of the sparse-attention indexer: which cached entries matter to a query.

The lightning indexer of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556):
I[t, s] = scale * sum_h w[t, h] * relu(q[t, h] . k[s]), over paged index keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from hal.ops.checks import entries_read, one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS, read_rows, slots_of
from hal.ops.masking import accumulation_dtype
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

    from hal.ops.attention import AttentionMetadata

IndexKeyFormat = Literal["bf16", "fp16", "fp8_132", "fp4_68"]


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
            one_of("key_format", self.key_format, get_args(IndexKeyFormat)),
            *positive(
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                block_size=self.block_size,
                compress_ratio=self.compress_ratio,
            ),
            (
                f"head_dim 128 for {self.key_format}",
                self.head_dim,
                self.key_format in PLAIN_FORMATS or self.head_dim == 128,
            ),
        )


def reference(request: IndexLogitsRequest, *, scale: float) -> Callable[..., torch.Tensor]:
    """Golden scores: kernel(q, weights, key_cache, meta) -> [T, max_seq_len // compress_ratio] in
    float32 (float64 for float64 q), -inf where the query sees no entry.

    key_cache: of `hal.ops.kv_formats`, in pages of entries. meta: `AttentionMetadata`, seq_lens in
    tokens, block_table of entries.
    """
    import torch

    def kernel(
        q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        dtype, ratio = accumulation_dtype(q), request.compress_ratio
        shape = (q.shape[0], meta.max_seq_len // ratio)
        logits = torch.full(shape, float("-inf"), dtype=dtype, device=q.device)
        starts = meta.query_start_loc.tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            span = slice(starts[i], starts[i + 1])
            entries = torch.arange(seq_len // ratio, device=q.device)
            if span.start == span.stop or not len(entries):
                continue
            slots = slots_of(meta.block_table[i], entries, request.block_size)
            keys = read_rows(request.key_format, key_cache, request.block_size, slots, dtype)
            heads = q[span].to(dtype).view(-1, request.num_heads, request.head_dim)
            products = torch.einsum("qhd,kd->qhk", heads, keys).relu()
            scores = torch.einsum("qhk,qh->qk", products, weights[span].to(dtype)) * scale
            at = torch.arange(seq_len - len(heads), seq_len, device=q.device)
            seen = entries < ((at + 1) // ratio)[:, None]
            logits[span, : len(entries)] = scores.masked_fill(~seen, float("-inf"))
        return logits

    return kernel


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
