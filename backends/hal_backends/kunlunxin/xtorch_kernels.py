"""xtorch_ops, Kunlunxin's operators: norm with residual, gated activation, choice of experts.

Signatures as vLLM-Kunlun and vllm-plugin-FL call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import flag, gather, limit, one_of, scope, software
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_INSTALL = "Kunlunxin's wheel, for its SDK"


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    def offer(op: str, name: str, check: Check, load: Any) -> Offer:
        return Offer(
            op=op,
            implementation=name,
            tier=Tier.NATIVE,
            summary=f"xtorch_ops.{name}; {NOT_RUN}",
            check=lambda r: gather(check(r), software(device, "xtorch-ops", install=_INSTALL)),
            load=load,
            leaf=(Leaf(kind="symbol", name=name),),
            requires=("xtorch-ops",),
        )

    offers = (
        offer("norm.rms", "add_rmsnorm", _norm, _load_norm),
        offer("activation.gated", "swiglu", _activation, _load_activation),
        offer("moe_router", "moe_softmax_topk", _router, _load_router),
    )
    return on_device(offers, op, device)


def _norm(r: RmsNormRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _HALF),
        flag("residual", r.has_residual, required=True),
        limit("quantize", r.quantize, "none", is_met=r.quantize == "none"),
    )


def _activation(r: GatedActivationRequest) -> list[Reason]:
    return gather(
        scope("activation", r.activation, ("silu",)),
        scope("dtype", r.dtype, _HALF),
        limit("clamp", r.clamp, "0", is_met=r.clamp == 0),
    )


def _router(r: MoeRouterRequest) -> list[Reason]:
    return gather(
        scope("scoring", r.scoring, ("softmax",)),
        scope("dtype", r.dtype, ("float32",)),
        flag("bias", r.has_bias, required=False),
        one_of("num_groups", r.num_groups, (1,)),
    )


def _load_norm() -> Bind:
    import torch
    import xtorch_ops

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        def norm_residual(
            x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out, total = torch.empty_like(x), torch.empty_like(x)
            xtorch_ops.add_rmsnorm(
                x, residual, residual_output=total, weight=weight, eps=eps, output=out
            )
            return out, total

        return norm_residual

    return bind


def _load_activation() -> Bind:
    import xtorch_ops

    def bind(request: GatedActivationRequest) -> Kernel:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty((*x.shape[:-1], request.width))
            xtorch_ops.swiglu(x, out)
            return out

        return kernel

    return bind


def _load_router() -> Bind:
    import torch
    import xtorch_ops

    def bind(request: MoeRouterRequest) -> Kernel:
        normalized, plain = xtorch_ops.moe_softmax_topk_norm, xtorch_ops.moe_softmax_topk
        choose = normalized if request.normalizes else plain

        def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (logits.shape[0], request.top_k)
            weights = logits.new_empty(shape, dtype=torch.float32)
            ids = logits.new_empty(shape, dtype=torch.int32)
            choose(logits, weights, ids, None)
            return weights * request.route_scale, ids

        return kernel

    return bind
