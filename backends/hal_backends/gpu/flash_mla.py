"""FlashMLA: latent attention over pages, dense and by index lists, and DeepSeek V4's two caches.

Limits after github.com/deepseek-ai/FlashMLA (README's matrix, flash_mla_interface.py): dense
decode on Hopper with bfloat16 rows; lists on Hopper and data-centre Blackwell with packed FP8 rows
in decode and bfloat16 rows in prefill; 64 or 128 query heads; pages of 64 rows. Packed rows are
widened in registers and multiplied in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.compressed_attention import (
    CompressedAttentionMetadata,
    CompressedAttentionRequest,
)
from hal.ops.mla_attention import MlaAttentionRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    architecture,
    flag,
    gather,
    multiple,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device
from hal_backends.gpu.paged import physical_rows

if TYPE_CHECKING:
    import torch

_SPARSE_ARCHS = ("sm_90", "sm_100", "sm_103")
_HEADS = (64, 128)
_INSTALL = "build github.com/deepseek-ai/FlashMLA"
_ROW = 656


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    offers = (_dense(device), _sparse_packed(device), _sparse_prefill(device), _compressed(device))
    return on_device(offers, op, device)


def _installed(device: DeviceSpec) -> list[Reason]:
    return software(device, "flash-mla", install=_INSTALL)


def _mla(r: MlaAttentionRequest, kv_format: str) -> list[Reason]:
    return gather(
        scope("kv_format", r.kv_format, (kv_format,)),
        scope("dtype", r.dtype, ("bfloat16",)),
        one_of("kv_lora_rank and rope_dim", (r.kv_lora_rank, r.rope_dim), ((512, 64),)),
    )


def _offer(
    op: str,
    name: str,
    summary: str,
    check: Callable[..., Sequence[Reason]],
    load: Callable[[], Bind],
    leaf: str,
) -> Offer:
    return Offer(
        op=op,
        implementation=f"flash_mla_{name}",
        tier=Tier.NATIVE,
        summary=f"FlashMLA: {summary}; {NOT_RUN}",
        check=check,
        load=load,
        leaf=(Leaf(kind="kernel", name=leaf),),
        requires=("flash-mla",),
        is_graph_safe=True,
    )


def _dense(device: DeviceSpec) -> Offer:
    def check(r: MlaAttentionRequest) -> list[Reason]:
        return gather(
            scope("top_k", r.top_k, (0,)),
            scope("phase", r.phase, ("decode",)),
            _mla(r, "bf16"),
            architecture(device, ("sm_90",), why="dense decode uses wgmma"),
            one_of("block_size", r.block_size, (64,)),
            _installed(device),
        )

    return _offer(
        "mla_attention",
        "dense",
        "every cached row, in decode",
        check,
        _load_dense,
        "flash_fwd_splitkv_mla",
    )


def _sparse_packed(device: DeviceSpec) -> Offer:
    def check(r: MlaAttentionRequest) -> list[Reason]:
        return gather(
            scope("index lists", r.top_k > 0, (True,)),
            _mla(r, "fp8_656"),
            architecture(device, _SPARSE_ARCHS, why="wgmma or tcgen05"),
            one_of("num_heads", r.num_heads, _HEADS),
            one_of("block_size", r.block_size, (64,)),
            multiple("top_k", r.top_k, 64),
            _installed(device),
        )

    return _offer(
        "mla_attention",
        "sparse_packed",
        "listed rows of 656 bytes, widened to bfloat16",
        check,
        _load_sparse_packed,
        "sparse_attn_fwd",
    )


def _sparse_prefill(device: DeviceSpec) -> Offer:
    def check(r: MlaAttentionRequest) -> list[Reason]:
        return gather(
            scope("index lists", r.top_k > 0, (True,)),
            _mla(r, "bf16"),
            architecture(device, _SPARSE_ARCHS, why="wgmma or tcgen05"),
            one_of("num_heads", r.num_heads, _HEADS),
            multiple("top_k", r.top_k, 128),
            _installed(device),
        )

    return _offer(
        "mla_attention",
        "sparse",
        "listed rows in bfloat16, one query after the other",
        check,
        _load_sparse,
        "sparse_attn_fwd",
    )


def _compressed(device: DeviceSpec) -> Offer:
    def check(r: CompressedAttentionRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, ("bfloat16",)),
            scope("window_format", r.window_format, ("v4_584",)),
            scope("main_format", r.main_format, ("v4_584",)),
            architecture(device, _SPARSE_ARCHS, why="wgmma or tcgen05"),
            one_of("num_heads", r.num_heads, _HEADS),
            one_of("head_dim", r.head_dim, (512,)),
            one_of("block_size", r.block_size, (64,)),
            multiple("window", r.window, 64),
            multiple("top_k", r.top_k, 64),
            flag("index lists or window only", r.top_k > 0 or not r.compress_ratio, required=True),
            _installed(device),
        )

    return _offer(
        "compressed_attention",
        "compressed",
        "a window and listed entries of 584 bytes, with sinks",
        check,
        _load_compressed,
        "sparse_attn_fwd",
    )


def _load_dense() -> Bind:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor,
            kv_cache: torch.Tensor,
            meta: AttentionMetadata,
            indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            out: torch.Tensor = flash_mla_with_kvcache(
                q.view(-1, 1, request.num_heads, request.row_dim),
                kv_cache.unsqueeze(2),
                meta.block_table,
                meta.seq_lens,
                request.kv_lora_rank,
                get_mla_metadata()[0],
                softmax_scale=scale,
                causal=request.is_causal,
            )[0]
            return out.flatten(1)

        return kernel

    return bind


def _listed(
    request: MlaAttentionRequest, indices: torch.Tensor, meta: AttentionMetadata
) -> torch.Tensor:
    return physical_rows(
        indices, meta, meta.block_table, request.block_size, is_causal=request.is_causal
    )


def _load_sparse_packed() -> Bind:
    import torch
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, indices: torch.Tensor
        ) -> torch.Tensor:
            rows = kv_cache.view(-1, request.block_size, 1, _ROW).view(torch.float8_e4m3fn)
            listed = _listed(request, indices, meta)
            out: torch.Tensor = flash_mla_with_kvcache(
                q.view(-1, 1, request.num_heads, request.row_dim),
                rows,
                None,
                None,
                request.kv_lora_rank,
                get_mla_metadata()[0],
                softmax_scale=scale,
                is_fp8_kvcache=True,
                indices=listed.unsqueeze(1),
            )[0]
            return out.flatten(1)

        return kernel

    return bind


def _load_sparse() -> Bind:
    from flash_mla import flash_mla_sparse_fwd

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, indices: torch.Tensor
        ) -> torch.Tensor:
            listed = _listed(request, indices, meta)
            out: torch.Tensor = flash_mla_sparse_fwd(
                q.view(-1, request.num_heads, request.row_dim),
                kv_cache.view(-1, 1, request.row_dim),
                listed.unsqueeze(1),
                scale,
                request.kv_lora_rank,
            )[0]
            return out.flatten(1)

        return kernel

    return bind


def _load_compressed() -> Bind:
    import torch
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    from hal_backends.gpu.paged import window_rows

    def bind(
        request: CompressedAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        def rows_of(cache: torch.Tensor) -> torch.Tensor:
            pages = cache[:, : request.block_size * 584]
            return pages.view(-1, request.block_size, 1, 584).view(torch.float8_e4m3fn)

        def kernel(
            q: torch.Tensor,
            window_cache: torch.Tensor,
            main_cache: torch.Tensor | None,
            meta: CompressedAttentionMetadata,
            indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            window = window_rows(meta, q.shape[0], request.window, request.block_size)
            more: dict[str, torch.Tensor] = {}
            if main_cache is not None and indices is not None and meta.main_block_table is not None:
                listed = physical_rows(
                    indices,
                    meta,
                    meta.main_block_table,
                    request.block_size,
                    ratio=request.compress_ratio,
                )
                more = {
                    "extra_k_cache": rows_of(main_cache),
                    "extra_indices_in_kvcache": listed.unsqueeze(1),
                }
            out: torch.Tensor = flash_mla_with_kvcache(
                q.view(-1, 1, request.num_heads, request.head_dim),
                rows_of(window_cache),
                None,
                None,
                request.head_dim,
                get_mla_metadata()[0],
                softmax_scale=scale,
                is_fp8_kvcache=True,
                indices=window.unsqueeze(1),
                attn_sink=sinks,
                **more,
            )[0]
            return out.flatten(1)

        return kernel

    return bind
