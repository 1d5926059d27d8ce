"""Multi-head latent attention in absorbed form over paged latent rows, dense or by index lists.

Of https://arxiv.org/abs/2405.04434: each token caches one row [kv_lora_rank | rope_dim] that all
heads share; with W_UK folded into the query and W_UV into the output, a head is a dot product with
the row and a weighted sum of its latent part. The lists are DeepSeek sparse attention's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import entries_read, one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

MlaKvFormat = Literal["bf16", "fp8_656"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttentionRequest(OpRequest):
    """q[T, H * (kv_lora_rank + rope_dim)] over latent rows -> out[T, H * kv_lora_rank].

    top_k: 0 attends to all keys; otherwise each query has a list of so many positions of its own
    sequence, padded with -1. context_tokens: the context length that estimates assume. Raises
    RequestError if inconsistent.
    """

    op: ClassVar[str] = "mla_attention"

    num_heads: int
    kv_lora_rank: int
    rope_dim: int  # 0: no rotary part
    block_size: int
    dtype: str
    kv_format: MlaKvFormat
    top_k: int = 0
    is_causal: bool = True
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        require(
            "mla_attention request",
            one_of("kv_format", self.kv_format, ("bf16", "fp8_656")),
            *positive(
                num_heads=self.num_heads,
                kv_lora_rank=self.kv_lora_rank,
                block_size=self.block_size,
            ),
            (
                "rope_dim >= 0 and top_k >= 0",
                (self.rope_dim, self.top_k),
                min(self.rope_dim, self.top_k) >= 0,
            ),
            (
                "kv_lora_rank 512 and rope_dim 64 for fp8_656",
                (self.kv_lora_rank, self.rope_dim),
                self.kv_format == "bf16" or (self.kv_lora_rank, self.rope_dim) == (512, 64),
            ),
        )

    @property
    def row_dim(self) -> int:
        """Values of a latent row, and of a query head."""
        return self.kv_lora_rank + self.rope_dim


def reference(request: MlaAttentionRequest, *, scale: float) -> Callable[..., torch.Tensor]:
    raise NotImplementedError


def _pairs(request: MlaAttentionRequest, tokens: int) -> float:
    if request.phase != "decode" and not request.is_causal:
        return float(tokens * (min(tokens, request.top_k) if request.top_k else tokens))
    return entries_read(request.phase, tokens, request.context_tokens, most=request.top_k)


def flops(request: MlaAttentionRequest, tokens: int) -> float:
    per_pair = 2.0 * request.num_heads * (request.row_dim + request.kv_lora_rank)
    return per_pair * _pairs(request, tokens)


def bytes_moved(request: MlaAttentionRequest, tokens: int) -> float:
    """Decode reads the rows of each query; a prompt's rows are read once for all its queries."""
    row = KV_FORMATS[request.kv_format].row_bytes(request.row_dim)
    rows = _pairs(request, tokens) if request.phase == "decode" else float(tokens)
    heads = tokens * request.num_heads * (request.row_dim + request.kv_lora_rank)
    lists = tokens * request.top_k * 4
    return rows * row + heads * DTYPE_BYTES[request.dtype] + lists


FAMILY = OpFamily(
    name="mla_attention",
    request_type=MlaAttentionRequest,
    summary="Latent attention (MLA, absorbed) over paged rows, dense or by index lists",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
