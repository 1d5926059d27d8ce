"""Layer norm (https://arxiv.org/abs/1607.06450), which DeepSeek's indexer uses on its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.checks import positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormRequest(OpRequest):
    """y = (x - mean) / sqrt(variance + eps) * weight (+ bias) over the last `hidden_size` values.

    Raises RequestError if hidden_size is not positive.
    """

    op: ClassVar[str] = "layer_norm"

    hidden_size: int
    has_bias: bool
    dtype: str

    def __post_init__(self) -> None:
        require("layer_norm request", *positive(hidden_size=self.hidden_size))


def reference(
    request: LayerNormRequest,
    *,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Golden norm in float32 (float64 if x is). Raises ValueError if the bias is not what the
    request says."""
    import torch

    if (bias is not None) != request.has_bias:
        raise ValueError(
            f"layer_norm: required a bias as has_bias={request.has_bias} says, "
            f"found {'none' if bias is None else list(bias.shape)}"
        )

    def kernel(x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = torch.unflatten(x.to(dtype), -1, (-1, request.hidden_size))
        centred = rows - rows.mean(dim=-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
        y = y * weight.to(dtype)
        if bias is not None:
            y = y + bias.to(dtype)
        return y.flatten(-2).to(x.dtype)

    return kernel


def flops(request: LayerNormRequest, tokens: int) -> float:
    return (7.0 + request.has_bias) * tokens * request.hidden_size


def bytes_moved(request: LayerNormRequest, tokens: int) -> float:
    rows = 2 * tokens + (2 if request.has_bias else 1)
    return float(rows * request.hidden_size * DTYPE_BYTES[request.dtype])


FAMILY = OpFamily(
    name="layer_norm",
    request_type=LayerNormRequest,
    summary="Layer norm, with or without bias",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors={**ROUNDING_ERRORS, "float32": 2.0**-23},
)
