"""transformers: a Llama with grouped heads answers two prompts of different lengths, greedily."""

import hashlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()

prompts = torch.randint(3, config.vocab_size, (2, 64))
attention_mask = torch.ones_like(prompts)
attention_mask[0, :20] = 0
prompts[0, :20] = config.pad_token_id

tokens = model.generate(prompts, attention_mask=attention_mask, max_new_tokens=16, do_sample=False)
print(hashlib.sha256(tokens.numpy().tobytes()).hexdigest())
