"""The requests that the support matrix asks every candidate about: calls of real models, by name.

Their order is the order of the letters in docs/support-matrix.csv, so a new one goes to the end of
its op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionRequest
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.ops.dense_attention import DenseAttentionRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.engram import EngramRequest
from hal.ops.formats import FORMATS
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
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import OpRequest, TokenRange
from hal.ops.rope import RopeRequest
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.ops.sampling import TopKTopPRequest

_TOKENS = TokenRange(1, 64)
_LONG = TokenRange(1024, 8192)
_BF16 = {"dtype": "bfloat16", "tokens": _TOKENS}


def _attention(phase: Any, heads: int, kv_heads: int, head_dim: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "v_head_dim": head_dim,
        "block_size": 64,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "tokens": _TOKENS if phase == "decode" else _LONG,
    } | more
    return AttentionRequest(
        phase=phase, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **given
    )


def _projected(heads: int, kv_heads: int, head_dim: int, width: int, **more: Any) -> OpRequest:
    few = {"tokens": TokenRange(1, 16)}
    given: dict[str, Any] = {"block_size": 16, "kv_dtype": "bfloat16", **_BF16} | few | more
    return AttentionProjectionRequest(
        phase="decode", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        v_head_dim=head_dim, hidden_size=width, **given,
    )  # fmt: skip


def _dense(phase: Any, heads: int, kv_heads: int, head_dim: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "v_head_dim": head_dim,
        "dtype": "bfloat16",
        "tokens": _TOKENS if phase == "decode" else _LONG,
    } | more
    return DenseAttentionRequest(
        phase=phase, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **given
    )


def _latent(heads: int, kv_format: Any, top_k: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"rope_dim": 64, "block_size": 64, "phase": "decode", **_BF16} | more
    return MlaAttentionRequest(
        num_heads=heads, kv_lora_rank=512, kv_format=kv_format, top_k=top_k, **given
    )


def _compressed(window: Any, main: Any, top_k: int, ratio: int) -> OpRequest:
    return CompressedAttentionRequest(
        num_heads=64,
        head_dim=512,
        rope_dim=64,
        window=128,
        top_k=top_k,
        compress_ratio=ratio,
        has_sinks=True,
        window_format=window,
        main_format=main,
        block_size=64,
        phase="decode",
        **_BF16,
    )


def _gemm(name: str, **more: Any) -> OpRequest:
    dtype = name if FORMATS[name].is_dense else "bfloat16"
    given: dict[str, Any] = {"n": 4096, "k": 7168, "dtype": dtype, "tokens": _TOKENS} | more
    return GemmRequest(weight_format=FORMATS[name], **given)


def _fused(name: str, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"n": 4096, "k": 7168, **_BF16} | more
    return FusedGemmRequest(weight_format=FORMATS[name], **given)


def _rounded(name: str, group: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"out_dtype": "fp8_e4m3fn", "out_group_size": group}
    return _fused(name, epilogue="silu_gated", **given, **more)


def _norm_quantize(out_dtype: Any, group: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"hidden_size": 7168, **_BF16} | more
    return NormQuantizeRequest(out_dtype=out_dtype, group_size=group, **given)


def _gemm_norm(name: str) -> OpRequest:
    return GemmNormRequest(n=7168, k=4096, weight_format=FORMATS[name], **_BF16)


def _experts(name: str, **more: Any) -> OpRequest:
    return GroupedGemmRequest(
        num_experts=256,
        experts_per_token=8,
        n=4096,
        k=7168,
        weight_format=FORMATS[name],
        **(_BF16 | more),
    )


def _index(heads: int, key_format: Any, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "block_size": 64,
        "dtype": "float8_e4m3fn",
        "phase": "decode",
        "tokens": _TOKENS,
    } | more
    return IndexLogitsRequest(num_heads=heads, head_dim=128, key_format=key_format, **given)


def _selection(heads: int, key_format: Any, top_k: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "block_size": 64,
        "dtype": "float8_e4m3fn",
        "phase": "decode",
        "tokens": _TOKENS,
    } | more
    return IndexSelectionRequest(
        num_heads=heads, head_dim=128, key_format=key_format, top_k=top_k, **given
    )


def _rope_kv_write(heads: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"num_kv_heads": 8, "kv_dtype": "bfloat16"} | more
    return RopeKvWriteRequest(
        num_heads=heads,
        head_dim=128,
        v_head_dim=128,
        rotary_dim=128,
        block_size=16,
        **_BF16,
        **given,
    )


def _latent_kv_write(kv_format: Any, row_dim: int, norm_dim: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"num_heads": 16, "head_dim": 512, "q_rotary_start": 448, **_BF16}
    if not more.get("num_heads", 1):
        given["q_rotary_start"] = 0
    return LatentKvWriteRequest(
        row_dim=row_dim,
        rotary_dim=64,
        row_rotary_start=row_dim - 64,
        norm_dim=norm_dim,
        block_size=64,
        kv_format=kv_format,
        **given | more,
    )


def _reduce_norm(transport: str, p2p: Any, tokens: int) -> OpRequest:
    """Of 8 ranks, as the sums of the collectives below."""
    return AllReduceNormRequest(
        kind="all_reduce",
        world_size=8,
        width=5120,
        dtype="bfloat16",
        transport=transport,
        p2p=p2p,
        tokens=TokenRange(1, tokens),
    )


def _all_reduce(world: int, transport: str, p2p: Any, tokens: int, **more: Any) -> OpRequest:
    """5120 values of bfloat16 per token: 10 KiB for one, 80 MiB for 8192."""
    given: dict[str, Any] = {"kind": "all_reduce", "dtype": "bfloat16", "width": 5120} | more
    return CollectiveRequest(
        world_size=world, transport=transport, p2p=p2p, tokens=TokenRange(1, tokens), **given
    )


def _kv(kv_format: Any, head_dim: int) -> OpRequest:
    return KvWriteRequest(
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=0,
        block_size=64,
        kv_dtype="uint8",
        kv_format=kv_format,
        **_BF16,
    )


def _listed(query_block: int, key_block: int, num_selected: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"phase": "prefill", "dtype": "bfloat16", "tokens": _LONG} | more
    return BlockSparseAttentionRequest(
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        query_block=query_block,
        key_block=key_block,
        num_selected=num_selected,
        block_size=64,
        **given,
    )


def _nsa(phase: Any, **more: Any) -> OpRequest:
    """The sizes of https://arxiv.org/abs/2502.11089, section 4.1."""
    given: dict[str, Any] = {
        "head_dim": 192,
        "dtype": "bfloat16",
        "tokens": _TOKENS if phase == "decode" else _LONG,
        "context_tokens": 65_536,
    } | more
    return NsaAttentionRequest(
        phase=phase, num_heads=64, num_kv_heads=4, v_head_dim=128, block_size=64, **given
    )


def _router(scoring: Any, experts: int, top_k: int, **more: Any) -> OpRequest:
    return MoeRouterRequest(
        scoring=scoring, num_experts=experts, top_k=top_k, tokens=_TOKENS, **more
    )


def _quantize(out: Any, group: int, scale: Any) -> OpRequest:
    return QuantizeRequest(group_size=group, out_dtype=out, scale_dtype=scale, width=7168, **_BF16)


REQUESTS: Mapping[str, Mapping[str, OpRequest]] = {
    "attention": {
        "llama-70b decode": _attention("decode", 64, 8, 128),
        "llama-70b prefill": _attention("prefill", 64, 8, 128),
        "float16 decode": _attention("decode", 32, 4, 128, dtype="float16", kv_dtype="float16"),
        "float32 prefill": _attention("prefill", 9, 3, 64, dtype="float32", kv_dtype="float32"),
        "softcap 256 prefill": _attention("prefill", 16, 8, 256, softcap=50.0),
        "sinks and window decode": _attention("decode", 64, 8, 64, has_sinks=True, window=128),
        "fp8 cache decode": _attention("decode", 64, 8, 128, kv_dtype="float8_e4m3fn"),
        "pages of 256 decode": _attention("decode", 64, 8, 128, block_size=256),
        "pages of 16, one head decode": _attention("decode", 64, 1, 128, block_size=16),
        "192 and 128 prefill": _attention("prefill", 128, 128, 192, v_head_dim=128),
    },
    "attention_projection": {
        "llama-70b decode": _projected(64, 8, 128, 8192),
        "llama-70b decode, one of 8 ranks": _projected(8, 1, 128, 8192),
        "sinks and window decode": _projected(64, 8, 64, 2880, has_sinks=True, window=128),
        "float32 decode": _projected(9, 3, 64, 576, dtype="float32", kv_dtype="float32"),
    },
    "mla_attention": {
        "v3.2 decode": _latent(128, "fp8_656", 2048),
        "v3.2 prefill": _latent(128, "bf16", 2048, phase="prefill", tokens=_LONG),
        "glm-5 decode": _latent(64, "fp8_656", 2048),
        "16 heads decode": _latent(16, "fp8_656", 2048),
        "16 heads bf16 decode": _latent(16, "bf16", 2048),
        "1152 rows decode": _latent(64, "fp8_656", 1152),
        "dense decode": _latent(128, "bf16", 0),
        "no rope decode": _latent(32, "bf16", 2048, rope_dim=0),
    },
    "compressed_attention": {
        "v4 listed": _compressed("v4_584", "v4_584", 512, 4),
        "v4 all entries": _compressed("v4_584", "v4_584", 0, 128),
        "v4 window": _compressed("v4_584", "v4_584", 0, 0),
        "v4.1 listed": _compressed("v41_528", "fp4_288", 512, 2),
        "bf16 listed": _compressed("bf16", "bf16", 512, 4),
    },
    "dense_attention": {
        "llama prefill": _dense("prefill", 32, 8, 128),
        "llama padded prefill": _dense("prefill", 32, 8, 128, mask="bool"),
        "llama decode": _dense("decode", 32, 8, 128),
        "float32 encoder": _dense("prefill", 12, 12, 64, dtype="float32", is_causal=False),
        "window prefill": _dense("prefill", 64, 8, 64, mask="bool", window=128, has_sinks=True),
        "softcap 256 prefill": _dense("prefill", 16, 8, 256, softcap=50.0),
        "192 and 128 prefill": _dense("prefill", 128, 128, 192, v_head_dim=128),
        "listed decode": _dense("decode", 128, 128, 192, mask="bool", list_width=2048),
        "bias prefill": _dense("prefill", 12, 12, 64, mask="bias", is_causal=False),
        "float64 encoder": _dense("prefill", 12, 12, 64, dtype="float64", is_causal=False),
    },
    "block_sparse_attention": {
        "blocks of 64 prefill": _listed(64, 64, 32),
        "blocks of 64 and window prefill": _listed(64, 64, 32, window=512),
        "a list a query prefill": _listed(1, 64, 16),
        "float32 prefill": _listed(64, 64, 32, dtype="float32"),
        "blocks of 64 decode": _listed(1, 64, 32, phase="decode", tokens=_TOKENS),
    },
    "nsa_attention": {
        "paper decode": _nsa("decode"),
        "paper prefill": _nsa("prefill"),
        "128 prefill": _nsa("prefill", head_dim=128),
        "128 float16 decode": _nsa("decode", head_dim=128, dtype="float16"),
        "32 blocks decode": _nsa("decode", head_dim=128, num_selected=32),
    },
    "index_logits": {
        "v3.2 decode": _index(64, "fp8_132"),
        "v3.2 prefill": _index(64, "fp8_132", phase="prefill", tokens=_LONG),
        "v4.1 decode": _index(32, "fp4_68"),
        "bf16 decode": _index(64, "bf16", dtype="bfloat16"),
    },
    "index_selection": {
        "v3.2 decode": _selection(64, "fp8_132", 2048),
        "v3.2 prefill": _selection(64, "fp8_132", 2048, phase="prefill", tokens=_LONG),
        "bf16 decode": _selection(64, "bf16", 2048, dtype="bfloat16"),
        "v4.1 publishing": _selection(
            32, "fp4_68", 512, candidate_blocks=2048, publishes_candidates=True
        ),
        "v4.1 limited": _selection(32, "fp4_68", 512, candidate_blocks=2048),
        "v4.1 limited prefill": _selection(
            32, "fp4_68", 512, candidate_blocks=2048, phase="prefill", tokens=_LONG
        ),
    },
    "index_top_k": {
        "v3.2": IndexTopKRequest(top_k=2048, tokens=_TOKENS),
        "v4.1 publishing": IndexTopKRequest(
            top_k=512, candidate_blocks=2048, publishes_candidates=True, tokens=_TOKENS
        ),
        "v4.1 limited": IndexTopKRequest(top_k=512, candidate_blocks=2048, tokens=_TOKENS),
        "glm-5.3 pools": IndexTopKRequest(top_k=2048, pool_size=16, tokens=_TOKENS),
    },
    "kv_compressor": {
        "v4 overlapping 4": KvCompressorRequest(
            ratio=4, head_dim=512, is_overlapping=True, **_BF16
        ),
        "v4 128": KvCompressorRequest(ratio=128, head_dim=512, is_overlapping=False, **_BF16),
    },
    "gemm": {name: _gemm(name) for name in FORMATS}
    | {
        "bfloat16 bias": _gemm("bfloat16", has_bias=True),
        "bfloat16 gated": _gemm("bfloat16", epilogue="silu_gated"),
        "fp8_block128_a8 K 1000": _gemm("fp8_block128_a8", k=1000, n=1000),
        "bfloat16 to float32": _gemm("bfloat16", n=256, out_dtype="float32"),
    },
    "grouped_gemm": {
        name: _experts(name)
        for name in (
            "bfloat16",
            "int8_channel_a8",
            "fp8_block128_a8",
            "fp8_block128_ue8m0_a8",
            "fp8_block32_ue8m0_a8",
            "mxfp4",
            "mxfp4_a8",
            "nvfp4_a4",
        )
    }
    | {
        f"{name} gated, clamped": _experts(name, epilogue="silu_gated", clamp=10.0)
        for name in ("bfloat16", "fp8_block128_ue8m0_a8", "mxfp4_a8")
    },
    "batched_gemm": {
        "index scores": BatchedGemmRequest(n=0, k=128, dtype="float32", tokens=_TOKENS),
        "bfloat16": BatchedGemmRequest(n=1024, k=4096, **_BF16),
        "float64": BatchedGemmRequest(n=16, k=16, dtype="float64", tokens=_TOKENS),
    },
    "moe_router": {
        "v3 sigmoid": _router(
            "sigmoid", 256, 8, num_groups=8, num_groups_picked=4, has_bias=True, route_scale=2.5
        ),
        "glm-5 sigmoid": _router("sigmoid", 256, 8, has_bias=True, route_scale=2.5),
        "qwen softmax": _router("softmax", 128, 8),
        "v4 sqrt_softplus": _router("sqrt_softplus", 256, 6, has_bias=True, route_scale=1.5),
        "v4 hash": _router("hash", 256, 6, route_scale=1.5),
    },
    "moe_dispatch": {
        kind: MoeDispatchRequest(kind=kind, num_experts=256, top_k=8, hidden_size=7168, **_BF16)
        for kind in ("permute", "combine")
    },
    "hyper_connection": {
        kind: HyperConnectionRequest(
            kind=kind, num_streams=4, hidden_size=4096, sinkhorn_iterations=20, **_BF16
        )
        for kind in ("pre", "post")
    },
    "quantize": {
        "fp8 groups of 128": _quantize("fp8_e4m3fn", 128, "float32"),
        "fp8 groups of 128 ue8m0": _quantize("fp8_e4m3fn", 128, "ue8m0"),
        "fp8 groups of 32 ue8m0": _quantize("fp8_e4m3fn", 32, "ue8m0"),
        "int8 rows": _quantize("int8", 0, "float32"),
        "mxfp4": _quantize("mxfp4", 32, "ue8m0"),
        "nvfp4": _quantize("nvfp4", 16, "e4m3"),
    },
    "norm.rms": {
        "bfloat16": RmsNormRequest(hidden_size=7168, **_BF16),
        "residual": RmsNormRequest(hidden_size=7168, has_residual=True, **_BF16),
        "heads": RmsNormRequest(hidden_size=128, rows_per_token=64, **_BF16),
        "float32": RmsNormRequest(hidden_size=576, dtype="float32", tokens=_TOKENS),
        "int8 rows": RmsNormRequest(hidden_size=7168, quantize="int8_per_token", **_BF16),
    },
    "norm_quantize": {
        "fp8 groups of 128": _norm_quantize("fp8_e4m3fn", 128, has_residual=True, keeps_rows=True),
        "fp8 groups of 32 ue8m0": _norm_quantize("fp8_e4m3fn", 32, scale_dtype="ue8m0"),
        "fp8 rows": _norm_quantize("fp8_e4m3fn", 0),
        "int8 rows": _norm_quantize("int8", 0),
    },
    "layer_norm": {"indexer keys": LayerNormRequest(hidden_size=128, has_bias=True, **_BF16)},
    "rope": {
        "half split": RopeRequest(
            num_heads=64, num_kv_heads=8, head_dim=128, rotary_dim=128, **_BF16
        ),
        "interleaved": RopeRequest(
            num_heads=64,
            num_kv_heads=1,
            head_dim=64,
            rotary_dim=64,
            style="interleaved",
            **_BF16,
        ),
        "inverse, trailing": RopeRequest(
            num_heads=64,
            num_kv_heads=0,
            head_dim=512,
            rotary_dim=64,
            rotary_start=448,
            is_inverse=True,
            style="interleaved",
            **_BF16,
        ),
    },
    "activation.gated": {
        "silu": GatedActivationRequest(width=2048, **_BF16),
        "clamped silu": GatedActivationRequest(width=2048, clamp=10.0, **_BF16),
        "gelu": GatedActivationRequest(width=2048, activation="gelu_tanh", **_BF16),
    },
    "embedding": {"bfloat16": EmbeddingRequest(vocab_size=129280, hidden_size=7168, **_BF16)},
    "kv_write": {
        "bfloat16": KvWriteRequest(
            num_kv_heads=8,
            head_dim=128,
            v_head_dim=128,
            block_size=64,
            kv_dtype="bfloat16",
            **_BF16,
        ),
        "fp8_656": _kv("fp8_656", 576),
        "v4_584": _kv("v4_584", 512),
        "fp4_288": _kv("fp4_288", 512),
    },
    "sample.top_k_top_p": {"129280": TopKTopPRequest(vocab_size=129280, tokens=_TOKENS)},
    "engram": {
        kind: EngramRequest(
            num_heads=8,
            max_ngram=4,
            row_width=256,
            hidden_size=5120,
            num_streams=4,
            kind=kind,
            **_BF16,
        )
        for kind in ("gather", "mix")
    },
    "collective": {
        "2 on PCIe, no P2P, 10 KiB": _all_reduce(2, "pcie", "none", 1),
        "8 on PCIe, no P2P, 10 KiB": _all_reduce(8, "pcie", "none", 1),
        "8 on PCIe, P2P claimed, 10 KiB": _all_reduce(8, "pcie", "claimed", 1),
        "8 on PCIe, P2P verified, 10 KiB": _all_reduce(8, "pcie", "verified", 1),
        "8 on PCIe, P2P verified, 640 KiB": _all_reduce(8, "pcie", "verified", 64),
        "8 on PCIe, P2P verified, 80 MiB": _all_reduce(8, "pcie", "verified", 8192),
        "8 on PCIe across sockets, 10 KiB": _all_reduce(8, "pcie", "verified", 1, distance="SYS"),
        "8 on NVLink, verified, 10 KiB": _all_reduce(8, "nvlink", "verified", 1),
        "8 on NVLink, claimed, 10 KiB": _all_reduce(8, "nvlink", "claimed", 1),
        "4 on NVLink bridges, 10 KiB": _all_reduce(4, "nvlink", "verified", 1, is_full_mesh=False),
        "8 on xGMI, verified, 10 KiB": _all_reduce(8, "xgmi", "verified", 1),
        "8 on the vendor's fabric": _all_reduce(8, "hccs", "claimed", 64),
        "8 on NVLink, verified, 640 KiB": _all_reduce(8, "nvlink", "verified", 64),
        "8 on NVLink, verified, 80 MiB": _all_reduce(8, "nvlink", "verified", 8192),
        "all_gather, 8 on PCIe": _all_reduce(8, "pcie", "claimed", 64, kind="all_gather"),
    },
    "all_reduce_norm": {
        "8 on PCIe, P2P verified, 10 KiB": _reduce_norm("pcie", "verified", 1),
        "8 on PCIe, P2P claimed, 10 KiB": _reduce_norm("pcie", "claimed", 1),
        "8 on NVLink, verified, 10 KiB": _reduce_norm("nvlink", "verified", 1),
        "8 on xGMI, verified, 10 KiB": _reduce_norm("xgmi", "verified", 1),
        "8 on NVLink, verified, 640 KiB": _reduce_norm("nvlink", "verified", 64),
    },
    "rope_kv_write": {
        "llama-70b": _rope_kv_write(64),
        "qwen3, one of 8 ranks": _rope_kv_write(8, num_kv_heads=1, has_qk_norm=True),
        "fp8 cache": _rope_kv_write(64, kv_dtype="float8_e4m3fn"),
    },
    "latent_kv_write": {
        "deepseek-v3.2": _latent_kv_write("fp8_656", 576, 512, head_dim=192, q_rotary_start=128),
        "deepseek-v4 window": _latent_kv_write("v4_584", 512, 512, has_q_norm=True),
        "deepseek-v4 index keys": _latent_kv_write("fp8_132", 128, 0, num_heads=0, head_dim=0),
        "bf16": _latent_kv_write("bf16", 576, 512, head_dim=192, q_rotary_start=128),
    },
    "fused_gemm": {
        "bfloat16 with a residual": _fused("bfloat16", has_residual=True),
        "FP8 128x128 with a residual": _fused("fp8_block128_a8", has_residual=True),
        "FP8 128x128 gated and rounded": _rounded("fp8_block128_a8", 128),
        "FP8 128x128 ue8m0 with a clamped gate": _fused(
            "fp8_block128_ue8m0_a8", epilogue="silu_gated", clamp=10.0
        ),
        "FP8 32x32 ue8m0 gated and rounded": _rounded(
            "fp8_block32_ue8m0_a8", 32, out_scale_dtype="ue8m0"
        ),
        "int4 with a residual": _fused("int4_g32", has_residual=True),
    },
    "gemm_norm": {
        "bfloat16": _gemm_norm("bfloat16"),
        "FP8 128x128": _gemm_norm("fp8_block128_a8"),
        "int4": _gemm_norm("int4_g32"),
    },
}
