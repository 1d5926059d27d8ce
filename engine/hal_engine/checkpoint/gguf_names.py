"""Names and formats: how a GGUF file calls what a Hugging Face checkpoint calls otherwise."""

from __future__ import annotations

import re

# ggml tensor type -> the format's name in hal.ops.formats. Other block types have no group format.
FORMAT_OF_TYPE = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "int4_g32",
    "Q4_1": "int4_g32_asym",
    "Q8_0": "int8_g32",
}

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")


def huggingface_name(gguf_name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None if not known."""
    block = _BLOCK_NAME.fullmatch(gguf_name)
    if block and block[2] in _BLOCK:
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"
    top = _TOP_NAME.fullmatch(gguf_name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    return None


def stored_format(type_name: str) -> str:
    """Format name of a ggml type: one of hal's, or `gguf_<type>` (dequantised when read)."""
    return FORMAT_OF_TYPE.get(type_name, f"gguf_{type_name.lower()}")
