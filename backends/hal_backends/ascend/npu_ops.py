"""torch_npu's products, norms, activations, rotation, routing and sampling.

Signatures and limits after torch_npu 2.14.0 (its own operator documentation), for A2 and A3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, SemanticNote
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.formats import QuantizedWeight, torch_dtype
from hal.ops.gemm import GemmRequest, GroupedGemmRequest, apply_epilogue
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.quantize import QuantizeRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    architecture,
    at_most,
    flag,
    gather,
    limit,
    multiple,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device
from hal_backends.gpu.semantics import ROUNDED_WEIGHTS
from hal_backends.gpu.torch_gemm_loaders import finished

if TYPE_CHECKING:
    import torch

_ARCHS = ("ascend-910b", "ascend-910c")
_HALF = ("bfloat16", "float16")
_INNER_LIMIT = 65536  # largest last dimension of a product's operands
_MAX_EXPERTS = 2048


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    def offer(name: str, op: str, check: Check, load: Any, notes: Any = None) -> Offer:
        return Offer(
            op=op,
            implementation=name,
            tier=Tier.NATIVE,
            summary=f"torch_npu.{name}; {NOT_RUN}",
            check=lambda r: gather(
                check(r),
                architecture(device, _ARCHS, why="A2 and A3 of torch_npu's documentation"),
                software(device, "torch-npu", ">=2.5"),
            ),
            load=load,
            leaf=(Leaf(kind="symbol", name=name),),
            notes=notes,
            requires=("torch-npu",),
            is_graph_safe="graph_capture" in device.features,
        )

    offers = (
        offer("npu_quant_matmul", "gemm", _quant_matmul, _load_quant_matmul),
        offer("npu_weight_quant_batchmatmul", "gemm", _weight_quant, _load_weight_quant),
        offer("npu_grouped_matmul", "grouped_gemm", _grouped, _load_grouped, _grouped_notes),
        offer("npu_rms_norm", "norm.rms", _norm, _load_norm),
        offer("npu_swiglu", "activation.gated", _swiglu, _load_swiglu),
        offer("npu_moe_gating_top_k", "moe_router", _router, _load_router),
        offer("npu_dynamic_quant", "quantize", _dynamic_quant, _load_dynamic_quant),
    )
    return on_device(offers, op, device)


def _quant_matmul(r: GemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, ("int8_channel_a8",)),
        scope("dtype", r.dtype, _HALF),
        at_most("K", r.k, _INNER_LIMIT),
        at_most("N", r.n, _INNER_LIMIT),
        multiple("K", r.k, 16),
        multiple("N", r.n, 32),
    )


def _weight_quant(r: GemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, ("int8_channel",)),
        scope("dtype", r.dtype, _HALF),
        at_most("K", r.k, _INNER_LIMIT - 1),
        at_most("N", r.n, _INNER_LIMIT - 1),
    )


def _grouped(r: GroupedGemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, (*_HALF, "int8_channel_a8")),
        scope("dtype", r.dtype, _HALF),
        at_most("K", r.k, _INNER_LIMIT - 1),
        at_most("N", r.n, _INNER_LIMIT - 1),
    )


def _grouped_notes(r: GroupedGemmRequest) -> Sequence[SemanticNote]:
    """The operator takes the weights' scales in bfloat16."""
    return () if r.weight_format.is_dense else (ROUNDED_WEIGHTS,)


def _norm(r: RmsNormRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, (*_HALF, "float32")),
        limit("quantize", r.quantize, "none", is_met=r.quantize == "none"),
    )


def _swiglu(r: GatedActivationRequest) -> list[Reason]:
    return gather(
        scope("activation", r.activation, ("silu",)),
        scope("dtype", r.dtype, (*_HALF, "float32")),
        limit("clamp", r.clamp, "0", is_met=r.clamp == 0),
    )


def _router(r: MoeRouterRequest) -> list[Reason]:
    in_group = r.num_experts // max(r.num_groups, 1)
    return gather(
        scope("scoring", r.scoring, ("sigmoid",)),
        scope("dtype", r.dtype, ("float32", *_HALF)),
        flag("normalised weights", r.normalizes, required=True),
        at_most("num_experts", r.num_experts, _MAX_EXPERTS),
        limit("experts of a group", in_group, "more than 2", is_met=in_group > 2),
    )


def _dynamic_quant(r: QuantizeRequest) -> list[Reason]:
    return gather(
        scope("out_dtype", r.out_dtype, ("int8",)),
        scope("dtype", r.dtype, _HALF),
        one_of("group_size", r.group_size, (0,)),
        one_of("scale_dtype", r.scale_dtype, ("float32",)),
    )


def _load_quant_matmul() -> Bind:
    import torch_npu

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns, scale = weight.data.t().contiguous(), weight.scale.float().view(-1)

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, row_scale = torch_npu.npu_dynamic_quant(x)
            y: torch.Tensor = torch_npu.npu_quant_matmul(
                rows, columns, scale, pertoken_scale=row_scale, output_dtype=x.dtype
            )
            return y

        return finished(request, product, bias)

    return bind


def _load_weight_quant() -> Bind:
    import torch_npu

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns = weight.data.t().contiguous()
        scale = weight.scale.to(torch_dtype(request.dtype)).view(-1)

        def product(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch_npu.npu_weight_quant_batchmatmul(x, columns, scale)
            return y

        return finished(request, product, bias)

    return bind


def _load_grouped() -> Bind:
    import torch
    import torch_npu

    def bind(
        request: GroupedGemmRequest, *, weight: torch.Tensor | Sequence[QuantizedWeight]
    ) -> Kernel:
        scales: list[torch.Tensor] | None = None
        if isinstance(weight, torch.Tensor):
            columns = weight.transpose(1, 2).contiguous()
        else:
            columns = torch.stack([w.data.t() for w in weight]).contiguous()
            scales = [torch.stack([w.scale.view(-1) for w in weight]).to(torch.bfloat16)]

        def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
            rows, row_scale = (x, None) if scales is None else torch_npu.npu_dynamic_quant(x)
            y: torch.Tensor = torch_npu.npu_grouped_matmul(
                [rows],
                [columns],
                scale=scales,
                per_token_scale=None if row_scale is None else [row_scale],
                group_list=expert_offsets[1:],
                split_item=2,
                group_type=0,
                group_list_type=0,
                output_dtype=x.dtype,
            )[0]
            return apply_epilogue(request.epilogue, y, request.clamp)

        return kernel

    return bind


def _load_norm() -> Bind:
    import torch_npu

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, request.hidden_size)
            y: torch.Tensor = torch_npu.npu_rms_norm(rows, weight, eps)[0]
            return y.view(x.shape)

        def norm_residual(
            x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            y, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
            return y, total

        return norm_residual if request.has_residual else norm

    return bind


def _load_swiglu() -> Bind:
    import torch_npu

    def bind(request: GatedActivationRequest) -> Kernel:
        kernel: Kernel = torch_npu.npu_swiglu
        return kernel

    return bind


def _load_router() -> Bind:
    import torch_npu

    def bind(request: MoeRouterRequest, *, bias: torch.Tensor | None = None) -> Kernel:
        def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids, _ = torch_npu.npu_moe_gating_top_k(
                logits,
                request.top_k,
                bias=None if bias is None else bias.to(logits.dtype),
                k_group=request.num_groups_picked,
                group_count=request.num_groups,
                group_select_mode=1,
                renorm=0,
                norm_type=1,
                routed_scaling_factor=request.route_scale,
            )
            return weights.float(), ids

        return kernel

    return bind


def _load_dynamic_quant() -> Bind:
    import torch_npu

    def bind(request: QuantizeRequest) -> Kernel:
        def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, scale = torch_npu.npu_dynamic_quant(x)
            return values, scale.unsqueeze(-1)

        return kernel

    return bind
