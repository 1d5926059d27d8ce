"""What every request promises: frozen, hashable, plain, labelled, and a real count of its work."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hal.errors import RequestError
from hal.ops import CATALOGUE, TokenRange
from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionRequest
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest
from hal.ops.collective import COLLECTIVE_KINDS, CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.ops.dense_attention import DenseAttentionRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.engram import EngramRequest
from hal.ops.formats import FORMATS, WeightFormat
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.hyper_connection import HyperConnectionRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.kv_compressor import KvCompressorRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.norm_quantize import NormQuantizeRequest
from hal.ops.nsa_attention import NsaAttentionRequest
from hal.ops.nsa_compress import NsaCompressRequest
from hal.ops.quantize import QuantizeRequest
from hal.ops.rope import RopeRequest
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.ops.sampling import TopKTopPRequest

ATTENTION = AttentionRequest(
    num_heads=8,
    num_kv_heads=2,
    head_dim=24,
    v_head_dim=24,
    block_size=16,
    dtype="float64",
    kv_dtype="float64",
    phase="prefill",
)
ATTENTION_PROJECTION = AttentionProjectionRequest(
    num_heads=8,
    num_kv_heads=2,
    head_dim=24,
    v_head_dim=24,
    hidden_size=40,
    block_size=16,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    phase="decode",
)
MLA = MlaAttentionRequest(
    num_heads=16,
    kv_lora_rank=512,
    rope_dim=64,
    block_size=64,
    dtype="bfloat16",
    kv_format="bf16",
    top_k=2048,
)
COMPRESSED = CompressedAttentionRequest(
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    window=128,
    top_k=512,
    compress_ratio=4,
    has_sinks=True,
    window_format="bf16",
    main_format="bf16",
    block_size=64,
    dtype="bfloat16",
)
DENSE = DenseAttentionRequest(
    num_heads=8,
    num_kv_heads=2,
    head_dim=24,
    v_head_dim=16,
    dtype="float32",
    mask="bool",
    phase="prefill",
)
BLOCK_SPARSE = BlockSparseAttentionRequest(
    num_heads=8,
    num_kv_heads=2,
    head_dim=24,
    v_head_dim=16,
    query_block=16,
    key_block=32,
    num_selected=4,
    block_size=16,
    dtype="float32",
    phase="prefill",
)
NSA = NsaAttentionRequest(
    num_heads=8,
    num_kv_heads=2,
    head_dim=24,
    v_head_dim=16,
    block_size=16,
    dtype="float32",
    phase="prefill",
)
NSA_COMPRESS = NsaCompressRequest(
    num_kv_heads=2,
    head_dim=24,
    hidden_size=40,
    block_size=16,
    dtype="float32",
    phase="prefill",
)
INDEX = IndexLogitsRequest(
    num_heads=64, head_dim=128, key_format="bf16", block_size=64, dtype="bfloat16"
)
SELECTION = IndexSelectionRequest(
    num_heads=64, head_dim=128, key_format="bf16", block_size=64, dtype="bfloat16", top_k=512
)
TOP_K = IndexTopKRequest(top_k=512)
ROUTER = MoeRouterRequest(
    scoring="sigmoid", num_experts=64, top_k=8, num_groups=8, num_groups_picked=4, has_bias=True
)
DISPATCH = MoeDispatchRequest(
    kind="permute", num_experts=64, top_k=8, hidden_size=32, dtype="bfloat16"
)
HYPER = HyperConnectionRequest(
    kind="pre", num_streams=4, hidden_size=32, sinkhorn_iterations=20, dtype="bfloat16"
)
QUANTIZE = QuantizeRequest(
    group_size=128, out_dtype="fp8_e4m3fn", scale_dtype="float32", width=512, dtype="bfloat16"
)
ENGRAM = EngramRequest(
    num_heads=8, max_ngram=4, row_width=256, hidden_size=32, num_streams=4, dtype="bfloat16"
)
ROPE = RopeRequest(num_heads=2, num_kv_heads=1, head_dim=16, rotary_dim=4, dtype="float32")
KV_WRITE = KvWriteRequest(
    num_kv_heads=1, head_dim=4, v_head_dim=4, block_size=4, dtype="float32", kv_dtype="float32"
)
ROPE_KV_WRITE = RopeKvWriteRequest(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    v_head_dim=16,
    rotary_dim=4,
    block_size=4,
    dtype="float32",
    kv_dtype="float32",
)
GATED_EXPERTS = GroupedGemmRequest(
    num_experts=4,
    experts_per_token=1,
    n=2,
    k=2,
    dtype="float32",
    weight_format=FORMATS["float32"],
    epilogue="silu_gated",
    clamp=10.0,
)
FUSED = FusedGemmRequest(
    n=256,
    k=8,
    dtype="bfloat16",
    weight_format=FORMATS["bfloat16"],
    epilogue="silu_gated",
    clamp=7.0,
    out_dtype="fp8_e4m3fn",
    out_group_size=32,
)


REQUESTS = [
    ATTENTION,
    dataclasses.replace(ATTENTION, phase="decode", has_sinks=True, softcap=30.0),
    dataclasses.replace(ATTENTION, kv_dtype="float8_e4m3fn", has_kv_scales=True),
    ATTENTION_PROJECTION,
    GemmRequest(n=4, k=8, dtype="float32", weight_format=FORMATS["int4_g32"]),
    FUSED,
    GemmNormRequest(n=4, k=8, dtype="float32", weight_format=FORMATS["float32"]),
    GroupedGemmRequest(
        num_experts=4,
        experts_per_token=1,
        n=2,
        k=2,
        dtype="float32",
        weight_format=FORMATS["float32"],
    ),
    GATED_EXPERTS,
    RmsNormRequest(hidden_size=8, dtype="float32"),
    NormQuantizeRequest(hidden_size=8, dtype="float32", out_dtype="fp8_e4m3fn", group_size=4),
    ROPE,
    GatedActivationRequest(width=4, dtype="float32"),
    EmbeddingRequest(vocab_size=4, hidden_size=2, dtype="float32"),
    KV_WRITE,
    ROPE_KV_WRITE,
    dataclasses.replace(ROPE_KV_WRITE, kv_dtype="float8_e4m3fn", has_kv_scales=True),
    dataclasses.replace(KV_WRITE, kv_dtype="float8_e4m3fn", has_scales=True),
    LatentKvWriteRequest(
        num_heads=2,
        head_dim=16,
        row_dim=16,
        rotary_dim=4,
        q_rotary_start=2,
        row_rotary_start=2,
        norm_dim=8,
        block_size=4,
        dtype="bfloat16",
        kv_format="bf16",
    ),
    TopKTopPRequest(vocab_size=5),
    *(
        CollectiveRequest(kind=kind, world_size=2, width=8, dtype="float64")
        for kind in COLLECTIVE_KINDS
    ),
    AllReduceNormRequest(kind="all_reduce", world_size=2, width=8, dtype="float64"),
    MLA,
    dataclasses.replace(MLA, phase="decode"),
    DENSE,
    dataclasses.replace(DENSE, phase="decode", window=8, list_width=4),
    BatchedGemmRequest(n=0, k=8, dtype="float32"),
    COMPRESSED,
    dataclasses.replace(COMPRESSED, phase="decode", top_k=0, compress_ratio=128),
    BLOCK_SPARSE,
    dataclasses.replace(BLOCK_SPARSE, query_block=1, window=8),
    NSA,
    dataclasses.replace(NSA, phase="decode", publishes_blocks=True),
    NSA_COMPRESS,
    dataclasses.replace(NSA_COMPRESS, phase="decode"),
    INDEX,
    SELECTION,
    TOP_K,
    KvCompressorRequest(ratio=4, head_dim=32, is_overlapping=True, dtype="bfloat16"),
    ROUTER,
    DISPATCH,
    dataclasses.replace(DISPATCH, kind="combine"),
    HYPER,
    dataclasses.replace(HYPER, kind="post"),
    dataclasses.replace(HYPER, kind="head"),
    QUANTIZE,
    LayerNormRequest(hidden_size=8, has_bias=True, dtype="float32"),
    ENGRAM,
    dataclasses.replace(ENGRAM, kind="mix"),
]
# Another valid value where doubling a number or adding a letter makes a request inconsistent.
OTHERS: dict[str, Any] = {
    "mla_attention.kv_format": "fp8_656",
    "compressed_attention.window_format": "v4_584",
    "compressed_attention.main_format": "fp4_288",
    "compressed_attention.rope_dim": 32,
    "dense_attention.mask": "bias",
    "nsa_attention.compress_stride": 8,
    "index_logits.key_format": "fp8_132",
    "index_top_k.pool_size": 16,
    "index_top_k.candidate_blocks": 2048,
    "index_top_k.publishes_candidates": None,  # only with candidate_blocks
    "index_selection.key_format": "fp8_132",
    "index_selection.pool_size": None,  # a part of compress_ratio
    "index_selection.candidate_blocks": 2048,
    "index_selection.publishes_candidates": None,  # only with candidate_blocks
    "moe_router.scoring": "sqrt_softplus",
    "moe_router.num_groups": 4,
    "moe_router.num_groups_picked": 2,
    "all_reduce_norm.kind": None,  # it has one
    "moe_dispatch.kind": None,  # two of REQUESTS differ in it
    "hyper_connection.kind": None,
    "engram.kind": None,
    "latent_kv_write.kv_format": "fp16",
    "norm_quantize.out_dtype": "int8",
    "norm_quantize.scale_dtype": "ue8m0",
    "quantize.out_dtype": "int8",
    "quantize.scale_dtype": "ue8m0",
    "fused_gemm.epilogue": None,  # only a gated one has a clamp
    "fused_gemm.out_dtype": "fp8_e4m3fnuz",
    "fused_gemm.out_scale_dtype": "ue8m0",
    "gemm_norm.epilogue": None,  # it has none
    "gemm_norm.out_dtype": None,
    "grouped_gemm.epilogue": "silu_gated",
    "grouped_gemm.clamp": None,  # only with a gated epilogue: see the test of its own
    "kv_write.kv_format": None,
    "kv_write.num_kv_heads": 2,
    # Only caches of FP8 have scales.
    "attention.kv_dtype": "float8_e4m3fnuz",
    "attention.has_kv_scales": False,
    "kv_write.kv_dtype": "float8_e4m3fnuz",
    "kv_write.has_scales": False,
    "rope_kv_write.kv_dtype": "float8_e4m3fnuz",
    "rope_kv_write.has_kv_scales": False,
    "rope_kv_write.style": "interleaved",
    "latent_kv_write.row_norm_kind": "layer",
}


def test_every_family_is_in_these_tests() -> None:
    assert {request.op for request in REQUESTS} == set(CATALOGUE)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.label)
def test_requests_are_frozen_hashable_and_plain(request_: Any) -> None:
    family = CATALOGUE[request_.op]
    assert type(request_) is family.request_type
    assert request_.label in family.labels()
    with pytest.raises(dataclasses.FrozenInstanceError):
        request_.phase = "decode"  # type: ignore[misc]  # what must not work
    assert hash(request_) == hash(dataclasses.replace(request_))
    plain = request_.arguments()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    wider = request_.with_tokens(TokenRange(3, 70))
    assert (type(wider), wider.tokens) == (type(request_), TokenRange(3, 70))
    assert wider.arguments() == plain
    assert wider.with_tokens(request_.tokens) == request_
    for tokens in (1, 7):
        assert family.flops(request_, tokens) >= 0
        assert family.bytes_moved(request_, tokens) >= 0


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.label)
def test_every_argument_shows_in_arguments(request_: Any) -> None:
    """Two requests that differ have different arguments: the hash of a plan rests on it."""
    for field in dataclasses.fields(request_):
        value = getattr(request_, field.name)
        if field.name in ("phase", "tokens"):
            continue
        changed: Any
        name = f"{request_.op}.{field.name}"
        if name in OTHERS:
            changed = OTHERS[name]
            if changed is None or changed == value:
                continue
        elif isinstance(value, WeightFormat):
            changed = dataclasses.replace(value, group_size=64)  # another format of that name
        elif isinstance(value, bool):
            changed = not value
        elif isinstance(value, int | float):
            changed = value * 2 + 2 * (value == 0)
        else:
            changed = f"{value}x"
        other = dataclasses.replace(request_, **{field.name: changed})
        assert other.arguments() != request_.arguments(), field.name


def test_a_clamp_shows_in_arguments_and_is_of_a_gated_product_only() -> None:
    other = dataclasses.replace(GATED_EXPERTS, clamp=7.0)
    assert other.arguments() != GATED_EXPERTS.arguments()
    for wrong in ({"clamp": -1.0}, {"epilogue": "none"}):
        with pytest.raises(RequestError, match="clamp"):
            dataclasses.replace(GATED_EXPERTS, **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clamp": -1.0}, "clamp >= 0"),
        ({"epilogue": "silu"}, "no clamp unless"),
        ({"out_group_size": 0}, "out_group_size above 0"),
        ({"out_dtype": ""}, "out_group_size above 0"),
        ({"out_group_size": 96}, "multiple of out_group_size 96"),
        ({"out_scale_dtype": "e4m3"}, "out_scale_dtype"),
    ],
    ids=lambda x: "" if isinstance(x, str) else str(x),
)
def test_fused_products_that_mean_nothing_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        dataclasses.replace(FUSED, **wrong)


@pytest.mark.parametrize("wrong", [{"epilogue": "silu"}, {"out_dtype": "float32"}], ids=str)
def test_a_norm_is_of_the_plain_sum(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="epilogue='none' and out_dtype=''"):
        GemmNormRequest(n=4, k=8, dtype="float32", weight_format=FORMATS["float32"], **wrong)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 1), (-1, 4)])
def test_impossible_token_ranges_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="1 <= low <= high"):
        TokenRange(low, high)
