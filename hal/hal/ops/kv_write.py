"""KV write: the new keys and values of a step into their slots of the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWriteRequest(OpRequest):
    """k, v [T, num_kv_heads * head_dim] into [num_blocks, block_size, num_kv_heads, head_dim]."""

    op: ClassVar[str] = "kv_write"

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str


def reference(request: KvWriteRequest) -> Callable[..., None]:
    """Golden write. slot = block * block_size + offset; no slot appears twice in one call."""

    def kernel(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        k_rows = k_cache.view(-1, request.num_kv_heads, request.head_dim)
        v_rows = v_cache.view(-1, request.num_kv_heads, request.v_head_dim)
        k_rows[slot_mapping] = k.reshape(-1, *k_rows.shape[1:]).to(k_cache.dtype)
        v_rows[slot_mapping] = v.reshape(-1, *v_rows.shape[1:]).to(v_cache.dtype)

    return kernel


def flops(request: KvWriteRequest, tokens: int) -> float:
    return 0.0


def bytes_moved(request: KvWriteRequest, tokens: int) -> float:
    values = tokens * request.num_kv_heads * (request.head_dim + request.v_head_dim)
    slots = tokens * 8
    return float(slots + values * (DTYPE_BYTES[request.dtype] + DTYPE_BYTES[request.kv_dtype]))


FAMILY = OpFamily(
    name="kv_write",
    request_type=KvWriteRequest,
    summary="Write of new keys and values into the paged cache",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
