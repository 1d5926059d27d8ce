"""Choice of experts per token from router logits: softmax, sigmoid, sqrt-softplus, hash.

A bias takes part in the choice only, never in the weights (https://arxiv.org/abs/2408.15664). With
groups (https://arxiv.org/abs/2412.19437) the groups with the largest sum of their two best choice
scores are picked first. Of equal scores the lower index wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus", "hash"]
_SCORINGS = ("softmax", "sigmoid", "sqrt_softplus", "hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRouterRequest(OpRequest):
    """logits[T, num_experts] -> (weights float32 [T, top_k], ids int32 [T, top_k]).

    "hash": the ids come from a table by token id, and sqrt-softplus scores weight them. normalizes:
    weights are divided by their sum before route_scale. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "moe_router"

    scoring: Scoring
    num_experts: int
    top_k: int
    num_groups: int = 1
    num_groups_picked: int = 1
    has_bias: bool = False
    normalizes: bool = True
    route_scale: float = 1.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        groups = max(self.num_groups, 1)
        in_picked = self.num_experts // groups * self.num_groups_picked
        require(
            "moe_router request",
            one_of("scoring", self.scoring, _SCORINGS),
            *positive(
                num_experts=self.num_experts,
                top_k=self.top_k,
                num_groups=self.num_groups,
                num_groups_picked=self.num_groups_picked,
            ),
            (
                "groups of equal size, of at least two experts",
                f"{self.num_experts} experts in {self.num_groups} groups",
                self.num_groups == 1
                or (
                    self.num_experts % self.num_groups == 0
                    and self.num_experts // self.num_groups >= 2
                ),
            ),
            (
                f"num_groups_picked <= num_groups {self.num_groups}",
                self.num_groups_picked,
                self.num_groups_picked <= self.num_groups,
            ),
            (f"top_k <= {in_picked} experts to choose from", self.top_k, self.top_k <= in_picked),
            (
                "neither bias nor groups with a hash table",
                f"has_bias={self.has_bias}, num_groups={self.num_groups}",
                self.scoring != "hash" or not (self.has_bias or self.num_groups > 1),
            ),
        )


def reference(
    request: MoeRouterRequest,
    *,
    bias: torch.Tensor | None = None,
    expert_table: torch.Tensor | None = None,
) -> Callable[..., Any]:
    raise NotImplementedError


def flops(request: MoeRouterRequest, tokens: int) -> float:
    """About four operations a score, one comparison in the choice."""
    return 5.0 * tokens * request.num_experts


def bytes_moved(request: MoeRouterRequest, tokens: int) -> float:
    """Logits, the bias, what is chosen; with a hash table its rows (int64) and the token ids."""
    logits = tokens * request.num_experts * DTYPE_BYTES[request.dtype]
    bias = request.num_experts * 4 if request.has_bias else 0
    table = tokens * (request.top_k * 8 + 8) if request.scoring == "hash" else 0
    return float(logits + bias + table + tokens * request.top_k * 8)


FAMILY = OpFamily(
    name="moe_router",
    request_type=MoeRouterRequest,
    summary="Choice and weights of experts from router logits",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
