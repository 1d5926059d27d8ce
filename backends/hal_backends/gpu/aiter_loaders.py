"""What AITER's candidates load: its functions, bound to the arguments of our ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.norm import RmsNormRequest
from hal_backends.gpu.formats import fp8_kind
from hal_backends.gpu.paged import physical_rows, positions_of_tokens
from hal_backends.gpu.torch_gemm_loaders import as_kind, finished

if TYPE_CHECKING:
    import torch


def block128(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with any scales as e4m3fn [N, K] with float32 scales [N / 128, K / 128]."""
    import torch

    from hal.ops.low_precision import encode_fp8

    n, k = weight.shape
    tiles = weight.dequantize().view(n // 128, 128, k // 128, 128)
    peak = tiles.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(peak > 0, peak / 448.0, torch.ones_like(peak))
    return encode_fp8(tiles / scale, "fp8_e4m3fn").view(n, k), scale.view(n // 128, k // 128)


def load_block128(device: DeviceSpec, *, requantizes: bool = False) -> Any:
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


def load_norm() -> Bind:
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


def load_mla() -> Bind:
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


def load_logits(device: DeviceSpec) -> Any:
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
