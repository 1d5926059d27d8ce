"""Rotary tables against transformers' rotary embedding, for each kind of scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hal_engine.config import ConfigError, load_model_config
from hal_engine.rope_table import rope_cos_sin

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_table_equals_transformers(name: str, head_dim: int, tmp_path: Path) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 50_000.0, **SCALINGS[name]},
    )
    theirs.save_pretrained(tmp_path)
    table = rope_cos_sin(load_model_config(tmp_path), 4096)
    positions = torch.arange(4096)[None]
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    assert table.shape == (4096, head_dim)
    assert table.dtype == torch.float32
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=2e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=2e-6)


def test_dynamic_scaling_beyond_the_trained_context_is_refused(tmp_path: Path) -> None:
    LlamaConfig(
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0},
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="dynamic"):
        rope_cos_sin(load_model_config(tmp_path), 129)
