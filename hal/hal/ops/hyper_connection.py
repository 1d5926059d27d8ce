"""Hyper-connections: several residual streams, mixed around each sublayer.

Manifold-constrained (https://arxiv.org/abs/2512.24880): the mixing matrix between the streams is
made doubly stochastic by Sinkhorn's iteration. Lagged (DeepSeek-V4.1): a sublayer's input is
collapsed with the weights that the sublayer before computed.
"""

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


def reference(
    request: HyperConnectionRequest,
    *,
    projection: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    eps: float = 0.0,
) -> Callable[..., Any]:
    """Golden mixing in float32 (float64 for float64 streams), rows of weights [pre | post | comb].

    projection: [num_mixes, N * D]; base: [num_mixes]; scale: [3] for pre, post and comb ([1] for
    the head). norm_eps: of the norm of the flattened streams; eps: added to pre and in Sinkhorn's
    divisions. Kernels: pre(streams), lagged pre(streams, previous_pre or None: the first sublayer
    takes stream 0); post(y, streams, post, comb); head(streams), lagged head(streams,
    previous_pre), which needs no projection. Raises ValueError if a tensor is missing.
    """
    if request.kind == "post":
        return _expand
    if request.kind == "head" and request.is_lagged:
        return _collapse
    if projection is None or base is None or scale is None:
        raise ValueError("hyper_connection: required projection, base and scale, found None")
    mixes = _mixing(request, projection, base, scale, norm_eps)

    def head(streams: torch.Tensor) -> torch.Tensor:
        return _collapse(streams, mixes(streams)[0].sigmoid() + eps)

    def pre(streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, post, comb = _weights(request, mixes(streams), eps)
        return _collapse(streams, weights), post, comb

    def lagged_pre(
        streams: torch.Tensor, previous_pre: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, post, comb = _weights(request, mixes(streams), eps)
        x = streams[:, 0] if previous_pre is None else _collapse(streams, previous_pre)
        return x, post, comb, weights

    if request.kind == "head":
        return head
    return lagged_pre if request.is_lagged else pre


def _mixing(
    request: HyperConnectionRequest,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """streams -> scaled and shifted weights of each kind, before their non-linearities."""
    import torch

    n = request.num_streams
    sizes = [n] if request.kind == "head" else [n, n, n * n]

    def mixes(streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dtype = accumulation_dtype(streams)
        flat = streams.to(dtype).flatten(1)
        flat = flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + norm_eps)
        parts = torch.split(flat @ projection.to(dtype).T, sizes, dim=1)
        shifts = torch.split(base.to(dtype), sizes)
        return tuple(p * s + b for p, s, b in zip(parts, scale.to(dtype), shifts, strict=True))

    return mixes


def _weights(
    request: HyperConnectionRequest, mixes: tuple[torch.Tensor, ...], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [T, N], post [T, N], and comb [T, N, N] after Sinkhorn, columns first."""
    import torch

    pre, post, comb = mixes
    n = request.num_streams
    comb = torch.unflatten(comb, 1, (n, n)).softmax(dim=2) + eps
    comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    for _ in range(request.sinkhorn_iterations - 1):
        comb = comb / (comb.sum(dim=2, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2.0 * post.sigmoid(), comb


def _collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_h pre[t, h] * streams[t, h]."""
    dtype = accumulation_dtype(streams)
    return (pre.to(dtype)[:, :, None] * streams.to(dtype)).sum(dim=1).to(streams.dtype)


def _expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """post[t, h] * y[t] + sum_j comb[t, j, h] * streams[t, j]."""
    import torch

    dtype = accumulation_dtype(streams)
    mixed = torch.einsum("tjh,tjd->thd", comb.to(dtype), streams.to(dtype))
    return (post.to(dtype)[:, :, None] * y.to(dtype)[:, None, :] + mixed).to(streams.dtype)


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
    largest_errors={**ROUNDING_ERRORS, "float32": 2.0**-20},
    kinds=("pre", "post", "head"),
)
