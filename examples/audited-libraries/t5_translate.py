"""transformers: a T5 translates two padded sentences with two beams."""

import hashlib

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(
    vocab_size=1024,
    d_model=256,
    d_kv=64,
    d_ff=512,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=None,
)
model = T5ForConditionalGeneration(config).eval()

ids = torch.randint(3, config.vocab_size, (2, 48))
attention_mask = torch.ones_like(ids)
attention_mask[1, 30:] = 0
ids[1, 30:] = config.pad_token_id

tokens = model.generate(ids, attention_mask=attention_mask, max_new_tokens=12, num_beams=2)
print(hashlib.sha256(tokens.numpy().tobytes()).hexdigest())
