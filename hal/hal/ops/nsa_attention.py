"""Native sparse attention: compressed, selected and sliding branches under gates (NSA).

The formulas are those of https://arxiv.org/abs/2502.11089, section 3. A query sees entries that
stand for blocks of l keys, a new one every d keys; the probabilities of the entries, summed over
the heads that share keys, say which blocks of l' keys it sees whole; and it sees its last keys.
The entries come from outside: op `nsa_compress` is the paper's compression, an MLP over the rows of
a block (op `kv_compressor`, overlapping, is a pooling of them where l = 2 * d; its first entry is
of half a block, and left out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hal.ops.block_sparse_attention import attend_groups, rows_of
from hal.ops.checks import entries_read, positive, require, seen_entries
from hal.ops.formats import DTYPE_BYTES
from hal.ops.masking import accumulation_dtype, listed, softmax_of_seen
from hal.ops.request import FLOAT_TOLERANCES, LARGEST_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

BRANCHES = 3  # compressed, selected, sliding: the order of the gates


@dataclass(frozen=True, slots=True, kw_only=True)
class NsaAttentionRequest(OpRequest):
    """q[T, H * head_dim] -> out[T, H * v_head_dim], causal.

    compress_length, compress_stride: l and d, keys of an entry and from one to the next.
    select_size: l', keys of a block that is selected. num_selected: n, blocks that a query sees,
    of them the num_initial first and the num_local last ones in any case. window: w, keys up to
    its own that a query sees in the sliding branch. block_size: rows of a page, in all caches.
    publishes_blocks: the call also returns which blocks it selected. Raises RequestError if
    inconsistent.
    """

    op: ClassVar[str] = "nsa_attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    dtype: str
    compress_length: int = 32
    compress_stride: int = 16
    select_size: int = 64
    num_selected: int = 16
    num_initial: int = 1
    num_local: int = 2
    window: int = 512
    publishes_blocks: bool = False
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        length, stride, size = self.compress_length, self.compress_stride, self.select_size
        require(
            "nsa_attention request",
            *positive(
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                v_head_dim=self.v_head_dim,
                block_size=self.block_size,
                compress_stride=stride,
                num_selected=self.num_selected,
                window=self.window,
            ),
            (
                "num_heads a multiple of num_kv_heads",
                f"{self.num_heads} and {self.num_kv_heads}",
                self.num_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            ),
            (
                "compress_stride <= compress_length <= select_size",
                (stride, length, size),
                stride <= length <= size,
            ),
            (
                "compress_length and select_size multiples of compress_stride",
                (length, size, stride),
                stride > 0 and length % stride == 0 and size % stride == 0,
            ),
            (
                "num_initial and num_local >= 0, together at most num_selected",
                (self.num_initial, self.num_local, self.num_selected),
                min(self.num_initial, self.num_local) >= 0
                and self.num_initial + self.num_local <= self.num_selected,
            ),
        )

    def entries_at(self, tokens: int) -> int:
        """Entries whose keys are all among the first `tokens`."""
        return max(tokens - self.compress_length + self.compress_stride, 0) // self.compress_stride


@dataclass(slots=True)
class NsaCaches:
    """Keys [N, P, Hk, D] and values [N, P, Hk, Dv] of the branches, which have their own each;
    a model whose branches share keys names a cache twice."""

    entry_keys: torch.Tensor
    entry_values: torch.Tensor
    selected_keys: torch.Tensor
    selected_values: torch.Tensor
    window_keys: torch.Tensor
    window_values: torch.Tensor


@dataclass(slots=True)
class NsaMetadata:
    """Which rows of q belong to which sequence, and where its keys are. All int32, on the device.

    query_start_loc: [B+1], seq_lens: [B] (context including the new tokens), block tables
    [B, max_blocks] of positions (both caches of them) and of entries.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    entry_block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


def reference(request: NsaAttentionRequest, *, scale: float) -> Callable[..., Any]:
    """Golden attention: kernel(q, gates, caches, meta) -> out, or (out, blocks) where the request
    publishes them, in float32 (float64 for float64 q).

    gates: [T, H, 3] logits, of which the sigmoid weighs the compressed, selected and sliding
    branch. blocks: int32 [T, Hk, num_selected], padded with -1; the order within a list is free
    for implementations, here it is by falling importance. A branch in which a query sees nothing
    is zero.
    """
    import torch

    def kernel(q: torch.Tensor, gates: torch.Tensor, caches: NsaCaches, meta: NsaMetadata) -> Any:
        dtype = accumulation_dtype(q)
        out = q.new_zeros((q.shape[0], request.num_heads * request.v_head_dim))
        shape = (q.shape[0], request.num_kv_heads, request.num_selected)
        blocks = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        starts = meta.query_start_loc.tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            span = slice(starts[i], starts[i + 1])
            if span.start == span.stop:
                continue
            at = torch.arange(seq_len - (span.stop - span.start), seq_len, device=q.device)
            rows = q[span].to(dtype).view(len(at), request.num_heads, request.head_dim)
            of_entries, of_blocks, of_window = _rows(request, caches, meta, i, seq_len, dtype)
            compressed, scores = _compressed(request, rows, *of_entries, at, scale)
            blocks[span] = select_blocks(request, scores, at)
            listed_keys = _in_blocks(request, blocks[span], at, seq_len)
            selected = attend_groups(rows, *of_blocks, listed_keys, scale)
            distance = at[:, None] - torch.arange(seq_len, device=q.device)
            near = (distance >= 0) & (distance < request.window)
            sliding = attend_groups(rows, *of_window, [near] * request.num_kv_heads, scale)
            branches = torch.stack((compressed, selected, sliding), dim=-1)
            mixed = (branches * gates[span].to(dtype).sigmoid()[:, :, None]).sum(dim=-1)
            out[span] = mixed.flatten(1).to(q.dtype)
        return (out, blocks) if request.publishes_blocks else out

    return kernel


def _rows(
    request: NsaAttentionRequest,
    caches: NsaCaches,
    meta: NsaMetadata,
    sequence: int,
    seq_len: int,
    dtype: torch.dtype,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a sequence, branch by branch."""

    def pair(
        keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, row = request.block_size, table[sequence]
        return (
            rows_of(keys, row, count, size).to(dtype),
            rows_of(values, row, count, size).to(dtype),
        )

    entries, table = request.entries_at(seq_len), meta.block_table
    return [
        pair(caches.entry_keys, caches.entry_values, meta.entry_block_table, entries),
        pair(caches.selected_keys, caches.selected_values, table, seq_len),
        pair(caches.window_keys, caches.window_values, table, seq_len),
    ]


def _compressed(
    request: NsaAttentionRequest,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The compressed branch [Q, H, Dv] (formula 7) and the importance [Q, Hk, blocks] of blocks
    (formulas 8 to 10)."""
    import torch

    counts = torch.tensor([request.entries_at(p + 1) for p in at.tolist()], device=rows.device)
    seen = torch.arange(len(keys), device=rows.device) < counts[:, None]
    groups = request.num_heads // request.num_kv_heads
    grouped = rows.reshape(len(rows), request.num_kv_heads, groups, request.head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    weights = softmax_of_seen(scores.flatten(0, 1), seen).reshape(scores.shape)
    branch = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
    blocks = int(at[-1]) // request.select_size + 1
    return branch, block_scores(request, weights.sum(dim=1).transpose(0, 1), blocks)


def block_scores(
    request: NsaAttentionRequest, probabilities: torch.Tensor, blocks: int
) -> torch.Tensor:
    """Formula 9, of which the indices begin at 1: [..., entries] -> [..., blocks]."""
    import torch

    scores = probabilities.new_zeros((*probabilities.shape[:-1], blocks))
    ratio = request.select_size // request.compress_stride
    for block in range(1, blocks + 1):
        for m in range(ratio):
            for n in range(request.compress_length // request.compress_stride):
                entry = ratio * block - m - n
                if 1 <= entry <= probabilities.shape[-1]:
                    scores[..., block - 1] += probabilities[..., entry - 1]
    return torch.nan_to_num(scores)


def select_blocks(
    request: NsaAttentionRequest, scores: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """int32 [Q, Hk, num_selected] (formula 11): the first and the last blocks, then those with
    the largest scores [Q, Hk, blocks], of equal ones the lower; none that begins after the query.
    """
    import torch
    import torch.nn.functional as functional

    number = torch.arange(scores.shape[-1], device=scores.device)
    own = (at // request.select_size)[:, None]
    is_forced = (number < request.num_initial) | (number > own - request.num_local)
    ranked = scores.masked_fill(is_forced[:, None], float("inf"))
    ranked = ranked.masked_fill((number > own)[:, None], float("-inf"))
    values, order = ranked.sort(dim=-1, descending=True, stable=True)
    order = torch.where(values == float("-inf"), -1, order)[..., : request.num_selected]
    padding = request.num_selected - order.shape[-1]
    return functional.pad(order, (0, padding), value=-1).to(torch.int32)


def _in_blocks(
    request: NsaAttentionRequest, blocks: torch.Tensor, at: torch.Tensor, seq_len: int
) -> list[torch.Tensor]:
    """bool [Q, seq_len] for each cached head: keys of the selected blocks up to the query."""
    import torch

    count = -(-seq_len // request.select_size)
    is_past = torch.arange(seq_len, device=at.device) <= at[:, None]
    return [
        listed(chosen, count).repeat_interleave(request.select_size, dim=1)[:, :seq_len] & is_past
        for chosen in blocks.unbind(1)
    ]


def _pairs(request: NsaAttentionRequest, tokens: int) -> tuple[float, float, float]:
    """Query-row pairs of the branches."""
    phase, context, stride = request.phase, request.context_tokens, request.compress_stride
    if phase == "decode":
        entries = float(tokens * request.entries_at(max(context, 1)))
    else:  # the first entry is complete so many tokens later than one of a stride alone
        late = request.compress_length - stride
        entries = seen_entries(tokens - late, stride)
    most = request.num_selected * request.select_size
    return (
        entries,
        entries_read(phase, tokens, context, most=most),
        entries_read(phase, tokens, context, most=request.window),
    )


def flops(request: NsaAttentionRequest, tokens: int) -> float:
    """The products of the branches, and a sum over heads per entry."""
    pairs = _pairs(request, tokens)
    dims = request.head_dim + request.v_head_dim
    return 2.0 * request.num_heads * dims * sum(pairs) + request.num_heads * pairs[0]


def bytes_moved(request: NsaAttentionRequest, tokens: int) -> float:
    """Decode reads the rows of each query; a prompt's rows are read once for all its queries."""
    rows = sum(_pairs(request, tokens))
    if request.phase != "decode":
        rows = float(request.entries_at(tokens) + 2 * tokens)
    dims, size = request.head_dim + request.v_head_dim, DTYPE_BYTES[request.dtype]
    lists = tokens * request.num_kv_heads * request.num_selected * 4
    return (
        (request.num_kv_heads * rows + request.num_heads * tokens) * dims * size
        + BRANCHES * tokens * request.num_heads * size
        + (lists if request.publishes_blocks else 0)
    )


FAMILY = OpFamily(
    name="nsa_attention",
    request_type=NsaAttentionRequest,
    summary="Native sparse attention: compressed, selected and sliding branches under gates",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    # Each branch rounds its result, and their sum is rounded again.
    largest_errors={**LARGEST_ERRORS, "bfloat16": 2.0**-6, "float16": 2.0**-9},
)
