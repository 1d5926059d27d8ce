"""Rows sorted by expert before the grouped product, and the weighted sum per token after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.masking import accumulation_dtype
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

DispatchKind = Literal["permute", "combine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDispatchRequest(OpRequest):
    """permute: x[T, D], ids int32 [T, top_k] -> (rows[M, D], expert_offsets int64 [E + 1],
    source int32 [M]); combine: y[M, D], source, weights float32 [T, top_k] -> out[T, D].

    M is the number of ids that are not -1 (an expert of another rank). source: t * top_k + j of
    the row's token t and its j-th expert. graph_mode "graph": M is T * top_k, whatever the ids are;
    what rows after the last offset hold is free, and their source is -1, which combine passes over.
    Raises RequestError if inconsistent.
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
    """Golden dispatch. Rows of one expert keep the order of tokens, then of the token's choices.

    combine sums in the order of the choices, in float32 (float64 for float64 y); a token without
    a row is zero. Raises ValueError if an id is not of an expert, or rows and sources differ.

    An implementation that cannot raise, as nothing in a captured graph can, makes the rows of a
    token with such an id NaN. Where no other id of the token has a row there is none to tell it:
    its permute then gives a source of -2 - (t * top_k + j) among those of free rows, of which its
    combine makes NaN, and another one passes over.
    """
    import torch

    def permute(
        x: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = ids.flatten().long()
        if bool(((flat < -1) | (flat >= request.num_experts)).any()):
            raise ValueError(
                f"moe_dispatch: required ids from -1 to {request.num_experts - 1}, "
                f"found {int(flat.min())} to {int(flat.max())}"
            )
        order = torch.where(flat < 0, request.num_experts, flat).argsort(stable=True)
        counts = torch.bincount(flat[flat >= 0], minlength=request.num_experts)
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        source = order[: int(offsets[-1])]
        rows = x[source // request.top_k]
        if request.graph_mode == "graph":
            free = len(flat) - len(source)
            rows = torch.cat((rows, x.new_zeros((free, x.shape[1]))))
            source = torch.cat((source, source.new_full((free,), -1)))
        return rows, offsets, source.to(torch.int32)

    def combine(y: torch.Tensor, source: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(y) != len(source):
            raise ValueError(
                f"moe_dispatch: required a source for each of {len(y)} rows, found {len(source)}"
            )
        dtype = accumulation_dtype(y)
        tokens, choices = weights.shape
        each = torch.zeros((tokens * choices, y.shape[1]), dtype=dtype, device=y.device)
        if request.graph_mode == "graph":
            y, source = y[source >= 0], source[source >= 0]
        each[source.long()] = y.to(dtype) * weights.flatten()[source.long()].to(dtype)[:, None]
        return each.view(tokens, choices, y.shape[1]).sum(dim=1).to(y.dtype)

    return permute if request.kind == "permute" else combine


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
    largest_errors={**ROUNDING_ERRORS, "float32": 2.0**-22},
    kinds=("permute", "combine"),
)
