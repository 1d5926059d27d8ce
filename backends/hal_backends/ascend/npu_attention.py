"""torch_npu's attention operators: fused attention over pages, and sparse attention by lists.

Signatures and limits after torch_npu 2.14.0 (its own operator documentation): pages with the
layouts BSH and BSND only, so decode reads the pages in place and prefill copies keys and values
first; the sparse operators take latent and rotary part of the cache as two contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.formats import DTYPE_BYTES
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.reasons import Reason, ReasonKind
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
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device, work_of

if TYPE_CHECKING:
    import torch

_ARCHS = ("ascend-910b", "ascend-910c")
_DTYPES = ("bfloat16", "float16")
_MASK_SIZE = 2048  # of the fixed causal mask that sparse_mode 3 takes
_CAUSAL = 3


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    offers = (_decode(device), _prefill(device), _sparse(device), _indexer(device))
    return on_device(offers, op, device)


def _installed(device: DeviceSpec) -> list[Reason]:
    return gather(
        architecture(device, _ARCHS, why="A2 and A3 of torch_npu's operator documentation"),
        software(device, "torch-npu", ">=2.5"),
    )


def _attention(r: AttentionRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _DTYPES),
        limit("kv_dtype", r.kv_dtype, f"dtype ({r.dtype})", is_met=r.kv_dtype == r.dtype),
        flag("sinks", r.has_sinks, required=False),
        limit("softcap", r.softcap, "0", is_met=r.softcap == 0),
        limit("window", r.window, "0", is_met=r.window == 0),
        limit(
            "v_head_dim",
            r.v_head_dim,
            f"head_dim ({r.head_dim})",
            is_met=r.v_head_dim == r.head_dim,
        ),
        multiple("head_dim", r.head_dim, 16),
        at_most("head_dim", r.head_dim, 512),
    )


def _decode(device: DeviceSpec) -> Offer:
    return Offer(
        op="attention",
        implementation="npu_fused_infer_attention_score",
        tier=Tier.NATIVE,
        summary=f"Ascend's fused attention over pages, in decode; {NOT_RUN}",
        check=lambda r: gather(
            scope("phase", r.phase, ("decode",)),
            _attention(r),
            multiple("block_size", r.block_size, 16),
            at_most("block_size", r.block_size, 512),
            _installed(device),
        ),
        load=_load_decode,
        leaf=(Leaf(kind="symbol", name="aclnnFusedInferAttentionScore"),),
        requires=("torch-npu",),
    )


def _copy_work(r: AttentionRequest, tokens: int) -> Work:
    row = r.num_kv_heads * (r.head_dim + r.v_head_dim)
    return work_of(r, tokens, unit=r.dtype, more_bytes=2.0 * tokens * row * DTYPE_BYTES[r.dtype])


def _prefill(device: DeviceSpec) -> Offer:
    return Offer(
        op="attention",
        implementation="npu_fused_infer_attention_score_tnd",
        tier=Tier.TUNED,
        summary=f"copies keys and values, then Ascend's fused attention once; {NOT_RUN}",
        check=lambda r: gather(
            scope("phase", r.phase, ("prefill",)), _attention(r), _installed(device)
        ),
        load=_load_prefill,
        leaf=(Leaf(kind="symbol", name="aclnnFusedInferAttentionScore"),),
        work=_copy_work,
        requires=("torch-npu",),
    )


def _sparse(device: DeviceSpec) -> Offer:
    def check(r: MlaAttentionRequest) -> list[Reason]:
        return gather(
            scope("index lists", r.top_k > 0, (True,)),
            scope("kv_format", r.kv_format, ("bf16",)),
            scope("dtype", r.dtype, _DTYPES),
            one_of("kv_lora_rank", r.kv_lora_rank, (512,)),
            limit(
                "cache rows",
                f"one row of {r.row_dim}",
                "latent and rotary part in two contiguous tensors",
                is_met=r.rope_dim == 0,
            ),
            multiple("block_size", r.block_size, 16),
            _installed(device),
        )

    return Offer(
        op="mla_attention",
        implementation="npu_sparse_flash_attention",
        tier=Tier.NATIVE,
        summary=f"Ascend's sparse attention by lists over pages; {NOT_RUN}",
        check=check,
        load=_load_sparse,
        leaf=(Leaf(kind="symbol", name="aclnnSparseFlashAttention"),),
        requires=("torch-npu",),
    )


# Listed so that a plan names what the platform has and the op catalogue cannot ask for.
_NO_OP_OF_THAT_SHAPE = Reason(
    what="op",
    required="an op that scores and chooses at once, as the operator does, in hal.ops",
    found="scores, for a choice in another op",
    kind=ReasonKind.MISSING,
)


def _indexer(device: DeviceSpec) -> Offer:
    def check(r: IndexLogitsRequest) -> list[Reason]:
        return [_NO_OP_OF_THAT_SHAPE, *_installed(device)]

    return Offer(
        op="index_logits",
        implementation="npu_lightning_indexer",
        tier=Tier.NATIVE,
        summary="Ascend's indexer, which returns the chosen positions; no op of that shape yet",
        check=check,
        load=_load_indexer,
        leaf=(Leaf(kind="symbol", name="aclnnLightningIndexer"),),
        requires=("torch-npu",),
    )


def _causal_mask(device: torch.device) -> torch.Tensor:
    import torch

    ones = torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.bool, device=device)
    return torch.triu(ones, diagonal=1)


def _load_decode() -> Bind:
    import torch_npu

    def bind(
        request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        def kernel(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
        ) -> torch.Tensor:
            # One query per sequence: the batch is the rows of q, and no mask is needed.
            out: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
                q.unsqueeze(1),
                k_cache.flatten(2),
                v_cache.flatten(2),
                actual_seq_lengths_kv=meta.seq_lens.tolist(),
                block_table=meta.block_table,
                num_heads=request.num_heads,
                num_key_value_heads=request.num_kv_heads,
                scale=scale,
                input_layout="BSH",
                block_size=request.block_size,
            )[0]
            return out.squeeze(1)

        return kernel

    return bind


def _load_prefill() -> Bind:
    import torch
    import torch_npu

    def bind(
        request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        masks: list[torch.Tensor] = []

        def gathered(cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
            rows = [
                cache[meta.block_table[i, : -(-length // request.block_size)].long()].flatten(0, 1)[
                    :length
                ]
                for i, length in enumerate(meta.seq_lens.tolist())
            ]
            return torch.cat(rows)

        def kernel(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
        ) -> torch.Tensor:
            if not masks:
                masks.append(_causal_mask(q.device))
            out: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
                q.reshape(-1, request.num_heads, request.head_dim),
                gathered(k_cache, meta),
                gathered(v_cache, meta),
                atten_mask=masks[0] if request.is_causal else None,
                actual_seq_lengths=meta.query_start_loc[1:].tolist(),
                actual_seq_lengths_kv=meta.seq_lens.cumsum(0).tolist(),
                num_heads=request.num_heads,
                num_key_value_heads=request.num_kv_heads,
                scale=scale,
                input_layout="TND",
                sparse_mode=_CAUSAL if request.is_causal else 0,
            )[0]
            return out.flatten(1)

        return kernel

    return bind


def _load_sparse() -> Bind:
    import torch_npu

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, indices: torch.Tensor
        ) -> torch.Tensor:
            rows = kv_cache.unsqueeze(2)
            out: torch.Tensor = torch_npu.npu_sparse_flash_attention(
                q.view(-1, request.num_heads, request.row_dim),
                rows,
                rows,
                indices.unsqueeze(1),
                scale,
                1,
                block_table=meta.block_table,
                actual_seq_lengths_query=meta.query_start_loc[1:],
                actual_seq_lengths_kv=meta.seq_lens,
                layout_query="TND",
                layout_kv="PA_BSND",
                sparse_mode=_CAUSAL if request.is_causal else 0,
            )
            return out.flatten(1)

        return kernel

    return bind


def _load_indexer() -> Bind:
    raise BindingError(
        "ascend.index_logits.npu_lightning_indexer",
        _NO_OP_OF_THAT_SHAPE.required,
        _NO_OP_OF_THAT_SHAPE.found,
        "choose another candidate; selection never chooses this one",
    )
