"""Compression of a window of tokens into one entry by gated pooling (DeepSeek V4, V4.1).

Entry w = rms_norm(sum_j softmax_j(gate_j + position_bias_j) * kv_j), per channel, over the tokens
of window w. Overlapping: kv and gate have two halves [a | b], and entry w pools the a-halves of
window w-1 with the b-halves of window w.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.checks import positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCompressorRequest(OpRequest):
    """kv, gate [T, W] of the new tokens -> entries [N, head_dim] of the windows that they complete.

    W is head_dim, or 2 * head_dim where overlapping. Windows that are open at the end of a step
    live in a state in float32. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "kv_compressor"

    ratio: int
    head_dim: int
    is_overlapping: bool
    dtype: str

    def __post_init__(self) -> None:
        require("kv_compressor request", *positive(ratio=self.ratio, head_dim=self.head_dim))

    @property
    def width(self) -> int:
        """Columns of kv and of gate."""
        return self.head_dim * (2 if self.is_overlapping else 1)

    @property
    def state_rows(self) -> int:
        """Tokens that the state of a sequence holds: a window, two where they overlap."""
        return self.ratio * (2 if self.is_overlapping else 1)


def reference(
    request: KvCompressorRequest,
    *,
    norm_weight: torch.Tensor,
    eps: float,
    position_bias: torch.Tensor | None = None,
) -> Callable[..., torch.Tensor]:
    raise NotImplementedError


def flops(request: KvCompressorRequest, tokens: int) -> float:
    """Exponential, sum, product and sum per pooled value, and the norm of each entry."""
    entries = tokens / request.ratio
    return entries * request.head_dim * (5.0 * request.state_rows + 4.0)


def bytes_moved(request: KvCompressorRequest, tokens: int) -> float:
    """New rows in, entries out, and the state: written by each token in decode and read back when
    a window closes; a prompt only leaves its last rows in it."""
    row = 2 * request.width
    entries = tokens / request.ratio
    new = tokens * row * DTYPE_BYTES[request.dtype]
    out = entries * request.head_dim * DTYPE_BYTES[request.dtype]
    if request.phase == "decode":
        read = entries * request.state_rows * 2 * request.head_dim * 4
        return new + out + tokens * row * 4 + read
    return new + out + min(tokens, request.state_rows) * row * 4


FAMILY = OpFamily(
    name="kv_compressor",
    request_type=KvCompressorRequest,
    summary="Gated pooling of windows of tokens into compressed entries",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
