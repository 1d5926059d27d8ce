"""AITER, AMD's library for CDNA: products, norms, latent attention and index scores.

Limits after github.com/ROCm/aiter: kernels in assembly and Composable Kernel for gfx942 and gfx950,
which differ in their FP8 encoding (fnuz on the first, fn on the second). Peers use it only where an
environment variable is set; here it is a candidate like any other, and its absence is a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.gemm import GemmRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.aiter_loaders import load_block128, load_logits, load_mla, load_norm
from hal_backends.gpu.formats import fp8_kind, matrix_feature
from hal_backends.gpu.limits import (
    architecture,
    feature,
    gather,
    limit,
    multiple,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Check, Offer, on_device
from hal_backends.gpu.semantics import REQUANTIZED_BLOCKS

if TYPE_CHECKING:
    pass

_CDNA = ("gfx942", "gfx950")
_DISTRIBUTION = "amd-aiter"
_INSTALL = "build github.com/ROCm/aiter"


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device(_offers(device, _CDNA), op, device)


def hygon_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """Hygon's build, for its gfx938 only."""
    return on_device(_offers(device, ("gfx938",)), op, device)


def _offers(device: DeviceSpec, archs: Sequence[str]) -> tuple[Offer, ...]:
    def common() -> list[Reason]:
        return gather(
            architecture(device, archs, why="AITER's kernels are compiled for them"),
            software(device, _DISTRIBUTION, install=_INSTALL),
        )

    def offer(op: str, summary: str, check: Check, load: Any, kernel: str) -> Offer:
        return Offer(
            op=op,
            implementation="aiter",
            tier=Tier.NATIVE,
            summary=f"AITER: {summary}; {NOT_RUN}",
            check=lambda r: gather(check(r), common()),
            load=load,
            leaf=(Leaf(kind="kernel", name=kernel),),
            requires=(_DISTRIBUTION,),
            is_graph_safe=True,
        )

    return (
        offer(
            "gemm",
            "FP8 product with 128x128 blocks",
            lambda r: _block128(device, r),
            load_block128(device),
            "gemm_a8w8_blockscale",
        ),
        _requantized(device, common),
        offer(
            "norm.rms",
            "one pass, with the residual",
            _norm,
            load_norm,
            "rmsnorm2d",
        ),
        offer(
            "mla_attention",
            "decode over latent rows, dense or by lists",
            _mla,
            load_mla,
            "mla",
        ),
        offer(
            "index_logits",
            "FP8 scores over paged keys",
            lambda r: gather(_logits(device, r), feature(device, "triton")),
            load_logits(device),
            "pa_mqa_logits",
        ),
    )


def _requantized(device: DeviceSpec, common: Callable[[], Sequence[Reason]]) -> Offer:
    """What some stacks do on gfx942, which has no block-scaled FP8: lossy, so never silently."""

    def check(r: GemmRequest) -> list[Reason]:
        return gather(
            scope("weight format", r.weight_format.name, ("fp8_block32_ue8m0_a8",)),
            scope("dtype", r.dtype, ("bfloat16",)),
            feature(device, matrix_feature(r, device)),
            multiple("K", r.k, 128),
            multiple("N", r.n, 128),
            common(),
        )

    return Offer(
        op="gemm",
        implementation="aiter_requantized",
        tier=Tier.NATIVE,
        summary=f"AITER: 32x32 blocks requantised to 128x128 when the weight is bound; {NOT_RUN}",
        check=check,
        load=load_block128(device, requantizes=True),
        leaf=(Leaf(kind="kernel", name="gemm_a8w8_blockscale"),),
        notes=lambda r: (REQUANTIZED_BLOCKS,),
        requires=(_DISTRIBUTION,),
        is_graph_safe=True,
    )


def _block128(device: DeviceSpec, r: GemmRequest) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, ("fp8_block128_a8",)),
        scope("dtype", r.dtype, ("bfloat16",)),
        feature(device, matrix_feature(r, device)),
        multiple("K", r.k, 128),
        multiple("N", r.n, 128),
    )


def _norm(r: RmsNormRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, ("bfloat16", "float16")),
        limit("quantize", r.quantize, "none", is_met=r.quantize == "none"),
        multiple("hidden_size", r.hidden_size, 8),
    )


def _mla(r: MlaAttentionRequest) -> list[Reason]:
    return gather(
        scope("phase", r.phase, ("decode",)),
        scope("kv_format", r.kv_format, ("bf16",)),
        scope("dtype", r.dtype, ("bfloat16",)),
        one_of("kv_lora_rank and rope_dim", (r.kv_lora_rank, r.rope_dim), ((512, 64),)),
        one_of("num_heads", r.num_heads, (16, 128)),
    )


def _logits(device: DeviceSpec, r: IndexLogitsRequest) -> list[Reason]:
    kind = fp8_kind(device)
    return gather(
        scope("key_format", r.key_format, ("fp8_132",)),
        # The cache's rows are e4m3fn; rewriting them at each call would cost what the kernel saves.
        limit("FP8 encoding of the matrix unit", kind, "fp8_e4m3fn", is_met=kind == "fp8_e4m3fn"),
        scope("dtype", r.dtype, ("float8_e4m3fn",)),
        scope("phase", r.phase, ("decode",)),
        one_of("head_dim", r.head_dim, (128,)),
        one_of("block_size", r.block_size, (1, 16, 64)),
    )
