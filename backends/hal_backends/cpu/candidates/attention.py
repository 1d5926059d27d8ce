"""Attention on the CPU: decode and prefill over the paged cache, without copying the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.attention import AttentionRequest
from hal.ops.formats import torch_dtype
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.limits import gather, limit, scope, vector_unit

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16")
_LANES = 16  # float32 values of the kernels' vectors
_MAX_HEAD_DIM = 512
_LEAF = (
    Leaf(kind="symbol", name="hal_kernels.attention"),
    Leaf(kind="instruction", name="vfmadd"),
)


def _binding(binder: Callable[..., Kernel]) -> Bind:
    """`bind(request, scale=, sinks=)` over a kernel's own keyword arguments."""

    def bind(
        request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        return binder(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads,
            head_dim=request.head_dim,
            block_size=request.block_size,
            dtype=torch_dtype(request.dtype),
            kv_dtype=torch_dtype(request.kv_dtype),
            scale=scale,
            window=request.window,
            softcap=request.softcap,
            sinks=sinks,
        )

    return bind


def _load_decode() -> Bind:
    from hal_kernels.attention.cpu_decode import bind_attention_decode

    return _binding(bind_attention_decode)


def _load_prefill() -> Bind:
    from hal_kernels.attention.cpu_prefill import bind_attention_prefill

    return _binding(bind_attention_prefill)


def _common(device: DeviceSpec, r: AttentionRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _DTYPES),
        scope("kv_dtype", r.kv_dtype, _DTYPES),
        vector_unit(device),
        limit("causal", r.is_causal, "causal attention", is_met=r.is_causal),
        limit(
            "v_head_dim",
            r.v_head_dim,
            f"head_dim ({r.head_dim})",
            is_met=r.v_head_dim == r.head_dim,
        ),
        limit(
            "head_dim",
            r.head_dim,
            f"a multiple of {_LANES}, at most {_MAX_HEAD_DIM}",
            is_met=r.head_dim % _LANES == 0 and r.head_dim <= _MAX_HEAD_DIM,
        ),
        limit(
            "block_size",
            r.block_size,
            f"a multiple of {_LANES}",
            is_met=r.block_size % _LANES == 0,
        ),
    )


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.attention.decode.jit",
            op="attention",
            tier=Tier.NATIVE,
            summary="reads each key and value once for all heads of its group",
            not_supported_reasons=lambda r: gather(
                scope("phase", r.phase, ("decode",)), _common(device, r)
            ),
            load=_load_decode,
            leaf=_LEAF,
            is_graph_safe=True,
        ),
        KernelCandidate(
            name="cpu.attention.prefill.jit",
            op="attention",
            tier=Tier.NATIVE,
            summary="blocks of queries against blocks of keys, softmax on the way",
            not_supported_reasons=lambda r: gather(
                scope("phase", r.phase, ("prefill",)), _common(device, r)
            ),
            load=_load_prefill,
            leaf=_LEAF,
        ),
    )
