"""Norms of q and k, their rotation and the KV write as one call on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.formats import torch_dtype
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.limits import gather, limit, scope, vector_unit

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16")
_LANES = 16


def _load() -> Bind:
    from hal_kernels.rope_kv_write.cpu import bind_rope_kv_write

    def bind(
        request: RopeKvWriteRequest,
        *,
        cos_sin_cache: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> Kernel:
        return bind_rope_kv_write(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads,
            head_dim=request.head_dim,
            v_head_dim=request.v_head_dim,
            rotary_dim=request.rotary_dim,
            dtype=torch_dtype(request.dtype),
            kv_dtype=torch_dtype(request.kv_dtype),
            cos_sin_cache=cos_sin_cache,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
        )

    return bind


def _multiple(what: str, value: int, of: int) -> list[Reason]:
    return limit(what, value, f"a multiple of {of}", is_met=value % of == 0)


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.rope_kv_write.jit",
            op="rope_kv_write",
            tier=Tier.NATIVE,
            summary="one pass over a token's q, k and v",
            not_supported_reasons=lambda r: gather(
                scope("dtype", r.dtype, _DTYPES),
                scope("kv_dtype", r.kv_dtype, _DTYPES),
                scope("style", r.style, ("half_split",)),
                vector_unit(device),
                _multiple("head_dim", r.head_dim, _LANES),
                _multiple("v_head_dim", r.v_head_dim, _LANES),
                _multiple("rotary_dim", r.rotary_dim, 2 * _LANES),
            ),
            load=_load,
            leaf=(
                Leaf(kind="symbol", name="hal_kernels.rope_kv_write"),
                Leaf(kind="instruction", name="vfmadd"),
            ),
            is_graph_safe=True,
        ),
    )
