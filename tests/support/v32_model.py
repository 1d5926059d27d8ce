"""A model of one DeepSeek-V3.2 layer for tests: its configuration, and what a checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hal.ops.formats import FORMATS
from hal.ops.quantized_weight import quantize_weight

HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 4, 64, 64, 64, 512, 128
HIDDEN, EXPERTS, EXPERT_WIDTH, INDEX_HEADS, TOP_K = 256, 8, 128, 16, 64
CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "moe_intermediate_size": EXPERT_WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "index_topk": TOP_K,
    "index_head_dim": 128,
    "index_n_heads": INDEX_HEADS,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
# Parameter of transformers' layer -> whether the checkpoint stores it in FP8 blocks.
MATRICES: Mapping[str, bool] = {
    "self_attn.q_a_proj.weight": True,
    "self_attn.kv_a_proj_with_mqa.weight": True,
    "self_attn.q_b_proj.weight": True,
    "self_attn.kv_b_proj.weight": False,  # absorbed: in the activations' dtype
    "self_attn.o_proj.weight": True,
    "self_attn.indexer.wq_b.weight": True,
    "self_attn.indexer.wk.weight": True,
    "self_attn.indexer.weights_proj.weight": False,
    "mlp.gate.weight": False,
    "mlp.shared_experts.gate_proj.weight": True,
    "mlp.shared_experts.up_proj.weight": True,
    "mlp.shared_experts.down_proj.weight": True,
    "mlp.experts.gate_up_proj": True,
    "mlp.experts.down_proj": True,
}
FP8 = FORMATS["fp8_block128"]


def write_config(folder: Path) -> Path:
    """A folder that can be planned, with nothing but the configuration."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def stored(weight: torch.Tensor, *, is_fp8: bool) -> torch.Tensor:
    """The values that the checkpoint would keep of a weight, or of a stack of them, in float32."""
    if not is_fp8:
        return weight.bfloat16().float()
    if weight.dim() == 3:
        return torch.stack([stored(part, is_fp8=True) for part in weight])
    return quantize_weight(weight, FP8).dequantize()


def rope_table() -> torch.Tensor:
    """float32 [positions, ROPE]: cosines, then sines."""
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, ROPE, 2).float() / ROPE)
    angles = torch.arange(CONFIG["max_position_embeddings"]).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)
