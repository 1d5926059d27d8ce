"""Attention over caches and what chooses keys for it, in the support matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.ops.attention import AttentionRequest
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest
from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.ops.dense_attention import DenseAttentionRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.kv_compressor import KvCompressorRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.nsa_attention import NsaAttentionRequest
from hal.ops.nsa_compress import NsaCompressRequest
from hal.ops.request import OpRequest, TokenRange
from matrix_sizes import BF16, LONG, TOKENS


def _attention(phase: Any, heads: int, kv_heads: int, head_dim: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "v_head_dim": head_dim,
        "block_size": 64,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "tokens": TOKENS if phase == "decode" else LONG,
    } | more
    return AttentionRequest(
        phase=phase, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **given
    )


def _projected(heads: int, kv_heads: int, head_dim: int, width: int, **more: Any) -> OpRequest:
    few = {"tokens": TokenRange(1, 16)}
    given: dict[str, Any] = {"block_size": 16, "kv_dtype": "bfloat16", **BF16} | few | more
    return AttentionProjectionRequest(
        phase="decode", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        v_head_dim=head_dim, hidden_size=width, **given,
    )  # fmt: skip


def _dense(phase: Any, heads: int, kv_heads: int, head_dim: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "v_head_dim": head_dim,
        "dtype": "bfloat16",
        "tokens": TOKENS if phase == "decode" else LONG,
    } | more
    return DenseAttentionRequest(
        phase=phase, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **given
    )


def _latent(heads: int, kv_format: Any, top_k: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"rope_dim": 64, "block_size": 64, "phase": "decode", **BF16} | more
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
        **BF16,
    )


def _index(heads: int, key_format: Any, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "block_size": 64,
        "dtype": "float8_e4m3fn",
        "phase": "decode",
        "tokens": TOKENS,
    } | more
    return IndexLogitsRequest(num_heads=heads, head_dim=128, key_format=key_format, **given)


def _selection(heads: int, key_format: Any, top_k: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {
        "block_size": 64,
        "dtype": "float8_e4m3fn",
        "phase": "decode",
        "tokens": TOKENS,
    } | more
    return IndexSelectionRequest(
        num_heads=heads, head_dim=128, key_format=key_format, top_k=top_k, **given
    )


def _listed(query_block: int, key_block: int, num_selected: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"phase": "prefill", "dtype": "bfloat16", "tokens": LONG} | more
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
        "tokens": TOKENS if phase == "decode" else LONG,
        "context_tokens": 65_536,
    } | more
    return NsaAttentionRequest(
        phase=phase, num_heads=64, num_kv_heads=4, v_head_dim=128, block_size=64, **given
    )


def _nsa_compress(phase: Any, head_dim: int, **more: Any) -> OpRequest:
    """Of keys (192) or values (128) of `_nsa`, with a hidden layer of 512 values."""
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "tokens": TOKENS if phase == "decode" else LONG,
    } | more
    return NsaCompressRequest(
        phase=phase, num_kv_heads=4, head_dim=head_dim, hidden_size=512, block_size=64, **given
    )


ATTENTION: Mapping[str, Mapping[str, OpRequest]] = {
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
        "v3.2 prefill": _latent(128, "bf16", 2048, phase="prefill", tokens=LONG),
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
        "blocks of 64 decode": _listed(1, 64, 32, phase="decode", tokens=TOKENS),
    },
    "nsa_attention": {
        "paper decode": _nsa("decode"),
        "paper prefill": _nsa("prefill"),
        "128 prefill": _nsa("prefill", head_dim=128),
        "128 float16 decode": _nsa("decode", head_dim=128, dtype="float16"),
        "32 blocks decode": _nsa("decode", head_dim=128, num_selected=32),
    },
    "nsa_compress": {
        "paper keys decode": _nsa_compress("decode", 192),
        "paper keys prefill": _nsa_compress("prefill", 192),
        "paper values float16 prefill": _nsa_compress("prefill", 128, dtype="float16"),
        "paper values float32 prefill": _nsa_compress("prefill", 128, dtype="float32"),
    },
    "index_logits": {
        "v3.2 decode": _index(64, "fp8_132"),
        "v3.2 prefill": _index(64, "fp8_132", phase="prefill", tokens=LONG),
        "v4.1 decode": _index(32, "fp4_68"),
        "bf16 decode": _index(64, "bf16", dtype="bfloat16"),
    },
    "index_selection": {
        "v3.2 decode": _selection(64, "fp8_132", 2048),
        "v3.2 prefill": _selection(64, "fp8_132", 2048, phase="prefill", tokens=LONG),
        "bf16 decode": _selection(64, "bf16", 2048, dtype="bfloat16"),
        "v4.1 publishing": _selection(
            32, "fp4_68", 512, candidate_blocks=2048, publishes_candidates=True
        ),
        "v4.1 limited": _selection(32, "fp4_68", 512, candidate_blocks=2048),
        "v4.1 limited prefill": _selection(
            32, "fp4_68", 512, candidate_blocks=2048, phase="prefill", tokens=LONG
        ),
    },
    "index_top_k": {
        "v3.2": IndexTopKRequest(top_k=2048, tokens=TOKENS),
        "v4.1 publishing": IndexTopKRequest(
            top_k=512, candidate_blocks=2048, publishes_candidates=True, tokens=TOKENS
        ),
        "v4.1 limited": IndexTopKRequest(top_k=512, candidate_blocks=2048, tokens=TOKENS),
        "glm-5.3 pools": IndexTopKRequest(top_k=2048, pool_size=16, tokens=TOKENS),
    },
    "kv_compressor": {
        "v4 overlapping 4": KvCompressorRequest(ratio=4, head_dim=512, is_overlapping=True, **BF16),
        "v4 128": KvCompressorRequest(ratio=128, head_dim=512, is_overlapping=False, **BF16),
    },
}
