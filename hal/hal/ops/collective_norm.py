"""The sum over ranks, the addition into the residual and the norm behind it, as one call.

What `collective.all_reduce` and `norm.rms` with a residual do one after the other; a kernel that
does both writes and reads the sum in memory once less and is launched once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hal.errors import RequestError
from hal.ops import collective, norm
from hal.ops.collective import CollectiveGroup, CollectiveRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import FLOAT_TOLERANCES, OpFamily

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceNormRequest(CollectiveRequest):
    """residual += sum over ranks of x[T, width]; y = residual / rms(residual) * weight.

    Raises RequestError if the kind is not all_reduce.
    """

    op: ClassVar[str] = "all_reduce_norm"

    def __post_init__(self) -> None:
        if self.kind != "all_reduce":
            raise RequestError(
                "all_reduce_norm request", "kind='all_reduce'", f"kind={self.kind!r}", "correct it"
            )

    @property
    def label(self) -> str:
        return self.op

    def norm(self) -> RmsNormRequest:
        """Its second half as a request of its own."""
        return RmsNormRequest(
            hidden_size=self.width, dtype=self.dtype, has_residual=True, tokens=self.tokens
        )


def reference(
    request: AllReduceNormRequest, *, group: CollectiveGroup, weight: torch.Tensor, eps: float
) -> Callable[..., Any]:
    """kernel(x[T, width], residual[T, width]) -> (y, residual), by the two references. The sum is
    rounded to the activations' dtype before it is added. Raises ValueError as they do."""
    reduce = collective.reference(request, group=group)
    norm_of = norm.reference(request.norm(), weight=weight, eps=eps)

    def all_reduce_norm(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return norm_of(reduce(x), residual)

    return all_reduce_norm


def flops(request: AllReduceNormRequest, tokens: int) -> float:
    return collective.flops(request, tokens) + norm.flops(request.norm(), tokens)


def bytes_moved(request: AllReduceNormRequest, tokens: int) -> float:
    """Bytes that each rank must send, which bound it: its memory is many times faster."""
    return collective.bytes_moved(request, tokens)


FAMILY = OpFamily(
    name="all_reduce_norm",
    request_type=AllReduceNormRequest,
    summary="all_reduce, addition into the residual and root-mean-square norm as one call",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
