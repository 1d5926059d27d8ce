"""Hyper-connections in front of a sublayer, and the sum of a token's experts behind one."""

from __future__ import annotations

from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.targets import Target
from hal_kernels.hyper_connection.triton_variants import mixes_width
from kernel_peers.launches import Launch, Own, Problem, always, no_product, row_kernel

TOKENS, _STREAMS, _DIM = 512, 4, 5120
_WIDTH = _STREAMS * _DIM
_MIXES = _STREAMS * (2 + _STREAMS)
_BF16 = "bfloat16"
_STREAM_BYTES = TOKENS * _WIDTH * 2


def _projection_bytes(tokens: int, mix_bytes: int, partial: int) -> int:
    """Streams once, the projection once per tile of so many tokens, so many bytes of its mixes."""
    return _STREAM_BYTES + TOKENS // tokens * _MIXES * _WIDTH * mix_bytes + TOKENS * partial


def _projection_config(target: Target) -> str:
    """The variant whose mixes are as wide as those of the problem's streams."""
    (found,) = (
        variant.config
        for variant in find_kernel("hyper_connection.mixes").variants(target)
        if variant.pointers["streams_TC_ptr"] == _BF16
        and variant.constants["BLOCK_W"] == mixes_width(_MIXES)
    )
    return found


_PROJECTION = Problem(
    name="hyper-connection, projection",
    what=f"{TOKENS} tokens of {_STREAMS} streams of {_DIM} in bf16 by {_MIXES} mixes in float32, "
    "and the sum of squares",
    dtype=lambda _: _BF16,
    own=Own(
        kernel="hyper_connection.mixes",
        config=_projection_config,
        dtype=lambda _: _BF16,
        moves=lambda tiles: _projection_bytes(
            tiles["BLOCK_T"], 3 * 2, tiles["S"] * tiles["BLOCK_W"] * 4
        ),
    ),
    formula="the streams once, the projection once per tile of tokens x its bytes (ours three "
    "terms of 2 B), the mixes in float32",
    peers=(
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/mhc.py",
            function="_mhc_mm_norm_fwd_kernel",
            arguments=lambda _: {
                "x_ptr": "*bf16",
                **dict.fromkeys(("phi_ptr", "mix_ptr", "invr_ptr"), "*fp32"),
                "N": TOKENS,
                "K": _WIDTH,
                "M": _MIXES,
                "stride_xn": _WIDTH,
                "stride_phik": _MIXES,
                "stride_mn": _MIXES,
                **dict.fromkeys(("stride_xk", "stride_phim", "stride_mm"), 1),
                "eps": 1e-6,
                "CAST_FP32": True,
            },
            configurations=always(BLOCK_N=32, BLOCK_K=256, BLOCK_M=32, num_warps=4),
            moves=lambda _: _projection_bytes(32, 4, (_MIXES + 1) * 4),
            source="mhc_mm_norm_fwd",
            note="on NVIDIA it multiplies in TF32, which rounds the projection; no parts of K",
        ),
    ),
)

_READ_ONCE = _STREAM_BYTES + TOKENS * (_DIM * 2 + (2 * _STREAMS + _STREAMS**2) * 4)
_COLLAPSE = Problem(
    name="hyper-connection, collapse",
    what=f"{TOKENS} tokens, {_STREAMS} streams of {_DIM}, bf16: the weights from {_MIXES} mixes "
    "with 20 steps of Sinkhorn, and the weighted sum",
    dtype=no_product,
    own=row_kernel(
        "hyper_connection.collapse", "n4", _READ_ONCE + TOKENS * 16 * (_MIXES + 1) * 4, _BF16
    ),
    formula="tokens x columns x (streams read, one written) x 2 B + mixes and weights in float32",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/mhc/mhc_pre.py",
            function="mhc_pre_fused_kernel_hc_mult_4",
            arguments=lambda _: {
                **dict.fromkeys(("gemm_out_ptr", "hc_scale_ptr", "hc_base_ptr"), "*fp32"),
                **dict.fromkeys(("post_mix_ptr", "comb_mix_ptr"), "*fp32"),
                **dict.fromkeys(("residual_ptr", "layer_input_ptr"), "*bf16"),
                "num_tokens": TOKENS,
                "num_tokens_bucket": 1,
                "res_stride_n": _WIDTH,
                **dict.fromkeys(("res_stride_i", "li_stride_n", "hidden_size"), _DIM),
                **dict.fromkeys(("res_stride_h", "li_stride_h"), 1),
                "hc_hidden_size": _WIDTH,
                **dict.fromkeys(("rms_eps", "hc_pre_eps", "hc_sinkhorn_eps"), 1e-6),
                "hc_post_mult_value": 2.0,
                "sinkhorn_repeat": 20,
                "HC_MULT3": _MIXES,
            },
            configurations=lambda _: [
                {"BLOCK_H": block, "num_warps": warps, "num_stages": stages}
                for block, warps, stages in ((256, 4, 1), (512, 4, 1), (1024, 4, 1), (1024, 8, 1))
            ],
            moves=lambda _: _READ_ONCE + _STREAM_BYTES + TOKENS * _MIXES * 4,
            source="mhc_pre, autotuned",
            note="of its list four; reads the streams a second time for the sum of squares, which "
            "ours has from the projection",
        ),
    ),
)  # fmt: skip

_TOP_K, _HIDDEN = 8, 7168
_SUM_BYTES = TOKENS * (_TOP_K + 1) * _HIDDEN * 2
_EXPERTS = Problem(
    name="sum of experts",
    what=f"{TOKENS} tokens, {_TOP_K} rows of {_HIDDEN} each, bf16",
    dtype=no_product,
    own=row_kernel("moe_dispatch.combine", "k8", _SUM_BYTES + TOKENS * _TOP_K * 8, _BF16),
    formula="tokens x columns x (rows read, one written) x 2 B; ours with a place and a weight for "
    "each row",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/moe_sum.py",
            function="moe_sum_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("input_ptr", "output_ptr"), "*bf16"),
                "num_tokens": TOKENS,
                "topk": _TOP_K,
                "hidden_size": _HIDDEN,
                "input_stride_token": _TOP_K * _HIDDEN,
                **dict.fromkeys(("input_stride_topk", "output_stride_token"), _HIDDEN),
                **dict.fromkeys(("input_stride_hidden", "output_stride_hidden"), 1),
            },
            configurations=lambda _: [
                {"BLOCK_SIZE": block, "num_warps": warps}
                for block, warps in ((128, 2), (256, 4), (512, 8), (1024, 8))
            ],
            moves=lambda _: _SUM_BYTES,
            source="moe_sum, autotuned",
            note="without weights; a token's rows lie one behind the other",
        ),
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/moe/fused_moe_triton_kernels.py",
            function="_moe_sum_reduce_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("input_ptr", "output_ptr"), "*bf16"),
                "input_stride_0": _TOP_K * _HIDDEN,
                **dict.fromkeys(("input_stride_1", "output_stride_0"), _HIDDEN),
                **dict.fromkeys(("input_stride_2", "output_stride_1"), 1),
                "token_num": TOKENS,
                "topk_num": _TOP_K,
                "hidden_dim": _HIDDEN,
                "routed_scaling_factor": 2.5,
                "NUM_STAGE": 1,
            },
            configurations=always(BLOCK_M=1, BLOCK_DIM=2048, num_warps=16),
            moves=lambda _: _SUM_BYTES,
            source="moe_sum_reduce_triton",
            note="one weight for all; a token's rows lie one behind the other",
        ),
    ),
)

PROBLEMS = (_PROJECTION, _COLLAPSE, _EXPERTS)
