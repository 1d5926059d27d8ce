"""torch_mlu_ops, Cambricon's operators: attention in decode, norms.

Signatures as the vendor's serving plug-ins call them (vllm-mlu, dlinfer): the cache has the heads
before the positions, which is this project's layout for one key-value head only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    flag,
    gather,
    limit,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_INSTALL = "Cambricon's wheel, for its SDK"


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    def offer(op: str, name: str, check: Check, load: Any) -> Offer:
        return Offer(
            op=op,
            implementation=name,
            tier=Tier.NATIVE,
            summary=f"torch_mlu_ops.{name}; {NOT_RUN}",
            check=lambda r: gather(
                check(r),
                software(device, "torch-mlu-ops", install=_INSTALL),
            ),
            load=load,
            leaf=(Leaf(kind="symbol", name=name),),
            requires=("torch-mlu-ops",),
        )

    offers = (
        offer("attention", "single_query_cached_kv_attn", _decode, _load_decode),
        offer("norm.rms", "fused_rms_norm", _norm, _load_norm),
    )
    return on_device(offers, op, device)


def _decode(r: AttentionRequest) -> list[Reason]:
    return gather(
        scope("phase", r.phase, ("decode",)),
        scope("dtype", r.dtype, _HALF),
        limit("kv_dtype", r.kv_dtype, f"dtype ({r.dtype})", is_met=r.kv_dtype == r.dtype),
        limit("v_head_dim", r.v_head_dim, "head_dim", is_met=r.v_head_dim == r.head_dim),
        flag("sinks", r.has_sinks, required=False),
        limit("softcap", r.softcap, "0", is_met=r.softcap == 0),
        limit("window", r.window, "0", is_met=r.window == 0),
        limit(
            "cache layout",
            f"positions before {r.num_kv_heads} heads",
            "heads before positions",
            is_met=r.num_kv_heads == 1,
        ),
        one_of("block_size", r.block_size, (16,)),
    )


def _norm(r: RmsNormRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, (*_HALF, "float32")),
        limit("quantize", r.quantize, "none", is_met=r.quantize == "none"),
    )


def _load_decode() -> Bind:
    import torch
    import torch_mlu_ops

    def bind(
        request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        def kernel(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
        ) -> torch.Tensor:
            rows = q.reshape(-1, 1, request.num_heads, request.head_dim)
            out = torch.empty_like(rows)
            torch_mlu_ops.single_query_cached_kv_attn(
                rows,
                k_cache.transpose(1, 2),
                v_cache.transpose(1, 2),
                out,
                meta.block_table,
                meta.seq_lens,
                None,
                None,
                None,
                meta.max_seq_len,
                -1,
                -1,
                scale,
            )
            return out.flatten(1)

        return kernel

    return bind


def _load_norm() -> Bind:
    import torch_mlu_ops

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        def call(x: torch.Tensor, residual: torch.Tensor | None) -> Any:
            return torch_mlu_ops.fused_rms_norm(
                x, residual, weight, None, None, eps, residual is not None, None, None
            )

        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, request.hidden_size)
            y: torch.Tensor = call(rows, None)
            return y.view(x.shape)

        def norm_residual(
            x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            y, total = call(x, residual)
            return y, total

        return norm_residual if request.has_residual else norm

    return bind
