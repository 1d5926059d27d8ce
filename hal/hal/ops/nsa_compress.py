"""Compression of blocks of keys or values by an MLP with position encoding in the block (NSA).

The map of https://arxiv.org/abs/2502.11089, section 3.3.1: of l rows of a cached head, a new block
every d rows, one entry, w2 @ silu(w1 @ flatten(rows + position) + b1) + b2. The paper leaves the
form of the MLP open: here it has one hidden layer and SiLU, and all cached heads share it. Keys and
values are two calls with weights of their own; op `nsa_attention` reads the entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.block_sparse_attention import rows_of
from hal.ops.checks import positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import slots_of
from hal.ops.masking import accumulation_dtype
from hal.ops.nsa_attention import NsaMetadata
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NsaCompressRequest(OpRequest):
    """Rows of a paged cache -> entries in another one, head_dim values each.

    hidden_size: of the MLP. compress_length, compress_stride: l and d, rows of an entry and from
    one to the next. block_size: rows of a page, in both caches. dtype: of rows, entries and
    weights; a kernel may keep the hidden values in it too, as a torch module of that dtype does:
    in float16 those beyond 65,504 are infinite there, and their entry is not finite. Raises
    RequestError if inconsistent.
    """

    op: ClassVar[str] = "nsa_compress"

    num_kv_heads: int
    head_dim: int
    hidden_size: int
    block_size: int
    dtype: str
    compress_length: int = 32
    compress_stride: int = 16

    def __post_init__(self) -> None:
        length, stride = self.compress_length, self.compress_stride
        require(
            "nsa_compress request",
            *positive(
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                hidden_size=self.hidden_size,
                block_size=self.block_size,
                compress_stride=stride,
            ),
            ("compress_stride <= compress_length", (stride, length), stride <= length),
            (
                "compress_length a multiple of compress_stride",
                (length, stride),
                stride > 0 and length % stride == 0,
            ),
        )

    def entries_at(self, tokens: int) -> int:
        """Entries whose rows are all among the first `tokens`."""
        return max(tokens - self.compress_length + self.compress_stride, 0) // self.compress_stride

    def most_entries(self, new_tokens: int) -> int:
        """Entries that so many new tokens of a sequence can complete at most."""
        return -(-new_tokens // self.compress_stride)


@dataclass(slots=True)
class NsaCompressWeights:
    """The MLP: w1 [hidden_size, l * D] over the rows of a block one after the other, w2
    [D, hidden_size], and position [l, D], which is added to the rows of every block. b1
    [hidden_size] and b2 [D]: None for none."""

    w1: torch.Tensor
    w2: torch.Tensor
    position: torch.Tensor
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def check(self, request: NsaCompressRequest) -> None:
        """Raises ValueError for a tensor of another shape than the request's."""
        length, dim, hidden = request.compress_length, request.head_dim, request.hidden_size
        for name, tensor, shape in (
            ("w1", self.w1, (hidden, length * dim)),
            ("w2", self.w2, (dim, hidden)),
            ("position", self.position, (length, dim)),
            ("b1", self.b1, (hidden,)),
            ("b2", self.b2, (dim,)),
        ):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"nsa_compress: required {name} {list(shape)}, found {list(tensor.shape)}; "
                    f"pass the weights of this request's sizes"
                )

    def to(self, dtype: torch.dtype) -> NsaCompressWeights:
        """The same values in another dtype."""

        def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(dtype)

        return NsaCompressWeights(
            w1=self.w1.to(dtype),
            w2=self.w2.to(dtype),
            position=self.position.to(dtype),
            b1=cast(self.b1),
            b2=cast(self.b2),
        )


def reference(
    request: NsaCompressRequest, *, weights: NsaCompressWeights
) -> Callable[[torch.Tensor, torch.Tensor, NsaMetadata], None]:
    """Golden compression: kernel(rows[N, P, Hk, D], entries[N', P, Hk, D], meta), in float32
    (float64 for float64 rows), writes into `entries`.

    The new tokens' rows are in their cache already. Written is each entry whose l rows are complete
    with the new tokens and were not before; no other element. Raises ValueError for weights of
    other shapes.
    """
    import torch
    import torch.nn.functional as functional

    weights.check(request)

    def kernel(rows: torch.Tensor, entries: torch.Tensor, meta: NsaMetadata) -> None:
        dtype = accumulation_dtype(rows)
        mlp, size = weights.to(dtype), request.block_size
        new = meta.query_start_loc.diff().tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            first, end = request.entries_at(seq_len - new[i]), request.entries_at(seq_len)
            if first >= end:
                continue
            numbers = torch.arange(first, end, device=rows.device)
            own = rows_of(rows, meta.block_table[i], seq_len, size).to(dtype)
            offsets = torch.arange(request.compress_length, device=rows.device)
            blocks = own[numbers[:, None] * request.compress_stride + offsets]  # [E, l, Hk, D]
            flat = (blocks.transpose(1, 2) + mlp.position).flatten(2)
            hidden = functional.silu(functional.linear(flat, mlp.w1, mlp.b1))
            out = functional.linear(hidden, mlp.w2, mlp.b2)
            slots = slots_of(meta.entry_block_table[i], numbers, size)
            entries[slots // size, slots % size] = out.to(entries.dtype)

    return kernel


def flops(request: NsaCompressRequest, tokens: int) -> float:
    """The two products of each entry and cached head; `tokens` complete one every d."""
    rows = tokens / request.compress_stride * request.num_kv_heads
    return 2.0 * rows * request.hidden_size * request.head_dim * (request.compress_length + 1)


def bytes_moved(request: NsaCompressRequest, tokens: int) -> float:
    """The weights once, entries out, and rows in: a prompt's once, those of a decode l an entry."""
    entries = tokens / request.compress_stride
    is_decode = request.phase == "decode"
    rows = entries * request.compress_length if is_decode else float(tokens)
    moved = (rows + entries) * request.num_kv_heads * request.head_dim
    return (moved + _weights(request)) * DTYPE_BYTES[request.dtype]


def _weights(request: NsaCompressRequest) -> int:
    length, dim, hidden = request.compress_length, request.head_dim, request.hidden_size
    return hidden * dim * (length + 1) + length * dim + hidden + dim


def stored_bytes(request: NsaCompressRequest) -> int:
    """Of the MLP and the position encoding."""
    return _weights(request) * DTYPE_BYTES[request.dtype]


FAMILY = OpFamily(
    name="nsa_compress",
    request_type=NsaCompressRequest,
    summary="Blocks of keys or values compressed to entries by an MLP with position encoding",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    weight_bytes=stored_bytes,
)
