"""What is done row by row, in the support matrix: routing, norms, rotation, rounding, writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.ops.activation import GatedActivationRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.engram import EngramRequest
from hal.ops.hyper_connection import HyperConnectionRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.norm_quantize import NormQuantizeRequest
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import OpRequest
from hal.ops.rope import RopeRequest
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.ops.sampling import TopKTopPRequest
from matrix_sizes import BF16, TOKENS


def _norm_quantize(out_dtype: Any, group: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"hidden_size": 7168, **BF16} | more
    return NormQuantizeRequest(out_dtype=out_dtype, group_size=group, **given)


def _rope_kv_write(heads: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"num_kv_heads": 8, "kv_dtype": "bfloat16"} | more
    return RopeKvWriteRequest(
        num_heads=heads,
        head_dim=128,
        v_head_dim=128,
        rotary_dim=128,
        block_size=16,
        **BF16,
        **given,
    )


def _latent_kv_write(kv_format: Any, row_dim: int, norm_dim: int, **more: Any) -> OpRequest:
    given: dict[str, Any] = {"num_heads": 16, "head_dim": 512, "q_rotary_start": 448, **BF16}
    given["row_rotary_start"] = row_dim - 64
    if not more.get("num_heads", 1):
        given["q_rotary_start"] = 0
    return LatentKvWriteRequest(
        row_dim=row_dim,
        rotary_dim=64,
        norm_dim=norm_dim,
        block_size=64,
        kv_format=kv_format,
        **given | more,
    )


def _kv(kv_format: Any, head_dim: int) -> OpRequest:
    return KvWriteRequest(
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=0,
        block_size=64,
        kv_dtype="uint8",
        kv_format=kv_format,
        **BF16,
    )


def _router(scoring: Any, experts: int, top_k: int, **more: Any) -> OpRequest:
    return MoeRouterRequest(
        scoring=scoring, num_experts=experts, top_k=top_k, tokens=TOKENS, **more
    )


def _quantize(out: Any, group: int, scale: Any) -> OpRequest:
    return QuantizeRequest(group_size=group, out_dtype=out, scale_dtype=scale, width=7168, **BF16)


ROWS: Mapping[str, Mapping[str, OpRequest]] = {
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
        kind: MoeDispatchRequest(kind=kind, num_experts=256, top_k=8, hidden_size=7168, **BF16)
        for kind in ("permute", "combine")
    },
    "hyper_connection": {
        kind: HyperConnectionRequest(
            kind=kind, num_streams=4, hidden_size=4096, sinkhorn_iterations=20, **BF16
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
        "bfloat16": RmsNormRequest(hidden_size=7168, **BF16),
        "residual": RmsNormRequest(hidden_size=7168, has_residual=True, **BF16),
        "heads": RmsNormRequest(hidden_size=128, rows_per_token=64, **BF16),
        "float32": RmsNormRequest(hidden_size=576, dtype="float32", tokens=TOKENS),
        "int8 rows": RmsNormRequest(hidden_size=7168, quantize="int8_per_token", **BF16),
    },
    "norm_quantize": {
        "fp8 groups of 128": _norm_quantize("fp8_e4m3fn", 128, has_residual=True, keeps_rows=True),
        "fp8 groups of 32 ue8m0": _norm_quantize("fp8_e4m3fn", 32, scale_dtype="ue8m0"),
        "fp8 rows": _norm_quantize("fp8_e4m3fn", 0),
        "int8 rows": _norm_quantize("int8", 0),
    },
    "layer_norm": {"indexer keys": LayerNormRequest(hidden_size=128, has_bias=True, **BF16)},
    "rope": {
        "half split": RopeRequest(
            num_heads=64, num_kv_heads=8, head_dim=128, rotary_dim=128, **BF16
        ),
        "interleaved": RopeRequest(
            num_heads=64,
            num_kv_heads=1,
            head_dim=64,
            rotary_dim=64,
            style="interleaved",
            **BF16,
        ),
        "inverse, trailing": RopeRequest(
            num_heads=64,
            num_kv_heads=0,
            head_dim=512,
            rotary_dim=64,
            rotary_start=448,
            is_inverse=True,
            style="interleaved",
            **BF16,
        ),
    },
    "activation.gated": {
        "silu": GatedActivationRequest(width=2048, **BF16),
        "clamped silu": GatedActivationRequest(width=2048, clamp=10.0, **BF16),
        "gelu": GatedActivationRequest(width=2048, activation="gelu_tanh", **BF16),
    },
    "embedding": {"bfloat16": EmbeddingRequest(vocab_size=129280, hidden_size=7168, **BF16)},
    "kv_write": {
        "bfloat16": KvWriteRequest(
            num_kv_heads=8,
            head_dim=128,
            v_head_dim=128,
            block_size=64,
            kv_dtype="bfloat16",
            **BF16,
        ),
        "fp8_656": _kv("fp8_656", 576),
        "v4_584": _kv("v4_584", 512),
        "fp4_288": _kv("fp4_288", 512),
    },
    "rope_kv_write": {
        "llama-70b": _rope_kv_write(64),
        "qwen3, one of 8 ranks": _rope_kv_write(8, num_kv_heads=1, has_qk_norm=True),
        "fp8 cache": _rope_kv_write(64, kv_dtype="float8_e4m3fn"),
        "fp8 cache with scales": _rope_kv_write(64, kv_dtype="float8_e4m3fn", has_kv_scales=True),
        "interleaved": _rope_kv_write(64, style="interleaved"),
    },
    "latent_kv_write": {
        "deepseek-v3.2": _latent_kv_write("fp8_656", 576, 512, head_dim=192, q_rotary_start=128),
        "deepseek-v4 window": _latent_kv_write("v4_584", 512, 512, has_q_norm=True),
        "deepseek-v4 index keys": _latent_kv_write("fp8_132", 128, 0, num_heads=0, head_dim=0),
        "bf16": _latent_kv_write("bf16", 576, 512, head_dim=192, q_rotary_start=128),
        "deepseek-v4.1 index keys": _latent_kv_write("fp4_68", 128, 128, num_heads=0, head_dim=0),
        "deepseek-v3.2 index keys": _latent_kv_write(
            "fp8_132",
            128,
            128,
            num_heads=64,
            head_dim=128,
            q_rotary_start=0,
            row_rotary_start=0,
            style="half_split",
            row_norm_kind="layer",
        ),
        "float16": _latent_kv_write(
            "fp16", 576, 512, head_dim=192, q_rotary_start=128, dtype="float16"
        ),
    },
    "sample.top_k_top_p": {"129280": TopKTopPRequest(vocab_size=129280, tokens=TOKENS)},
    "engram": {
        kind: EngramRequest(
            num_heads=8,
            max_ngram=4,
            row_width=256,
            hidden_size=5120,
            num_streams=4,
            kind=kind,
            **BF16,
        )
        for kind in ("gather", "mix")
    },
}
