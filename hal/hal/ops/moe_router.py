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
from hal.ops.masking import accumulation_dtype
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
    """Golden choice: kernel(logits, token_ids=None) in float32 (float64 for float64 logits).

    bias: [num_experts]. expert_table: integers [vocab_size, top_k], indexed by the token ids int64
    [T] of the call. Experts are ordered by falling choice score. Raises ValueError if bias, table
    or token ids are given and the request has none, or the reverse.
    """
    import torch

    is_hash = request.scoring == "hash"
    _check_given("bias", bias, request.has_bias)
    _check_given("an expert table", expert_table, is_hash)

    def kernel(
        logits: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check_given("token ids", token_ids, is_hash)
        scores = _scores(request, logits.to(accumulation_dtype(logits)))
        if expert_table is not None and token_ids is not None:
            ids = expert_table[token_ids].long()
        else:
            choice = scores if bias is None else scores + bias.to(scores.dtype)
            ids = _best(_in_picked_groups(request, choice), request.top_k)
        weights = scores.gather(1, ids)
        if request.normalizes:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return weights * request.route_scale, ids.to(torch.int32)

    return kernel


def _check_given(what: str, found: torch.Tensor | None, is_wanted: bool) -> None:
    if (found is not None) != is_wanted:
        raise ValueError(
            f"moe_router: required {what if is_wanted else f'not {what}'}, "
            f"found {'none' if found is None else list(found.shape)}"
        )


def _scores(request: MoeRouterRequest, logits: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as functional

    if request.scoring == "softmax":
        return logits.softmax(dim=1)
    if request.scoring == "sigmoid":
        return logits.sigmoid()
    return functional.softplus(logits).sqrt()


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the largest scores; a stable sort puts the lower of equals first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _in_picked_groups(request: MoeRouterRequest, choice: torch.Tensor) -> torch.Tensor:
    """Choice scores, -inf outside the groups with the largest sum of two scores."""
    import torch

    if request.num_groups == request.num_groups_picked:
        return choice
    groups = torch.unflatten(choice, 1, (request.num_groups, -1))
    picked = _best(groups.topk(2, dim=2).values.sum(dim=2), request.num_groups_picked)
    is_picked = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device)
    is_picked.scatter_(1, picked, True)
    return groups.masked_fill(~is_picked[:, :, None], float("-inf")).flatten(1)


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
