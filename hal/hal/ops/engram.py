"""Engram (DeepSeek-V4.1): a table of n-gram embeddings, gathered by hash and mixed into streams.

Two steps around one matrix product. gather: for n = 2..max_ngram and each head a hash of the last
n compressed token ids names a row of the table. The rows, side by side, are projected to one key
per stream and one value (op `gemm`). mix: each stream adds the value, gated by its key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

EngramKind = Literal["gather", "mix"]
_SCALE_GROUP = 32  # values of a row that share one ue8m0 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramRequest(OpRequest):
    """gather: ids int64 [T, max_ngram] (own first, then those before; -1 before the start) ->
    [T, (max_ngram - 1) * num_heads * row_width]; mix: streams[T, N, D], kv[T, (N + 1) * D] ->
    streams[T, N, D].

    A row of the table is row_width e4m3 values and one ue8m0 scale per 32. table_rows: of the part
    of the table that gather reads, 0 where nobody said. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "engram"

    num_heads: int
    max_ngram: int
    row_width: int
    hidden_size: int
    num_streams: int
    dtype: str
    kind: EngramKind = "gather"
    table_rows: int = 0

    def __post_init__(self) -> None:
        require(
            "engram request",
            one_of("kind", self.kind, ("gather", "mix")),
            *positive(
                num_heads=self.num_heads,
                row_width=self.row_width,
                hidden_size=self.hidden_size,
                num_streams=self.num_streams,
            ),
            ("max_ngram >= 2", self.max_ngram, self.max_ngram >= 2),
            (
                f"row_width a multiple of {_SCALE_GROUP}",
                self.row_width,
                self.row_width % _SCALE_GROUP == 0,
            ),
        )

    @property
    def label(self) -> str:
        return f"engram.{self.kind}"

    @property
    def rows_per_token(self) -> int:
        """Rows of the table that a token gathers."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row of the table."""
        return self.row_width + self.row_width // _SCALE_GROUP


def reference(request: EngramRequest, **static: Any) -> Callable[..., Any]:
    raise NotImplementedError


def flops(request: EngramRequest, tokens: int) -> float:
    """gather: hashes, and the scale of each value; mix: two norms, a dot product, the sum."""
    if request.kind == "gather":
        return tokens * request.rows_per_token * (2.0 * request.max_ngram + request.row_width)
    return 12.0 * tokens * request.num_streams * request.hidden_size


def bytes_moved(request: EngramRequest, tokens: int) -> float:
    width = DTYPE_BYTES[request.dtype]
    if request.kind == "gather":
        row = request.row_bytes + request.row_width * width
        return float(tokens * (request.rows_per_token * row + request.max_ngram * 8))
    n, d = request.num_streams, request.hidden_size
    return float((tokens * (3 * n + 1) + 2 * n) * d * width)


def stored_bytes(request: EngramRequest) -> int:
    return request.table_rows * request.row_bytes if request.kind == "gather" else 0


FAMILY = OpFamily(
    name="engram",
    request_type=EngramRequest,
    summary="n-gram embeddings by hash, mixed into the residual streams",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    kinds=("gather", "mix"),
    weight_bytes=stored_bytes,
)
