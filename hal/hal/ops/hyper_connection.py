"""Hyper-connections: several residual streams, mixed around each sublayer.

Manifold-constrained (https://arxiv.org/abs/2512.24880): the mixing matrix between the streams is
made doubly stochastic by Sinkhorn's iteration. Lagged (DeepSeek-V4.1): a sublayer's input is
collapsed with the weights that the sublayer before computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

HyperConnectionKind = Literal["pre", "post", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionRequest(OpRequest):
    """pre: streams[T, N, D] -> (x[T, D], post[T, N], comb[T, N, N]), with is_lagged also pre[T, N];
    post: y[T, D], streams, post, comb -> streams; head: streams -> x[T, D] after the last layer.

    Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "hyper_connection"

    kind: HyperConnectionKind
    num_streams: int
    hidden_size: int
    sinkhorn_iterations: int
    dtype: str
    is_lagged: bool = False

    def __post_init__(self) -> None:
        require(
            "hyper_connection request",
            one_of("kind", self.kind, ("pre", "post", "head")),
            *positive(
                num_streams=self.num_streams,
                hidden_size=self.hidden_size,
                sinkhorn_iterations=self.sinkhorn_iterations,
            ),
        )

    @property
    def label(self) -> str:
        return f"hyper_connection.{self.kind}"

    @property
    def num_mixes(self) -> int:
        """Rows of the projection that computes the weights."""
        n = self.num_streams
        return n if self.kind == "head" else n * (2 + n)


def reference(request: HyperConnectionRequest, **static: Any) -> Callable[..., Any]:
    raise NotImplementedError


def flops(request: HyperConnectionRequest, tokens: int) -> float:
    n, d = request.num_streams, request.hidden_size
    if request.kind == "post":
        return 2.0 * tokens * n * d * (n + 1)
    project = 2.0 * n * d * request.num_mixes + 4.0 * n * d  # with norm and collapse
    sinkhorn = 4.0 * n * n * request.sinkhorn_iterations if request.kind == "pre" else 0.0
    return tokens * (project + sinkhorn)


def bytes_moved(request: HyperConnectionRequest, tokens: int) -> float:
    """Streams and sublayer rows in the activations' dtype; projection and weights in float32."""
    n, d = request.num_streams, request.hidden_size
    width = DTYPE_BYTES[request.dtype]
    weights = n + n * n
    if request.kind == "post":
        return float(tokens * ((2 * n + 1) * d * width + weights * 4))
    projection = request.num_mixes * (n * d + 1) * 4
    streams = tokens * (n + 1) * d * width
    if request.kind == "head":
        return float(projection + streams)
    lagged = 2 * n if request.is_lagged else 0
    return float(projection + streams + tokens * (weights + lagged) * 4)


FAMILY = OpFamily(
    name="hyper_connection",
    request_type=HyperConnectionRequest,
    summary="Residual streams mixed before and after a sublayer",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    kinds=("pre", "post", "head"),
)
