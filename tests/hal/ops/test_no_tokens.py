"""A call of no tokens gives results of no rows: a rank without work still takes its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.ops import CATALOGUE
from hal.ops.attention import AttentionMetadata
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest, BlockSparseMetadata
from hal.ops.compressed_attention import CompressedAttentionMetadata, CompressedAttentionRequest
from hal.ops.dense_attention import DenseAttentionRequest
from hal.ops.engram import EngramRequest
from hal.ops.hyper_connection import HyperConnectionRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.nsa_attention import NsaAttentionRequest, NsaCaches, NsaMetadata
from hal.ops.nsa_compress import NsaCompressRequest, NsaCompressWeights
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import OpRequest

F32, I32 = torch.float32, torch.int32
NONE = torch.zeros(1, dtype=I32)  # query_start_loc of no sequence


def no(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


META = AttentionMetadata(NONE, no(0, dtype=I32), no(0, 1, dtype=I32), 0, 8)
BOTH = CompressedAttentionMetadata(
    NONE, no(0, dtype=I32), no(0, 1, dtype=I32), no(0, 1, dtype=I32), 0, 8
)
LISTED = BlockSparseMetadata(NONE, no(0, dtype=I32), no(0, 1, dtype=I32), NONE, 0, 8)
NSA = NsaMetadata(NONE, no(0, dtype=I32), no(0, 1, dtype=I32), no(0, 1, dtype=I32), 0, 8)
CLOSED = CompressorMetadata(NONE, no(0, dtype=I32), no(0, dtype=I32), NONE)
HYPER: dict[str, Any] = {
    "num_streams": 2,
    "hidden_size": 4,
    "sinkhorn_iterations": 2,
    "dtype": "float32",
}
MIXES: dict[str, Any] = {"projection": no(8, 8), "base": no(8), "scale": no(3)}
ENGRAM: dict[str, Any] = {
    "num_heads": 2,
    "max_ngram": 3,
    "row_width": 32,
    "hidden_size": 4,
    "num_streams": 2,
    "dtype": "float32",
}
TABLE: dict[str, Any] = {
    "table": no(1, 33, dtype=torch.uint8),
    "multipliers": torch.ones(3, dtype=torch.int64),
    "primes": torch.ones(2, 2, dtype=torch.int64),
    "offsets": no(2, 2, dtype=torch.int64),
}
NORMS: dict[str, Any] = {"query_weight": no(2, 4), "key_weight": no(2, 4)}

Case = tuple[OpRequest, dict[str, Any], tuple[Any, ...], list[tuple[int, ...]]]
CASES: dict[str, Case] = {
    "mla_attention": (
        MlaAttentionRequest(
            num_heads=2,
            kv_lora_rank=4,
            rope_dim=2,
            block_size=4,
            dtype="float32",
            kv_format="bf16",
            top_k=3,
        ),
        {"scale": 1.0},
        (no(0, 12), no(1, 4, 6), META, no(0, 3, dtype=I32)),
        [(0, 8)],
    ),
    "compressed_attention": (
        CompressedAttentionRequest(
            num_heads=2,
            head_dim=4,
            rope_dim=2,
            window=4,
            top_k=3,
            compress_ratio=4,
            has_sinks=False,
            window_format="bf16",
            main_format="bf16",
            block_size=4,
            dtype="float32",
        ),
        {"scale": 1.0},
        (no(0, 8), no(1, 4, 4), no(1, 4, 4), BOTH, no(0, 3, dtype=I32)),
        [(0, 8)],
    ),
    "block_sparse_attention": (
        BlockSparseAttentionRequest(
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            v_head_dim=3,
            query_block=4,
            key_block=4,
            num_selected=2,
            block_size=4,
            dtype="float32",
        ),
        {"scale": 1.0},
        (no(0, 8), no(1, 4, 1, 4), no(1, 4, 1, 3), no(0, 1, 2, dtype=I32), LISTED),
        [(0, 6)],
    ),
    "nsa_attention": (
        NsaAttentionRequest(
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            v_head_dim=3,
            block_size=4,
            num_selected=5,
            dtype="float32",
            publishes_blocks=True,
        ),
        {"scale": 1.0},
        (no(0, 8), no(0, 2, 3), NsaCaches(*(no(1, 4, 1, d) for d in (4, 3) * 3)), NSA),
        [(0, 6), (0, 1, 5)],
    ),
    "dense_attention": (
        DenseAttentionRequest(
            num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32"
        ),
        {"scale": 1.0},
        (no(1, 2, 0, 4), no(1, 1, 3, 4), no(1, 1, 3, 4)),
        [(1, 0, 2, 4)],
    ),
    "batched_gemm": (
        BatchedGemmRequest(n=3, k=4, dtype="float32"),
        {},
        (no(2, 0, 4), no(2, 4, 3)),
        [(2, 0, 3)],
    ),
    "index_logits": (
        IndexLogitsRequest(
            num_heads=2, head_dim=4, key_format="bf16", block_size=4, dtype="float32"
        ),
        {"scale": 1.0},
        (no(0, 8), no(0, 2), no(1, 4, 4), META),
        [(0, 8)],
    ),
    "index_top_k": (IndexTopKRequest(top_k=3), {}, (no(0, 8), no(0, dtype=I32)), [(0, 3)]),
    "index_top_k.pools": (
        IndexTopKRequest(top_k=4, pool_size=4),
        {},
        (no(0, 8), no(0, dtype=I32)),
        [(0, 7)],
    ),
    "index_top_k.publish": (
        IndexTopKRequest(top_k=3, candidate_blocks=2, publishes_candidates=True),
        {},
        (no(0, 8), no(0, dtype=I32)),
        [(0, 3), (0, 2)],
    ),
    "index_selection": (
        IndexSelectionRequest(
            num_heads=2, head_dim=4, key_format="bf16", block_size=4, dtype="float32", top_k=3
        ),
        {"scale": 1.0},
        (no(0, 8), no(0, 2), no(1, 4, 4), META),
        [(0, 3)],
    ),
    "kv_compressor": (
        KvCompressorRequest(ratio=4, head_dim=4, is_overlapping=True, dtype="float32"),
        {"norm_weight": no(4), "eps": 1e-6},
        (no(0, 8), no(0, 8), no(1, 8, 2, 8), CLOSED),
        [(0, 4)],
    ),
    "moe_router": (
        MoeRouterRequest(
            scoring="sigmoid", num_experts=8, top_k=2, num_groups=4, num_groups_picked=2
        ),
        {},
        (no(0, 8),),
        [(0, 2), (0, 2)],
    ),
    "moe_dispatch.permute": (
        MoeDispatchRequest(kind="permute", num_experts=8, top_k=2, hidden_size=4, dtype="float32"),
        {},
        (no(0, 4), no(0, 2, dtype=I32)),
        [(0, 4), (9,), (0,)],
    ),
    "moe_dispatch.combine": (
        MoeDispatchRequest(kind="combine", num_experts=8, top_k=2, hidden_size=4, dtype="float32"),
        {},
        (no(0, 4), no(0, dtype=I32), no(0, 2)),
        [(0, 4)],
    ),
    "layer_norm": (
        LayerNormRequest(hidden_size=4, has_bias=False, dtype="float32"),
        {"weight": no(4), "eps": 1e-6},
        (no(0, 4),),
        [(0, 4)],
    ),
    "hyper_connection.pre": (
        HyperConnectionRequest(kind="pre", **HYPER),
        MIXES,
        (no(0, 2, 4),),
        [(0, 4), (0, 2), (0, 2, 2)],
    ),
    "hyper_connection.post": (
        HyperConnectionRequest(kind="post", **HYPER),
        {},
        (no(0, 4), no(0, 2, 4), no(0, 2), no(0, 2, 2)),
        [(0, 2, 4)],
    ),
    "engram.gather": (
        EngramRequest(kind="gather", **ENGRAM),
        TABLE,
        (no(0, 3, dtype=torch.int64),),
        [(0, 4 * 32)],
    ),
    "engram.mix": (
        EngramRequest(kind="mix", **ENGRAM),
        NORMS,
        (no(0, 2, 4), no(0, 12)),
        [(0, 2, 4)],
    ),
    "quantize": (
        QuantizeRequest(
            group_size=16, out_dtype="nvfp4", scale_dtype="e4m3", width=32, dtype="float32"
        ),
        {},
        (no(0, 32),),
        [(0, 16), (0, 2)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_tokens_give_no_rows(name: str) -> None:
    request, static, inputs, shapes = CASES[name]
    got = CATALOGUE[request.op].reference(request, **static)(*inputs)
    results = list(got) if isinstance(got, tuple) else [got]
    assert [tuple(r.shape) for r in results] == shapes


@pytest.mark.parametrize("name", ["bf16", "fp8_656"])
def test_no_rows_are_written(name: Any) -> None:
    request = KvWriteRequest(
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=0,
        block_size=2,
        dtype="float32",
        kv_dtype="uint8",
        kv_format=name,
    )
    cache = no(2, 2, 576) if name == "bf16" else no(2, 2 * 656, dtype=torch.uint8)
    before = cache.clone()
    CATALOGUE["kv_write"].reference(request)(no(0, 576), cache, no(0, dtype=torch.int64))
    assert torch.equal(cache, before)


def test_no_entries_are_written() -> None:
    request = NsaCompressRequest(
        num_kv_heads=1, head_dim=3, hidden_size=5, block_size=4, dtype="float32"
    )
    weights = NsaCompressWeights(w1=no(5, 96), w2=no(3, 5), position=no(32, 3))
    entries = torch.ones(1, 4, 1, 3)
    CATALOGUE["nsa_compress"].reference(request, weights=weights)(no(1, 4, 1, 3), entries, NSA)
    assert (entries == 1).all()
