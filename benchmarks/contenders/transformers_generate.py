"""Hugging Face transformers: `generate` on plain fp32 weights, or with dynamic int8 linears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions
from contenders.weights import HUGGING_FACE_FOLDER


class TransformersGenerate:
    """precision: "fp32" or "int8" (torch's dynamic quantisation of every linear layer)."""

    def __init__(self) -> None:
        self._model: Any = None

    def versions(self) -> dict[str, str]:
        return package_versions("transformers", "torch")

    def load(self, options: LoadOptions) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        model = AutoModelForCausalLM.from_pretrained(
            options.models / HUGGING_FACE_FOLDER, dtype=torch.float32
        ).eval()
        if options.precision == "int8":
            model = torch.ao.quantization.quantize_dynamic(
                model, {torch.nn.Linear}, dtype=torch.qint8
            )
        self._model = model

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        """Left-padded when lengths differ; the benchmark's own prompts are of one length."""
        import torch

        longest = max(len(prompt) for prompt in prompts)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return [row[longest:] for row in out.tolist()]

    def score(self, prompt: TokenIds, continuation: TokenIds) -> float:
        """Mean negative log-likelihood (nats per token) of a continuation under this model."""
        import torch

        ids = torch.tensor([[*prompt, *continuation]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        targets = torch.tensor(list(continuation))
        return float(torch.nn.functional.cross_entropy(logits, targets))

    def close(self) -> None:
        self._model = None
