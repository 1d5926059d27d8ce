"""transformers: a Qwen3 with 16 experts, 4 a token, continues one prompt by sampling."""

import hashlib

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    pad_token_id=0,
    eos_token_id=None,
)
model = Qwen3MoeForCausalLM(config).eval()

prompt = torch.randint(3, config.vocab_size, (1, 64))
tokens = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=16,
    do_sample=True,
    top_k=50,
    top_p=0.9,
)
print(hashlib.sha256(tokens.numpy().tobytes()).hexdigest())
