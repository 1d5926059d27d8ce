"""A transformers model through halstack's ops: its plan, its tokens, and what was called.

    python examples/transformers_routed.py [FOLDER]

FOLDER: a model as `save_pretrained` leaves it; a tiny random one without.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hal.integrations import transformers as hal_transformers

TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}


def load(words: list[str]) -> PreTrainedModel:
    if words:
        model = AutoModelForCausalLM.from_pretrained(words[0], dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY, **HEADS))
    return model.eval()


def main() -> None:
    model = load(sys.argv[1:])
    prompt = torch.randint(3, model.config.vocab_size, (1, 16))
    with hal_transformers.route(model, max_tokens=2048) as routed:
        model.generate(prompt, max_new_tokens=8, do_sample=False)
        print(f"plan {routed.plan.hash} on {routed.plan.device_label}")
        calls = Counter[tuple[str, str, str]]()
        for row in routed.counts():
            calls[row.op, row.implementation, row.tier] += row.calls
        for (op, implementation, tier), count in sorted(calls.items()):
            if count:
                print(f"{count:6}  {op:16} {implementation:32} {tier}")


if __name__ == "__main__":
    main()
