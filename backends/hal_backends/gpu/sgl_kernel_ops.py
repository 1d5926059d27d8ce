"""SGLang's kernel library on NVIDIA: CUTLASS products, Marlin's 4-bit weights, choice of experts.

Limits after github.com/sgl-project/sglang, sgl-kernel/python/sgl_kernel and csrc/gemm: the int8
product is compiled for sm_80 to sm_90, FP8 from sm_89; Marlin multiplies in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, SemanticNote, Work
from hal.device import DeviceSpec
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.ops.moe_router import MoeRouterRequest
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
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device, work_of
from hal_backends.gpu.semantics import ROUNDED_WEIGHTS
from hal_backends.gpu.torch_gemm_loaders import finished

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_REQUIREMENT = "sgl-kernel>=0.3.9"
_INT8_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")
_FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_MARLIN_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_GROUP_EXPERTS = 32  # experts of a group that one warp looks at


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device(_offers(device), op, device)


def _offers(device: DeviceSpec) -> tuple[Offer, ...]:
    def offer(
        op: str, name: str, archs: Sequence[str], summary: str, check: Check, load: Any, **more: Any
    ) -> Offer:
        return Offer(
            op=op,
            implementation=f"sgl_{name}",
            tier=Tier.NATIVE,
            summary=f"sgl-kernel: {summary}; {NOT_RUN}",
            check=lambda r: gather(
                check(r),
                architecture(device, archs, why="sgl-kernel is compiled for them"),
                software(device, "sgl-kernel", ">=0.3.9"),
            ),
            load=load,
            leaf=(Leaf(kind="kernel", name=name),),
            requires=(_REQUIREMENT,),
            **more,
        )

    return (
        offer(
            "gemm",
            "int8_scaled_mm",
            _INT8_ARCHS,
            "CUTLASS int8 with scales in the epilogue",
            lambda r: _product(r, "int8_channel_a8"),
            _load_int8,
        ),
        offer(
            "gemm",
            "fp8_scaled_mm",
            _FP8_ARCHS,
            "CUTLASS FP8 with a scale per row and channel",
            lambda r: _product(r, "fp8_channel_a8"),
            _load_fp8,
        ),
        offer(
            "gemm",
            "marlin",
            _MARLIN_ARCHS,
            "Marlin: 4-bit weights widened in registers to 16 bits",
            _marlin,
            _load_marlin,
            notes=_marlin_notes,
            work=_marlin_work,
        ),
        offer(
            "moe_router",
            "moe_fused_gate",
            _MARLIN_ARCHS,
            "sigmoid scores, bias, groups and top-k in one launch",
            _grouped_router,
            _load_grouped_router,
        ),
        offer(
            "moe_router",
            "topk_softmax",
            _MARLIN_ARCHS,
            "softmax and top-k in one launch",
            _softmax_router,
            _load_softmax_router,
        ),
    )


def _product(r: GemmRequest, weight_format: str) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, (weight_format,)),
        scope("dtype", r.dtype, _HALF),
        multiple("K", r.k, 16),
        multiple("N", r.n, 8),
    )


def _marlin(r: GemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, ("int4_g32",)),
        scope("dtype", r.dtype, _HALF),
        multiple("K", r.k, 128),
        multiple("N", r.n, 64),
    )


def _marlin_notes(r: GemmRequest) -> Sequence[SemanticNote]:
    """Scales are stored in float16; in bfloat16 they are rounded."""
    return (ROUNDED_WEIGHTS,) if r.dtype == "bfloat16" else ()


def _marlin_work(r: GemmRequest, tokens: int) -> Work:
    return work_of(r, tokens, unit=r.dtype)


def _grouped_router(r: MoeRouterRequest) -> list[Reason]:
    in_group = r.num_experts // max(r.num_groups, 1)
    return gather(
        scope("scoring", r.scoring, ("sigmoid",)),
        scope("dtype", r.dtype, ("float32", *_HALF)),
        flag("bias", r.has_bias, required=True),
        flag("normalised weights", r.normalizes, required=True),
        limit(
            "num_experts",
            r.num_experts,
            "a power of two",
            is_met=r.num_experts & (r.num_experts - 1) == 0,
        ),
        at_most("experts of a group", in_group, _GROUP_EXPERTS),
    )


def _softmax_router(r: MoeRouterRequest) -> list[Reason]:
    return gather(
        scope("scoring", r.scoring, ("softmax",)),
        scope("dtype", r.dtype, ("float32", *_HALF)),
        flag("bias", r.has_bias, required=False),
        one_of("num_groups", r.num_groups, (1,)),
    )


def _load_int8() -> Bind:
    from sgl_kernel import int8_scaled_mm

    from hal.ops.gemm import quantize_rows

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns, scale = weight.data.t(), weight.scale.float().view(-1, 1)

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, row_scale = quantize_rows(x.float())
            y: torch.Tensor = int8_scaled_mm(rows, columns, row_scale, scale, x.dtype, bias)
            return y

        return finished(request, product, None)

    return bind


def _load_fp8() -> Bind:
    from sgl_kernel import fp8_scaled_mm

    from hal.ops.low_precision import quantize_groups

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns, scale = weight.data.t(), weight.scale.float().view(-1, 1)

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, row_scale = quantize_groups(
                x, group_size=0, element="fp8_e4m3fn", scale_kind="float32"
            )
            y: torch.Tensor = fp8_scaled_mm(rows, columns, row_scale, scale, x.dtype, bias)
            return y

        return finished(request, product, None)

    return bind


def gptq_packed(weight: QuantizedWeight) -> torch.Tensor:
    """4-bit values as int32 [K / 8, N]: eight neighbours along K in one word, lowest first."""
    import torch

    from hal.ops.low_precision import unpack_nibbles

    n, k = weight.shape
    eights = unpack_nibbles(weight.data).t().reshape(k // 8, 8, n).to(torch.int64)
    shifts = (torch.arange(8, device=eights.device) * 4).view(1, 8, 1)
    words = (eights << shifts).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def marlin_scales(scale: torch.Tensor) -> torch.Tensor:
    """[K / group, N] scales in the order in which Marlin's threads read them: columns of 64 as an
    8 x 8 table, transposed."""
    groups, n = scale.shape
    return scale.reshape(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n).contiguous()


def _load_marlin() -> Bind:
    import torch
    from sgl_kernel import gptq_marlin_gemm, gptq_marlin_repack
    from sgl_kernel.scalar_type import scalar_types

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        n, k, device = request.n, request.k, weight.data.device
        none = torch.empty(0, dtype=torch.int32, device=device)
        packed = gptq_marlin_repack(gptq_packed(weight), none, k, n, 4)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        workspace = torch.zeros(processors * 4, dtype=torch.int32, device=device)
        scales: dict[torch.dtype, torch.Tensor] = {}

        def product(x: torch.Tensor) -> torch.Tensor:
            if x.dtype not in scales:
                scales[x.dtype] = marlin_scales(weight.scale.t().to(x.dtype))
            y: torch.Tensor = gptq_marlin_gemm(
                x,
                None,
                packed,
                scales[x.dtype],
                None,
                none,
                none,
                none,
                workspace,
                scalar_types.uint4b8,
                size_m=x.shape[0],
                size_n=n,
                size_k=k,
                use_fp32_reduce=True,
            )
            return y

        return finished(request, product, bias)

    return bind


def _load_grouped_router() -> Bind:
    from sgl_kernel import moe_fused_gate

    def bind(request: MoeRouterRequest, *, bias: torch.Tensor) -> Kernel:
        def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = moe_fused_gate(
                logits.float(),
                bias.float(),
                request.num_groups,
                request.num_groups_picked,
                request.top_k,
                0,
                1.0,
            )
            return weights * request.route_scale, ids

        return kernel

    return bind


def _load_softmax_router() -> Bind:
    import torch
    from sgl_kernel import topk_softmax

    def bind(request: MoeRouterRequest) -> Kernel:
        def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (logits.shape[0], request.top_k)
            weights = logits.new_empty(shape, dtype=torch.float32)
            ids = logits.new_empty(shape, dtype=torch.int32)
            topk_softmax(weights, ids, logits.float(), request.normalizes)
            return weights * request.route_scale, ids

        return kernel

    return bind
