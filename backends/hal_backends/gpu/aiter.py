"""AITER, AMD's library for CDNA: products, norms, latent attention and index scores.

Limits after github.com/ROCm/aiter: kernels in assembly and Composable Kernel for gfx942 and gfx950,
which differ in their FP8 encoding (fnuz on the first, fn on the second). Peers use it only where an
environment variable is set; here it is a candidate like any other, and its absence is a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason
from hal.tiers import Tier
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
from hal_backends.gpu.paged import physical_rows, positions_of_tokens
from hal_backends.gpu.semantics import REQUANTIZED_BLOCKS
from hal_backends.gpu.torch_gemm_loaders import as_kind, finished

if TYPE_CHECKING:
    import torch

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
            _load_block128(device),
            "gemm_a8w8_blockscale",
        ),
        _requantized(device, common),
        offer(
            "norm.rms",
            "one pass, with the residual",
            _norm,
            _load_norm,
            "rmsnorm2d",
        ),
        offer(
            "mla_attention",
            "decode over latent rows, dense or by lists",
            _mla,
            _load_mla,
            "mla",
        ),
        offer(
            "index_logits",
            "FP8 scores over paged keys",
            lambda r: gather(_logits(device, r), feature(device, "triton")),
            _load_logits(device),
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
        load=_load_block128(device, requantizes=True),
        leaf=(Leaf(kind="kernel", name="gemm_a8w8_blockscale"),),
        notes=lambda r: (REQUANTIZED_BLOCKS,),
        requires=(_DISTRIBUTION,),
        is_graph_safe=True,
    )


def block128(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with any scales as e4m3fn [N, K] with float32 scales [N / 128, K / 128]."""
    import torch

    from hal.ops.low_precision import encode_fp8

    n, k = weight.shape
    tiles = weight.dequantize().view(n // 128, 128, k // 128, 128)
    peak = tiles.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(peak > 0, peak / 448.0, torch.ones_like(peak))
    return encode_fp8(tiles / scale, "fp8_e4m3fn").view(n, k), scale.view(n // 128, k // 128)


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


def _load_block128(device: DeviceSpec, *, requantizes: bool = False) -> Any:
    kind = fp8_kind(device)

    def load() -> Bind:
        import aiter

        from hal.ops.low_precision import quantize_groups

        def bind(
            request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
        ) -> Kernel:
            values, blocks = block128(weight) if requantizes else (weight.data, weight.scale)
            stored, factor = as_kind(values, kind)
            blocks = blocks.float() * factor

            def product(x: torch.Tensor) -> torch.Tensor:
                rounded, scales = quantize_groups(
                    x, group_size=128, element="fp8_e4m3fn", scale_kind="float32"
                )
                rows, row_factor = as_kind(rounded, kind)
                y: torch.Tensor = aiter.gemm_a8w8_blockscale(
                    rows, stored, scales * row_factor, blocks, x.dtype
                )
                return y

            return finished(request, product, bias)

        return bind

    return load


def _load_norm() -> Bind:
    import aiter
    import torch

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, request.hidden_size)
            y: torch.Tensor = aiter.rms_norm(rows, weight, eps)
            return y.view(x.shape)

        def norm_residual(
            x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out, total = torch.empty_like(x), torch.empty_like(x)
            aiter.rmsnorm2d_fwd_with_add(out, x, residual, total, weight, eps)
            return out, total

        return norm_residual if request.has_residual else norm

    return bind


def _load_mla() -> Bind:
    import torch
    from aiter.mla import mla_decode_fwd

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def lists(
            tokens: int, meta: AttentionMetadata, indices: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Running counts [T+1] and rows of what each query reads."""
            if indices is None:
                seen = positions_of_tokens(meta, tokens) + 1
                at = torch.arange(meta.max_seq_len, device=seen.device).expand(tokens, -1)
                indices = at.masked_fill(at >= seen[:, None], -1)
            rows = physical_rows(indices, meta, meta.block_table, request.block_size)
            is_there = rows >= 0
            counts = torch.zeros(tokens + 1, dtype=torch.int32, device=rows.device)
            counts[1:] = is_there.sum(1).cumsum(0)
            return counts, rows[is_there]

        def kernel(
            q: torch.Tensor,
            kv_cache: torch.Tensor,
            meta: AttentionMetadata,
            indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            tokens = q.shape[0]
            counts, rows = lists(tokens, meta, indices)
            out = q.new_empty((tokens, request.num_heads, request.kv_lora_rank))
            each = torch.arange(tokens + 1, dtype=torch.int32, device=q.device)
            mla_decode_fwd(
                q.view(tokens, request.num_heads, request.row_dim),
                kv_cache.view(-1, 1, 1, request.row_dim),
                out,
                each,
                counts,
                rows,
                torch.ones(tokens, dtype=torch.int32, device=q.device),
                1,
                sm_scale=scale,
            )
            return out.flatten(1)

        return kernel

    return bind


def _load_logits(device: DeviceSpec) -> Any:
    kind = fp8_kind(device)

    def load() -> Bind:
        import torch
        from aiter.ops.triton.pa_mqa_logits import deepgemm_fp8_paged_mqa_logits

        def bind(request: IndexLogitsRequest, *, scale: float) -> Kernel:
            ratio = request.compress_ratio

            def kernel(
                q: torch.Tensor,
                weights: torch.Tensor,
                key_cache: torch.Tensor,
                meta: AttentionMetadata,
            ) -> torch.Tensor:
                entries = meta.max_seq_len // ratio
                seen = ((positions_of_tokens(meta, q.shape[0]) + 1) // ratio).int()
                rows, factor = as_kind(q, kind)
                logits = torch.full(
                    (q.shape[0], entries), float("-inf"), dtype=torch.float32, device=q.device
                )
                deepgemm_fp8_paged_mqa_logits(
                    rows.view(-1, 1, request.num_heads, request.head_dim),
                    key_cache.view(-1, request.block_size, 1, request.head_dim + 4),
                    weights * (scale * factor),
                    logits,
                    seen,
                    meta.block_table,
                    entries,
                    Preshuffle=False,
                    KVBlockSize=request.block_size,
                )
                return logits

            return kernel

        return bind

    return load
