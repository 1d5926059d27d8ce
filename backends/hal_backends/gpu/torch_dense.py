"""torch's attention over dense keys and values, and its products of two activations.

Each variant of attention is called by its own operator or under its own back end, so that torch
cannot take another one instead. Limits as in `torch_sdpa`. Written from torch's signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.dense_attention import DenseAttentionRequest, pairs
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import architecture, at_most, flag, gather, limit, multiple, scope
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device, work_of

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_FLOAT = ("bfloat16", "float16", "float32")
# As `torch_sdpa`: check_flash_attention_hardware_support, the members.
_CUDA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def _aten(name: str) -> tuple[Leaf, ...]:
    return (Leaf(kind="aten_op", name=f"aten::{name}"),)


def _plain(r: DenseAttentionRequest) -> list[Reason]:
    return gather(
        limit("softcap", r.softcap, "0", is_met=r.softcap == 0),
        limit("list_width", r.list_width, "0", is_met=r.list_width == 0),
        limit("window", r.window, "0", is_met=r.window == 0),
        flag("sinks", r.has_sinks, required=False),
    )


def _flash(device: DeviceSpec) -> Callable[[DenseAttentionRequest], Sequence[Reason]]:
    return lambda r: gather(
        scope("dtype", r.dtype, _HALF),
        architecture(device, _CUDA, why="torch's flash kernels are compiled for them"),
        _plain(r),
        limit("mask", r.mask, "none", is_met=r.mask == "none"),
        limit(
            "v_head_dim",
            r.v_head_dim,
            f"head_dim ({r.head_dim})",
            is_met=r.v_head_dim == r.head_dim,
        ),
        at_most("head_dim", r.head_dim, 256),
        multiple("head_dim", r.head_dim, 8),
    )


def _efficient(device: DeviceSpec) -> Callable[[DenseAttentionRequest], Sequence[Reason]]:
    def check(r: DenseAttentionRequest) -> list[Reason]:
        align = 4 if r.dtype == "float32" else 8
        return gather(
            scope("dtype", r.dtype, _FLOAT),
            architecture(device, _CUDA, why="torch's CUTLASS kernels are compiled for them"),
            _plain(r),
            limit(
                "heads",
                f"{r.num_heads} over {r.num_kv_heads}",
                "equal numbers of heads",
                is_met=r.num_heads == r.num_kv_heads,
            ),
            multiple("head_dim", r.head_dim, align),
            multiple("v_head_dim", r.v_head_dim, align),
        )

    return check


def _scores(r: DenseAttentionRequest, tokens: int) -> Work:
    """Scores and weights in float32, written and read three times."""
    return work_of(r, tokens, unit=r.dtype, more_bytes=24.0 * r.num_heads * pairs(r, tokens))


def _load_flash() -> Bind:
    import torch

    def bind(request: DenseAttentionRequest, *, scale: float) -> Kernel:
        op = torch.ops.aten._scaled_dot_product_flash_attention

        def kernel(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None = None, lists: None = None
        ) -> torch.Tensor:
            # This operator aligns a causal mask to the last key, as the request means it.
            is_causal = request.is_causal and q.shape[2] > 1
            out: torch.Tensor = op(q, k, v, 0.0, is_causal, scale=scale)[0]
            return out.transpose(1, 2)

        return kernel

    return bind


def _load_efficient() -> Bind:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def bind(request: DenseAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            mask: torch.Tensor | None = None,
            lists: None = None,
        ) -> torch.Tensor:
            if mask is None and request.is_causal and q.shape[2] > 1:
                mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
                mask = mask.tril(k.shape[2] - q.shape[2])
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            return out.transpose(1, 2)

        return kernel

    return bind


def _load_products() -> Bind:
    from hal_kernels.dense_attention.products import bind_products

    return bind_products


def _load_matmul() -> Bind:
    import torch

    def bind(request: BatchedGemmRequest) -> Kernel:
        if not request.equation:
            return torch.matmul

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.einsum(request.equation, a, b)

        return product

    return bind


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """Products on every platform; torch's fused kernels on NVIDIA's."""
    offers = [_products(), _matmul(device)]
    if device.backend == "nvidia":
        offers += _fused(device)
    return on_device(offers, op, device)


def _fused(device: DeviceSpec) -> list[Offer]:
    def offer(name: str, summary: str, check: Any, load: Callable[[], Bind], leaf: str) -> Offer:
        return Offer(
            op="dense_attention",
            implementation=f"torch_{name}",
            tier=Tier.TUNED,
            summary=f"{summary}; {NOT_RUN}",
            check=check,
            load=load,
            leaf=_aten(leaf),
        )

    return [
        offer(
            "flash",
            "torch's FlashAttention kernel, called by its name",
            _flash(device),
            _load_flash,
            "_scaled_dot_product_flash_attention",
        ),
        offer(
            "efficient",
            "torch's memory-efficient kernel (CUTLASS) with any mask",
            _efficient(device),
            _load_efficient,
            "_scaled_dot_product_efficient_attention",
        ),
    ]


def _products() -> Offer:
    return Offer(
        op="dense_attention",
        implementation="torch_products",
        tier=Tier.PORTABLE,
        summary="two batched products with scores in memory; softcap, sinks, lists and all else",
        check=lambda r: scope("dtype", r.dtype, _FLOAT),
        load=_load_products,
        leaf=_aten("bmm"),
        work=_scores,
    )


def _matmul(device: DeviceSpec) -> Offer:
    is_known = "matrix.bfloat16" in device.features
    return Offer(
        op="batched_gemm",
        implementation="torch_matmul",
        tier=Tier.NATIVE if is_known else Tier.TUNED,
        summary="torch.matmul or einsum: the vendor's BLAS",
        check=lambda r: scope("dtype", r.dtype, _FLOAT),
        load=_load_matmul,
        leaf=(*_aten("bmm"), *_aten("mm")),
    )
