"""Tiny random models of each family, made and judged by transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-llama3-rope": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}

VOCAB_SIZE = 512
MAX_POSITIONS = 512


@dataclass(frozen=True)
class TinyModel:
    """A saved model and the transformers model that it was saved from."""

    family: str
    folder: Path
    oracle: Any


def make_tiny_model(
    family: str,
    folder: Path,
    *,
    seed: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_layers: int = 3,
) -> TinyModel:
    """Random weights large enough that attention is not uniform and logits differ."""
    name, extra = FAMILIES[family]
    config_type = getattr(transformers, f"{name}Config")
    model_type = getattr(transformers, f"{name}ForCausalLM")
    config = config_type(
        vocab_size=VOCAB_SIZE,
        hidden_size=32 * num_heads,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        **extra,
    )
    generator = torch.Generator().manual_seed(seed)
    model = model_type(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.08 if parameter.dim() > 1 else 1.0 + 0.2 * noise)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return TinyModel(family, folder, model)


def _save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: 256 bytes, then names for the remaining ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i + 2 for i, symbol in enumerate(alphabet)}
    vocab |= {"<s>": 0, "</s>": 1}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
