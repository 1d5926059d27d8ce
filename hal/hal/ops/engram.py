"""Engram (DeepSeek-V4.1): a table of n-gram embeddings, gathered by hash and mixed into streams.

Two steps around one matrix product. gather: for n = 2..max_ngram and each head a hash of the last
n compressed token ids names a row of the table. The rows, side by side, are projected to one key
per stream and one value (op `gemm`). mix: each stream adds the value, gated by its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES, torch_dtype
from hal.ops.low_precision import dequantize_groups
from hal.ops.masking import accumulation_dtype
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest, Tolerance

if TYPE_CHECKING:
    import torch

EngramKind = Literal["gather", "mix"]
_SCALE_GROUP = 32  # values of a row that share one ue8m0 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramRequest(OpRequest):
    """gather: compressed ids int64 [T, max_ngram] (own first, then those before; the pad id
    before the start) ->
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


def reference(
    request: EngramRequest,
    *,
    table: torch.Tensor | None = None,
    multipliers: torch.Tensor | None = None,
    primes: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Callable[..., torch.Tensor]:
    """Golden gather(ids) or mix(streams, kv), in float32 (float64 for float64 streams).

    table: uint8 [rows, row_bytes], e4m3 values then ue8m0 scales. multipliers: int64 [max_ngram],
    primes and offsets int64 [max_ngram - 1, num_heads]: row (h_n mod prime) + offset with
    h_n = xor of ids[s] * multipliers[s] for s < n, in n, then head order. query_weight,
    key_weight: [N, D] of the norms; kv: a key per stream, then the value. Raises ValueError if a
    tensor that the kind needs is missing.
    """
    if request.kind == "gather":
        if table is None or multipliers is None or primes is None or offsets is None:
            raise ValueError(
                "engram: required table, multipliers, primes and offsets, found None among them"
            )
        return _gather(request, table, multipliers, primes, offsets)
    if query_weight is None or key_weight is None:
        raise ValueError("engram: required query_weight and key_weight, found None among them")
    return _mix(request, query_weight, key_weight, eps)


def _gather(
    request: EngramRequest,
    table: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
) -> Callable[[torch.Tensor], torch.Tensor]:
    import torch

    width, dtype = request.row_width, torch_dtype(request.dtype)

    def gather(ids: torch.Tensor) -> torch.Tensor:
        products = ids * multipliers
        running, rows = products[:, 0], []
        for n in range(1, request.max_ngram):
            running = running ^ products[:, n]
            rows.append(running[:, None] % primes[n - 1] + offsets[n - 1])
        packed = table[torch.cat(rows, dim=1)].flatten(0, 1)
        values = dequantize_groups(
            packed[:, :width].contiguous().view(torch.float8_e4m3fn),
            packed[:, width:],
            element="fp8_e4m3fn",
            scale_kind="ue8m0",
        )
        return values.view(ids.shape[0], request.rows_per_token * width).to(dtype)

    return gather


def _mix(
    request: EngramRequest, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    import torch

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.to(x.dtype)

    def mix(streams: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        dtype = accumulation_dtype(streams)
        rows = torch.unflatten(kv.to(dtype), 1, (-1, request.hidden_size))
        exact = streams.to(dtype)
        dots = normed(exact, query_weight) * normed(rows[:, :-1], key_weight)
        score = dots.sum(dim=-1) / math.sqrt(request.hidden_size)
        gate = (score.sign() * score.abs().sqrt()).sigmoid()
        return (exact + gate[:, :, None] * rows[:, -1:]).to(streams.dtype)

    return mix


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
    # Near 0 the gate's square root turns 1e-7 of the dot product into 3e-4.
    tolerances={**FLOAT_TOLERANCES, "float32": Tolerance(2e-5, 1e-3)},
    largest_errors={**ROUNDING_ERRORS, "float32": 2.0**-22},
    kinds=("gather", "mix"),
    weight_bytes=stored_bytes,
)
