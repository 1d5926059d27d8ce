"""Gated activations: act(gate) * up (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivationRequest(OpRequest):
    """y[R, F] = act(x[:, :F]) * x[:, F:]. clamp: the gate is capped at +c and the other half
    limited to ±c before (0 is none). rows_per_token: R = T * rows_per_token (experts per token)."""

    op: ClassVar[str] = "activation.gated"

    width: int
    dtype: str
    activation: Literal["silu", "gelu_tanh"] = "silu"
    clamp: float = 0.0
    rows_per_token: int = 1


def reference(request: GatedActivationRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    """Golden activation in float32 (float64 if x is)."""
    import torch
    import torch.nn.functional as functional

    def kernel(x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        gate, up = x.to(dtype).chunk(2, dim=-1)
        if request.clamp:
            gate, up = gate.clamp(max=request.clamp), up.clamp(-request.clamp, request.clamp)
        if request.activation == "silu":
            return (functional.silu(gate) * up).to(x.dtype)
        return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)

    return kernel


def flops(request: GatedActivationRequest, tokens: int) -> float:
    return 5.0 * tokens * request.rows_per_token * request.width


def bytes_moved(request: GatedActivationRequest, tokens: int) -> float:
    values = tokens * request.rows_per_token * request.width
    return float(3 * values * DTYPE_BYTES[request.dtype])


FAMILY = OpFamily(
    name="activation.gated",
    request_type=GatedActivationRequest,
    summary="Gated activation",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors=ROUNDING_ERRORS,
)
