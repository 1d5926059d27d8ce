"""Tiny random transformers models of many classes, with inputs, for routing."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from hal.host import LocalHost
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook, parse_waivers

VOCAB = 199
_MLA: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_DSA: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 6}
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = ["sliding_attention", "full_attention"]

# Name of the classes before "Config" -> (suffix of the model's class, what differs from _SMALL).
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    "Qwen3": ("ForCausalLM", {"head_dim": 16}),
    "Phi3": ("ForCausalLM", {}),
    "Mistral": ("ForCausalLM", {"sliding_window": 7}),
    "Mixtral": ("ForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2Moe": (
        "ForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "Gemma2": ("ForCausalLM", {"head_dim": 16, "sliding_window": 7, "layer_types": _LAYERS}),
    "Gemma3Text": ("ForCausalLM", {"head_dim": 16, "sliding_window": 7, "layer_types": _LAYERS}),
    "GptOss": (
        "ForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": _LAYERS,
        },
    ),
    "DeepseekV3": ("ForCausalLM", {**_MLA, "num_key_value_heads": 4}),
    "DeepseekV32": ("ForCausalLM", {**_MLA, **_DSA, "num_key_value_heads": 4}),
    "GlmMoeDsa": ("ForCausalLM", {**_MLA, **_DSA, "num_key_value_heads": 4}),
    "DeepseekV4": (
        "ForCausalLM",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "index_n_heads": 32,
            "index_head_dim": 16,
            "index_topk": 4,
            "sliding_window": 8,
            "num_hidden_layers": 4,
        },
    ),
    "T5": (
        "ForConditionalGeneration",
        {"d_kv": 16, "d_ff": 96, "decoder_start_token_id": 0},
    ),
    "Falcon": ("ForCausalLM", {}),
    "Bloom": ("ForCausalLM", {"n_head": 4}),
    "GPT2": ("LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "Bert": ("Model", {}),
    "ViT": ("Model", {"image_size": 16, "patch_size": 4}),
}
# What these need on a CPU, said by the person who runs them.
NEEDS_WAIVER = frozenset({"Gemma2", "DeepseekV32", "GlmMoeDsa"})


def make_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model in evaluation mode whose attention is not uniform."""
    suffix, extra = MODELS[name]
    stem = name.removesuffix("Text") if name.endswith("Text") else name
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **extra, **changes})
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{stem}{suffix}", None)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif not bool(parameter.any()):
                parameter.normal_(0.0, 0.1)
    return model


def attention_waivers() -> WaiverBook:
    """All attention of the CPU, with a reason and an owner."""
    text = """
[[waiver]]
op = "dense_attention*"
component = "*"
device = "cpu:*"
kind = "tier"
reason = "no fused kernel for this attention on the CPU"
owner = "tests"
expires = 2099-01-01
max_call_share = 0.9
"""
    return parse_waivers(text, "waivers of a test")


@functools.cache
def registry() -> BackendRegistry:
    """The plug-ins of this machine, loaded once."""
    return load_backends(LocalHost())
