"""transformers: a GPT-NeoX in bfloat16 scores texts by their mean log likelihood."""

import hashlib

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

torch.manual_seed(0)
config = GPTNeoXConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    dtype=torch.bfloat16,
)
model = GPTNeoXForCausalLM(config).to(torch.bfloat16).eval()

digest = hashlib.sha256()
with torch.no_grad():
    for _ in range(4):
        ids = torch.randint(1, config.vocab_size, (2, 128))
        loss = model(input_ids=ids, labels=ids).loss
        digest.update(loss.numpy().tobytes())
print(digest.hexdigest())
