"""Which products a precision covers: formats by what is stored, and what the plan says of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hal.errors import PlanError
from hal.ops.formats import FORMATS
from hal_engine.config import ModelConfig, load_model_config
from hal_engine.precision import Precision, PrecisionName, resolve_precision

STORED = {
    "model.layers.0.mlp.down_proj.weight": "int4_g32",
    "model.layers.1.mlp.down_proj.weight": "int4_g32_asym",
    "lm_head.weight": "int8_g32",
}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Of a GGUF with a head of 8 bits, as quantisers write them."""
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    loaded = load_model_config(tmp_path / "config.json")
    return dataclasses.replace(loaded, dtype="float32", stored_formats=STORED)


def formats(config: ModelConfig, name: PrecisionName) -> list[str]:
    precision = resolved(config, name)
    return [precision.weight_format(config, [tensor]).name for tensor in STORED]


def resolved(config: ModelConfig, name: PrecisionName) -> Precision:
    return resolve_precision(config, name, "auto", frozenset())


def test_w4a8_rounds_the_activations_of_every_product(config: ModelConfig) -> None:
    assert formats(config, "w4a8") == ["int4_g32_a8", "int4_g32_asym_a8", "int8_g32_a8"]
    assert formats(config, "w4") == ["int4_g32", "int4_g32_asym", "int8_g32"]
    assert formats(config, "w8a8") == ["int8_channel_a8"] * 3


@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_what_is_rounded_is_said_in_the_plan(config: ModelConfig, name: PrecisionName) -> None:
    (note,) = resolved(config, name).notes
    assert "the head's too" in note
    assert f"as {name} asks" in note
    for other in ("w8", "w4", "auto"):
        assert not resolved(config, other).notes


def test_a_rounded_format_keeps_the_stored_weight(config: ModelConfig) -> None:
    """Beside the activations it says what the checkpoint's format says."""
    for stored, rounding in zip(STORED.values(), formats(config, "w4a8"), strict=True):
        kept = dataclasses.replace(FORMATS[rounding], name=stored, activation="float")
        assert kept == FORMATS[stored]


def test_four_bits_are_not_made_of_dense_weights(config: ModelConfig) -> None:
    with pytest.raises(PlanError, match="w8 quantises any weight"):
        resolved(config, "w4a8").weight_format(config, ["model.norm.weight"])
