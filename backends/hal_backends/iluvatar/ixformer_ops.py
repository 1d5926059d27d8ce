"""ixformer, Iluvatar's operators: gated activation, choice of experts.

Signatures as the vendor's vLLM calls them (ixformer.inference.functions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import flag, gather, limit, one_of, scope, software
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_INSTALL = "Iluvatar's wheel, for its SDK"


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    def offer(op: str, name: str, check: Check, load: Any) -> Offer:
        return Offer(
            op=op,
            implementation=name,
            tier=Tier.NATIVE,
            summary=f"ixformer.inference.functions.{name}; {NOT_RUN}",
            check=lambda r: gather(check(r), software(device, "ixformer", install=_INSTALL)),
            load=load,
            leaf=(Leaf(kind="symbol", name=name),),
            requires=("ixformer",),
        )

    offers = (
        offer("activation.gated", "silu_and_mul", _activation, _load_activation),
        offer("moe_router", "moe_topk_softmax", _router, _load_router),
    )
    return on_device(offers, op, device)


def _activation(r: GatedActivationRequest) -> list[Reason]:
    return gather(
        scope("activation", r.activation, ("silu",)),
        scope("dtype", r.dtype, _HALF),
        limit("clamp", r.clamp, "0", is_met=r.clamp == 0),
    )


def _router(r: MoeRouterRequest) -> list[Reason]:
    return gather(
        scope("scoring", r.scoring, ("softmax",)),
        scope("dtype", r.dtype, ("float32", *_HALF)),
        flag("bias", r.has_bias, required=False),
        one_of("num_groups", r.num_groups, (1,)),
    )


def _load_activation() -> Bind:
    import ixformer.inference.functions as ixformer

    def bind(request: GatedActivationRequest) -> Kernel:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty((*x.shape[:-1], request.width))
            ixformer.silu_and_mul(x, out)
            return out

        return kernel

    return bind


def _load_router() -> Bind:
    import ixformer.inference.functions as ixformer
    import torch

    def bind(request: MoeRouterRequest) -> Kernel:
        def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (logits.shape[0], request.top_k)
            weights = logits.new_empty(shape, dtype=torch.float32)
            ids = logits.new_empty(shape, dtype=torch.int32)
            scores = logits.float().contiguous()
            ixformer.moe_topk_softmax(scores, request.top_k, weights, ids, request.normalizes)
            return weights * request.route_scale, ids

        return kernel

    return bind
