"""FlashInfer's kernels for norms, activations, rope, top-k, and its quantised products.

Limits after flashinfer-python 0.7.4: norm/__init__.py, activation.py, rope.py, topk.py,
gemm/gemm_base.py (its lists of supported capabilities).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.flashinfer_attention import ARCHS, REQUIREMENT, installed
from hal_backends.gpu.limits import architecture, gather, limit, multiple, scope
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device
from hal_backends.gpu.torch_gemm_loaders import finished

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device(_offers(device), op, device)


def _offers(device: DeviceSpec) -> tuple[Offer, ...]:
    def offer(op: str, name: str, summary: str, check: Check, load: Any, kernel: str) -> Offer:
        return Offer(
            op=op,
            implementation=name,
            tier=Tier.NATIVE,
            summary=f"FlashInfer: {summary}; {NOT_RUN}",
            check=lambda r: gather(check(r), installed(device)),
            load=load,
            leaf=(Leaf(kind="kernel", name=kernel),),
            requires=(REQUIREMENT,),
            is_graph_safe=True,
        )

    def any_arch() -> list[Reason]:
        return architecture(device, ARCHS, why="FlashInfer's kernels are compiled for them")

    return (
        offer(
            "norm.rms",
            "flashinfer",
            "one pass, the residual added in place",
            lambda r: gather(_norm(r), any_arch()),
            _load_norm,
            "RMSNorm",
        ),
        offer(
            "activation.gated",
            "flashinfer",
            "activation and product in one pass",
            lambda r: gather(_activation(r), any_arch()),
            _load_activation,
            "act_and_mul",
        ),
        offer(
            "rope",
            "flashinfer",
            "in place, from the table of cosines and sines",
            lambda r: gather(_rope(r), any_arch()),
            _load_rope,
            "BatchQKApplyRotary",
        ),
        offer(
            "gemm",
            "flashinfer_block128_sm90",
            "FP8 128x128 blocks by DeepGEMM's kernels, rounding of the activations inside",
            lambda r: gather(_block128(r), architecture(device, ("sm_90",), why="wgmma")),
            _load_block128_sm90,
            "fp8_gemm",
        ),
        offer(
            "gemm",
            "flashinfer_block128",
            "FP8 128x128 blocks by CUTLASS",
            lambda r: gather(
                _block128(r),
                architecture(
                    device, ("sm_100", "sm_103", "sm_120"), why="Blackwell's group-wise CUTLASS"
                ),
            ),
            _load_groupwise,
            "gemm_fp8_nt_groupwise",
        ),
        offer(
            "gemm",
            "flashinfer_mxfp8",
            "MXFP8, one power of two per 32 values; 32x32 blocks spread along the rows",
            lambda r: gather(
                _mxfp8(r),
                architecture(device, ("sm_100", "sm_103", "sm_120"), why="Blackwell's MXFP8"),
            ),
            _load_mxfp8,
            "mxfp8",
        ),
    )


def _norm(r: RmsNormRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _HALF),
        limit("quantize", r.quantize, "none", is_met=r.quantize == "none"),
        multiple("hidden_size", r.hidden_size, 8),
    )


def _activation(r: GatedActivationRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _HALF),
        limit("clamp", r.clamp, "0", is_met=r.clamp == 0),
        multiple("width", r.width, 8),
    )


def _rope(r: RopeRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _HALF),
        scope("is_inverse", r.is_inverse, (False,)),
        scope("rotary_start", r.rotary_start, (0,)),
        scope("keys", r.num_kv_heads > 0, (True,)),
        limit("head_dim", r.head_dim, "64, 128 or 256", is_met=r.head_dim in (64, 128, 256)),
    )


def _block128(r: GemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, ("fp8_block128_a8",)),
        scope("dtype", r.dtype, ("bfloat16",)),
        multiple("K", r.k, 128),
        multiple("N", r.n, 128),
    )


def _mxfp8(r: GemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, ("fp8_block32_ue8m0_a8",)),
        scope("dtype", r.dtype, _HALF),
        multiple("K", r.k, 128),
        multiple("N", r.n, 32),
    )


def _load_norm() -> Bind:
    import flashinfer

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, request.hidden_size)
            y: torch.Tensor = flashinfer.rmsnorm(rows, weight, eps)
            return y.view(x.shape)

        def norm_residual(
            x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            flashinfer.fused_add_rmsnorm(
                x.view(-1, request.hidden_size),
                residual.view(-1, request.hidden_size),
                weight,
                eps,
            )
            return x, residual

        return norm_residual if request.has_residual else norm

    return bind


def _load_activation() -> Bind:
    import flashinfer

    def bind(request: GatedActivationRequest) -> Kernel:
        silu, gelu = flashinfer.silu_and_mul, flashinfer.gelu_tanh_and_mul
        kernel: Kernel = silu if request.activation == "silu" else gelu
        return kernel

    return bind


def _load_rope() -> Bind:
    import flashinfer

    def bind(request: RopeRequest, *, cos_sin_cache: torch.Tensor) -> Kernel:
        is_half_split = request.style == "half_split"

        def kernel(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
            flashinfer.apply_rope_with_cos_sin_cache_inplace(
                positions, q, k, request.head_dim, cos_sin_cache, is_neox=is_half_split
            )

        return kernel

    return bind


def _load_block128_sm90() -> Bind:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        def product(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = fp8_blockscale_gemm_sm90(x, weight.data, None, weight.scale)
            return y

        return finished(request, product, bias)

    return bind


def _load_groupwise() -> Bind:
    from flashinfer.gemm import gemm_fp8_nt_groupwise

    from hal.ops.low_precision import quantize_groups

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        def product(x: torch.Tensor) -> torch.Tensor:
            values, scales = quantize_groups(
                x, group_size=128, element="fp8_e4m3fn", scale_kind="float32"
            )
            y: torch.Tensor = gemm_fp8_nt_groupwise(
                values,
                weight.data,
                scales,
                weight.scale,
                scale_major_mode="K",
                out_dtype=x.dtype,
                backend="cutlass",
            )
            return y

        return finished(request, product, bias)

    return bind


def _load_mxfp8() -> Bind:
    from flashinfer.gemm import mm_mxfp8

    from hal.ops.low_precision import quantize_groups
    from hal_backends.gpu.torch_gemm_loaders import swizzled_scales

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        per_row = weight.scale.repeat_interleave(weight.format.block_n, dim=0)[: request.n]
        scale, columns = swizzled_scales(per_row), weight.data.t()

        def product(x: torch.Tensor) -> torch.Tensor:
            values, codes = quantize_groups(
                x, group_size=32, element="fp8_e4m3fn", scale_kind="ue8m0"
            )
            y: torch.Tensor = mm_mxfp8(
                values, columns, swizzled_scales(codes), scale, out_dtype=x.dtype
            )
            return y

        return finished(request, product, bias)

    return bind
