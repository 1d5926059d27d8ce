"""Rows sorted by expert before the grouped product, and the weighted sum per token after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

DispatchKind = Literal["permute", "combine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDispatchRequest(OpRequest):
    """permute: x[T, D], ids int32 [T, top_k] -> (rows[M, D], expert_offsets int64 [E + 1],
    source int32 [M]); combine: y[M, D], source, weights float32 [T, top_k] -> out[T, D].

    M is the number of ids that are not -1 (an expert of another rank). source: t * top_k + j of
    the row's token t and its j-th expert. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "moe_dispatch"

    kind: DispatchKind
    num_experts: int
    top_k: int
    hidden_size: int
    dtype: str

    def __post_init__(self) -> None:
        require(
            "moe_dispatch request",
            one_of("kind", self.kind, ("permute", "combine")),
            *positive(num_experts=self.num_experts, top_k=self.top_k, hidden_size=self.hidden_size),
            (
                f"top_k <= num_experts {self.num_experts}",
                self.top_k,
                self.top_k <= self.num_experts,
            ),
        )

    @property
    def label(self) -> str:
        return f"moe_dispatch.{self.kind}"


def reference(request: MoeDispatchRequest) -> Callable[..., Any]:
    raise NotImplementedError


def flops(request: MoeDispatchRequest, tokens: int) -> float:
    products = 2.0 * tokens * request.top_k * request.hidden_size
    return products if request.kind == "combine" else 0.0


def bytes_moved(request: MoeDispatchRequest, tokens: int) -> float:
    """Each token's row once, each expert's row once, ids or weights, the source of each row."""
    rows = tokens * (1 + request.top_k) * request.hidden_size * DTYPE_BYTES[request.dtype]
    offsets = (request.num_experts + 1) * 8 if request.kind == "permute" else 0
    return float(rows + tokens * request.top_k * 8 + offsets)


FAMILY = OpFamily(
    name="moe_dispatch",
    request_type=MoeDispatchRequest,
    summary="Rows sorted by expert, and their weighted sum per token",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    kinds=("permute", "combine"),
)
