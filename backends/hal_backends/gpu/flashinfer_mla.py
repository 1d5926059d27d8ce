"""FlashInfer's sparse latent attention for sm_120, for DeepSeek V3.2, GLM, V4 and V4.1 caches.

Limits after flashinfer-python 0.7.4, mla/_sparse_mla_sm120/{_api,_policy}.py: packed rows of 656,
584 and 528 bytes, a second cache of 584 or 288 bytes, up to 128 heads, any list length. These are
the kernels of consumer and workstation Blackwell; FlashMLA has none for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from hal_backends.gpu.flashinfer_attention import installed
from hal_backends.gpu.limits import architecture, at_most, flag, gather, one_of, scope
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device
from hal_backends.gpu.paged import physical_rows, window_rows

if TYPE_CHECKING:
    import torch

_ARCHS = ("sm_120",)
_TILE = 64  # entries of a list that one step reads
_VALUE_DIM = 512
_V41_MODEL = 5  # 512 e4m3 values with a power of two per 32
# Formats of the window and of the main cache that go together.
_CACHES = (("v4_584", "v4_584"), ("v41_528", "v41_528"), ("v41_528", "fp4_288"))


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device((_mla(device), _compressed(device)), op, device)


def _common(device: DeviceSpec, heads: int) -> list[Reason]:
    return gather(
        architecture(device, _ARCHS, why="written for sm_120's block-scaled FP8 instructions"),
        at_most("num_heads", heads, 128),
        installed(device, ">=0.7.4"),
    )


def _mla(device: DeviceSpec) -> Offer:
    def check(r: MlaAttentionRequest) -> list[Reason]:
        return gather(
            scope("index lists", r.top_k > 0, (True,)),
            scope("kv_format", r.kv_format, ("fp8_656",)),
            scope("dtype", r.dtype, ("bfloat16",)),
            _common(device, r.num_heads),
        )

    return Offer(
        op="mla_attention",
        implementation="flashinfer_sparse_sm120",
        tier=Tier.NATIVE,
        summary=f"FlashInfer: listed rows of 656 bytes on sm_120; {NOT_RUN}",
        check=check,
        load=_load_mla,
        leaf=(Leaf(kind="kernel", name="sparse_mla_sm120"),),
        requires=("flashinfer-python>=0.7.4",),
    )


def _compressed(device: DeviceSpec) -> Offer:
    def check(r: CompressedAttentionRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, ("bfloat16",)),
            one_of("window and main format", (r.window_format, r.main_format), _CACHES),
            one_of("head_dim", r.head_dim, (_VALUE_DIM,)),
            flag("index lists or window only", r.top_k > 0 or not r.compress_ratio, required=True),
            _common(device, r.num_heads),
        )

    return Offer(
        op="compressed_attention",
        implementation="flashinfer_sparse_sm120",
        tier=Tier.NATIVE,
        summary=f"FlashInfer: a window and listed entries, with sinks, on sm_120; {NOT_RUN}",
        check=check,
        load=_load_compressed,
        leaf=(Leaf(kind="kernel", name="sparse_mla_sm120"),),
        requires=("flashinfer-python>=0.7.4",),
    )


def _run(
    operator: Callable[..., Any],
    q: torch.Tensor,
    cache: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
    *,
    splits: int,
    **more: Any,
) -> torch.Tensor:
    """One call with its scratch: partial results per step over the lists."""
    import torch

    tokens, heads = q.shape[0], q.shape[1]
    padded = 8 if heads == 8 else -(-heads // 16) * 16
    partial = q.new_empty((tokens, padded, splits, _VALUE_DIM))
    partial_sums = q.new_empty((tokens, padded, splits), dtype=torch.float32)
    out = q.new_empty((tokens, heads, _VALUE_DIM))
    sums = q.new_empty((tokens, heads), dtype=torch.float32)
    operator(q, cache, lists, partial, partial_sums, out, sums, scale, **more)
    return out.flatten(1)


def _steps(length: int) -> int:
    return -(-length // _TILE)


def _load_mla() -> Bind:
    from flashinfer.mla._sparse_mla_sm120._api import sparse_mla_sm120_decode_dsv3_2

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, indices: torch.Tensor
        ) -> torch.Tensor:
            lists = physical_rows(
                indices, meta, meta.block_table, request.block_size, is_causal=request.is_causal
            )
            return _run(
                sparse_mla_sm120_decode_dsv3_2,
                q.view(-1, request.num_heads, request.row_dim),
                kv_cache,
                lists,
                scale,
                splits=_steps(request.top_k),
            )

        return kernel

    return bind


def _load_compressed() -> Bind:
    from flashinfer.mla._sparse_mla_sm120._api import sparse_mla_sm120_decode_dsv4

    def bind(
        request: CompressedAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        fixed: dict[str, Any] = {"attn_sink": sinks}
        if request.window_format == "v41_528":
            fixed |= {"model_type": _V41_MODEL, "extra_fp4": request.main_format == "fp4_288"}

        def kernel(
            q: torch.Tensor,
            window_cache: torch.Tensor,
            main_cache: torch.Tensor | None,
            meta: CompressedAttentionMetadata,
            indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            more, splits = dict(fixed), _steps(request.window)
            table = meta.main_block_table
            if main_cache is not None and indices is not None and table is not None:
                more["extra_kv_cache"] = main_cache
                more["extra_indices"] = physical_rows(
                    indices, meta, table, request.block_size, ratio=request.compress_ratio
                )
                splits += _steps(request.top_k)
            return _run(
                sparse_mla_sm120_decode_dsv4,
                q.view(-1, request.num_heads, request.head_dim),
                window_cache,
                window_rows(meta, q.shape[0], request.window, request.block_size),
                scale,
                splits=splits,
                **more,
            )

        return kernel

    return bind
