"""Sparse attention and what chooses for it: selected blocks of NSA, scores of rows of four bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal_kernels.aot.targets import Target
from kernel_peers.launches import Launch, Own, Problem, always


def _bf16(_: Target) -> str:
    return "bfloat16"


_TOKENS, _HEADS, _KV_HEADS, _HEAD = 512, 64, 4, 128
_BLOCKS, _BLOCK = 16, 64
_SELECTED_BYTES = _TOKENS * (_KV_HEADS * _BLOCKS * _BLOCK * _HEAD * 2 * 2 + _HEADS * _HEAD * 2 * 2)


_SELECTED = Problem(
    name="NSA, selected blocks",
    what=f"{_TOKENS} tokens of a prompt, {_HEADS} heads over {_KV_HEADS} of {_HEAD}, {_BLOCKS} "
    f"blocks of {_BLOCK} keys each, bf16",
    dtype=_bf16,
    own=Own(
        kernel="nsa_attention.branch",
        config=lambda _: "d128-selected",
        dtype=_bf16,
        moves=lambda _: _SELECTED_BYTES,
    ),
    formula="a program a token and KV head: its keys and values x 256 B each + queries and output",
    peers=(
        Launch(
            peer="fla",
            wheel="fla_core",
            path="fla/ops/nsa/parallel.py",
            function="parallel_nsa_fwd_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("q", "k", "v", "o"), "*bf16"),
                "lse": "*fp32",
                "scale": _HEAD**-0.5,
                "block_indices": "*i64",
                "block_counts": _BLOCKS,
                **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "token_indices_q"), "*i64"),
                "TQ": _TOKENS,
                "TK": 4096,
                "H": _KV_HEADS,
                "HQ": _HEADS,
                "G": _HEADS // _KV_HEADS,
                "K": _HEAD,
                "V": _HEAD,
                "S": _BLOCKS,
                "BS": _BLOCK,
                "BK": _HEAD,
                "BV": _HEAD,
                "IS_VARLEN": True,
                "USE_BLOCK_COUNTS": False,
            },
            configurations=lambda _: [
                {"num_warps": warps, "num_stages": stages}
                for warps in (1, 2, 4, 8)
                for stages in (1, 2, 3)
            ],
            moves=lambda _: _SELECTED_BYTES,
            source="parallel_nsa_fwd, autotuned",
            note="keys and values in one piece, not in pages",
        ),
    ),
)


_SEQUENCES, _ENTRIES, _INDEX_HEADS, _INDEX_DIM, _PAGE = 16, 4096, 64, 128, 64
_QUERY_BYTES = _INDEX_HEADS * (_INDEX_DIM * 2 + 4)
_ON = 132  # multiprocessors that the peer's workers are shared out over


def _score_bytes(programs: int) -> int:
    """Of one sequence so many programs read the query."""
    return _SEQUENCES * (_ENTRIES * (68 + 4 + 4) + programs * _QUERY_BYTES)


def _own_bytes(constants: Mapping[str, Any]) -> int:
    return _score_bytes(-(-_ENTRIES // constants["BLOCK_N"]))


_SCORES = Problem(
    name="index scores, rows of four bits",
    what=f"a decode of {_SEQUENCES} sequences, {_ENTRIES} entries of {_INDEX_DIM} in FP4 with a "
    f"scale per 32, {_INDEX_HEADS} heads, bf16 queries",
    dtype=_bf16,
    own=Own(
        kernel="index_logits.paged",
        config=lambda _: "fp4_68-decode",
        dtype=_bf16,
        moves=_own_bytes,
    ),
    formula="sequences x (entries x (68 B, a place, a score) + programs x the query)",
    peers=(
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/attention/dsv4/fp4_indexer.py",
            function="_fp4_index_logits_paged_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("q_ptr", "w_ptr"), "*bf16"),
                "req_ptr": "*i64",
                "req_table_ptr": "*i32",
                "lens_ptr": "*i64",
                "table_ptr": "*u8",
                "mask_ptr": None,
                "out_ptr": "*fp32",
                "L": _ENTRIES,
                "page_size": _PAGE,
                "row_stride": _PAGE * 68,
                "req_stride": _ENTRIES,
                "mask_stride": 0,
                "out_stride": _ENTRIES,
                "stride_qb": _INDEX_HEADS * _INDEX_DIM,
                "stride_qh": _INDEX_DIM,
                "stride_wb": _INDEX_HEADS,
                "H": _INDEX_HEADS,
                "HALF_D": _INDEX_DIM // 2,
                "RATIO": 1,
                "HAS_MASK": False,
            },
            configurations=always(BLOCK_L=64, num_warps=4),
            moves=lambda _: _score_bytes(min(_ENTRIES // 64, -(-_ON * 4 // _SEQUENCES))),
            source="fp4_index_logits_paged",
            note="rounds to bf16 between the steps; a place for each entry and not for each page",
        ),
    ),
)

PROBLEMS = (_SELECTED, _SCORES)
