"""Attention of a decode step and the output projection behind it, as one call.

y = attention(q, keys, values) @ weight.T (+ residual): what a decoder layer does between writing
its keys and its next norm. One call saves the attention's result its way through memory and the
launches between. Same meaning as the ops `attention` and `gemm` one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.errors import RequestError
from hal.ops import attention, gemm
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.formats import DTYPE_BYTES, FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.request import FLOAT_TOLERANCES, LARGEST_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProjectionRequest(OpRequest):
    """The arguments of `AttentionRequest` with a dense weight [hidden_size, num_heads * v_head_dim]
    of the same dtype. has_residual: a tensor [T, hidden_size] is added to the result.

    Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "attention_projection"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    hidden_size: int
    block_size: int
    dtype: str
    kv_dtype: str
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_residual: bool = False
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise RequestError(
                "attention_projection request",
                "hidden_size >= 1",
                str(self.hidden_size),
                "correct the request",
            )
        _ = self.attention  # checks the rest

    @property
    def attention(self) -> AttentionRequest:
        """The attention alone."""
        return AttentionRequest(
            phase=self.phase,
            tokens=self.tokens,
            graph_mode=self.graph_mode,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
            context_tokens=self.context_tokens,
        )

    @property
    def projection(self) -> GemmRequest:
        """The product alone, without the residual."""
        return GemmRequest(
            tokens=self.tokens,
            graph_mode=self.graph_mode,
            n=self.hidden_size,
            k=self.num_heads * self.v_head_dim,
            dtype=self.dtype,
            weight_format=FORMATS[self.dtype],
        )


def reference(
    request: AttentionProjectionRequest,
    *,
    scale: float,
    weight: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> Callable[..., torch.Tensor]:
    """Golden: the two golden ops one after the other, the residual added before the last rounding.

    kernel(q[T, H*D], k_cache, v_cache, meta, residual[T, hidden]) -> y[T, hidden]. Raises
    ValueError for a weight of another shape, and for a residual or sinks that the request does not
    name, or the reverse.
    """
    import torch

    shape = (request.hidden_size, request.num_heads * request.v_head_dim)
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"attention_projection: required a weight {list(shape)}, found {list(weight.shape)}"
        )
    attend = attention.reference(request.attention, scale=scale, sinks=sinks)

    def kernel(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_residual(request, residual)
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        y = attend(q, k_cache, v_cache, meta).to(exact) @ weight.to(exact).T
        return (y if residual is None else y + residual.to(exact)).to(q.dtype)

    return kernel


def check_residual(request: AttentionProjectionRequest, residual: torch.Tensor | None) -> None:
    """Raises ValueError for a residual that the request does not name, or the reverse."""
    if (residual is not None) != request.has_residual:
        raise ValueError(
            f"attention_projection: required a residual as has_residual={request.has_residual} "
            f"says, found {'none' if residual is None else list(residual.shape)}"
        )


def flops(request: AttentionProjectionRequest, tokens: int) -> float:
    return attention.flops(request.attention, tokens) + gemm.flops(request.projection, tokens)


def bytes_moved(request: AttentionProjectionRequest, tokens: int) -> float:
    """Of both, without the attention's result, which is neither written nor read."""
    width = DTYPE_BYTES[request.dtype]
    between = 2.0 * tokens * request.num_heads * request.v_head_dim * width
    residual = tokens * request.hidden_size * width if request.has_residual else 0
    parts = attention.bytes_moved(request.attention, tokens) + gemm.bytes_moved(
        request.projection, tokens
    )
    return parts - between + residual


# The weight is counted where it is used as a product of its own: a model that calls this op in a
# decode calls the product in a prefill, and both hold the same tensor.
FAMILY = OpFamily(
    name="attention_projection",
    request_type=AttentionProjectionRequest,
    summary="Attention over a paged KV cache and the output projection, in one call",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    # The attention rounds its result, and what follows does so again.
    largest_errors={**LARGEST_ERRORS, "bfloat16": 2.0**-6, "float16": 2.0**-9},
    is_weighted=True,
)
