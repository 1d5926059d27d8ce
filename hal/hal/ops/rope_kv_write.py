"""What stands between the projection of q, k and v and the attention, as one call.

The norms over each head of q and of k (Qwen3, https://arxiv.org/abs/2505.09388), the rotary
position embedding of both, and the write of k and v into the paged cache, rounded to its dtype: one
pass over the rows in place of three or four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hal.ops import kv_write, norm, rope
from hal.ops.checks import one_of, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest
from hal.ops.rope import RopeRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeKvWriteRequest(OpRequest):
    """q[T, num_heads * head_dim], k and v of num_kv_heads; rotation of the first rotary_dim values
    of each head, in pairs of `style`; caches as of `KvWriteRequest`.

    has_qk_norm: q and k are normed over each head first. has_kv_scales: caches of FP8 have a scale
    of the keys and one of the values. Raises RequestError if the rotated values are not all inside
    a head, or for scales of other caches.
    """

    op: ClassVar[str] = "rope_kv_write"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    block_size: int
    dtype: str
    kv_dtype: str
    has_qk_norm: bool = False
    style: Literal["half_split", "interleaved"] = "half_split"
    has_kv_scales: bool = False

    def __post_init__(self) -> None:
        require(
            "rope_kv_write request",
            (
                f"0 < rotary_dim <= head_dim {self.head_dim}",
                self.rotary_dim,
                0 < self.rotary_dim <= self.head_dim,
            ),
            one_of("style", self.style, ("half_split", "interleaved")),
        )
        self.kv_write()  # what is wrong with the caches is said there

    def norm(self, heads: int) -> RmsNormRequest:
        """The norm of q or of k as a request of its own."""
        return RmsNormRequest(
            hidden_size=self.head_dim, dtype=self.dtype, rows_per_token=heads, tokens=self.tokens
        )

    def rope(self) -> RopeRequest:
        """The rotation as a request of its own."""
        return RopeRequest(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            style=self.style,
            dtype=self.dtype,
            tokens=self.tokens,
        )

    def kv_write(self) -> KvWriteRequest:
        """The write as a request of its own."""
        return KvWriteRequest(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            has_scales=self.has_kv_scales,
            tokens=self.tokens,
        )


def reference(
    request: RopeKvWriteRequest,
    *,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Callable[..., torch.Tensor]:
    """kernel(q, k, v, positions, k_cache, v_cache, slot_mapping) -> q, by the references of the
    parts, each rounding to the activations' dtype. q and k may be overwritten; the q that is
    returned may be the one given.

    q_weight, k_weight: [head_dim], with has_qk_norm. k_scale, v_scale: with has_kv_scales. Raises
    ValueError without the weights, and for scales that the request does not have.
    """
    rotate = rope.reference(request.rope(), cos_sin_cache=cos_sin_cache)
    write = kv_write.reference(request.kv_write(), k_scale=k_scale, v_scale=v_scale)
    norms: list[Callable[..., Any]] = []
    if request.has_qk_norm:
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is None:
                raise ValueError(f"rope_kv_write: required {name} with has_qk_norm, found None")
            norms.append(norm.reference(request.norm(1), weight=weight, eps=eps))

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        if norms:
            dim = request.head_dim
            q = norms[0](q.reshape(-1, dim)).reshape(q.shape)
            k = norms[1](k.reshape(-1, dim)).reshape(k.shape)
        rotate(q, k, positions)
        write(k, v, k_cache, v_cache, slot_mapping)
        return q

    return kernel


def flops(request: RopeKvWriteRequest, tokens: int) -> float:
    heads = (request.num_heads, request.num_kv_heads)
    norms = sum(norm.flops(request.norm(h), tokens) for h in heads) if request.has_qk_norm else 0.0
    return norms + rope.flops(request.rope(), tokens)


def bytes_moved(request: RopeKvWriteRequest, tokens: int) -> float:
    """q read and written, k and v read and their rows of the cache written, the table's rows."""
    q = 2 * request.num_heads * request.head_dim * DTYPE_BYTES[request.dtype]
    weights = 2 * request.head_dim * DTYPE_BYTES[request.dtype] if request.has_qk_norm else 0
    table = request.rotary_dim * 4 + 8  # with the positions
    return float(tokens * (q + table) + weights) + kv_write.bytes_moved(request.kv_write(), tokens)


FAMILY = OpFamily(
    name="rope_kv_write",
    request_type=RopeKvWriteRequest,
    summary="Norms of q and k, rotary position embedding and KV write as one call",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors=ROUNDING_ERRORS,
)
