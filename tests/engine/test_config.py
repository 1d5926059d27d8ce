"""Model configurations against transformers' configuration classes, and what is refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from hal_engine.config import ConfigError, ModelConfig, load_model_config

CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def random_settings(family: str, rng: random.Random) -> dict[str, Any]:
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    head_dim = rng.choice([16, 32, 64])
    settings: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "num_hidden_layers": rng.randint(1, 40),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": rng.randint(8, 999),
        "vocab_size": rng.randint(300, 9999),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 3e-6]),
        "max_position_embeddings": rng.choice([512, 8192, 131072]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 5e5, 1e6])},
        "bos_token_id": 1,
        "eos_token_id": rng.choice([2, [2, 7]]),
        "dtype": rng.choice(["float32", "bfloat16", "float16"]),
    }
    if family != "qwen2":
        settings["head_dim"] = rng.choice([head_dim, 2 * head_dim])
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        settings["mlp_bias"] = rng.random() < 0.5
    if family == "mistral":
        settings["sliding_window"] = rng.choice([None, 512])
    if family in ("qwen2", "qwen3"):
        settings["use_sliding_window"] = rng.random() < 0.5
        settings["sliding_window"] = 256
        settings["max_window_layers"] = rng.randint(0, 40)
    return settings


def transformers_windows(config: Any) -> tuple[int | None, ...]:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def assert_same(ours: ModelConfig, theirs: Any) -> None:
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    expected = {
        "hidden_size": theirs.hidden_size,
        "num_layers": theirs.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": theirs.intermediate_size,
        "vocab_size": theirs.vocab_size,
        "rms_norm_eps": theirs.rms_norm_eps,
        "max_position_embeddings": theirs.max_position_embeddings,
        "tie_word_embeddings": theirs.tie_word_embeddings,
        "sliding_windows": transformers_windows(theirs),
        "bos_token_id": theirs.bos_token_id,
    }
    assert {name: getattr(ours, name) for name in expected} == expected
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    assert f"torch.{ours.dtype}" == str(theirs.dtype)


@pytest.mark.parametrize("family", list(CONFIG_CLASSES))
@pytest.mark.parametrize("seed", range(6))
def test_saved_configuration_reads_as_transformers_reads_it(
    family: str, seed: int, tmp_path: Path
) -> None:
    settings = random_settings(family, random.Random(f"{family}{seed}"))
    theirs = CONFIG_CLASSES[family](**settings, architectures=[ARCHITECTURES[family]])
    theirs.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    assert ours.family == family
    assert_same(ours, CONFIG_CLASSES[family].from_pretrained(tmp_path))
    assert ours.qk_norm == (family == "qwen3")


@pytest.mark.parametrize("family", list(CONFIG_CLASSES))
def test_biases_are_those_of_transformers_models(family: str, tmp_path: Path) -> None:
    for attention_bias in (False, True):
        settings = random_settings(family, random.Random(family))
        settings |= {"num_hidden_layers": 1, "vocab_size": 64}
        if family in ("llama", "qwen3"):
            settings["attention_bias"] = attention_bias
        theirs = CONFIG_CLASSES[family](**settings)
        model = transformers.AutoModelForCausalLM.from_config(theirs)
        theirs.save_pretrained(tmp_path)
        ours = load_model_config(tmp_path)
        names = set(model.state_dict())
        layer = "model.layers.0"
        assert ours.qkv_bias == (f"{layer}.self_attn.q_proj.bias" in names)
        assert ours.output_bias == (f"{layer}.self_attn.o_proj.bias" in names)
        assert ours.mlp_bias == (f"{layer}.mlp.up_proj.bias" in names)
        assert ours.qk_norm == (f"{layer}.self_attn.q_norm.weight" in names)


VALID: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 20000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write(folder: Path, **changes: Any) -> Path:
    merged = {**VALID, **changes}
    values = {key: value for key, value in merged.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_old_spelling_is_read(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    config = load_model_config(write(tmp_path, rope_scaling=scaling))
    assert (config.rope.theta, config.rope.type, config.rope.factor) == (20000.0, "linear", 4.0)
    assert (config.dtype, config.head_dim, config.eos_token_ids) == ("bfloat16", 16, (2,))


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6], "bos_token_id": 4}')
    config = load_model_config(tmp_path)
    assert (config.bos_token_id, config.eos_token_ids) == (4, (5, 6))


def test_harmless_keys_are_listed(tmp_path: Path) -> None:
    changes = {"initializer_range": 0.02, "some_note": "x", "rope_interleaved": False}
    config = load_model_config(write(tmp_path, **changes))
    assert set(changes) <= set(config.ignored_keys)


# The settings of published models, as far as they bear on the arithmetic.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Llama-3.2-1B": {
        "head_dim": 64,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "eos_token_id": [1, 8, 9],
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_mrope": False,
        "use_sliding_window": False,
        "temperature": 0.7,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_scaling": None,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
        "attention_dropout": 0.0,
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_settings_of_published_models_are_accepted(name: str, tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, **PUBLISHED[name]))
    assert set(config.sliding_windows) == {None}
    assert config.rope.type == ("llama3" if name == "Llama-3.2-1B" else "default")


def test_an_absent_mistral_window_is_the_class_default(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert load_model_config(write(tmp_path, **mistral)).sliding_windows == (4096, 4096)
    write(tmp_path, **mistral, sliding_window=None)
    assert load_model_config(tmp_path).sliding_windows == (None, None)


BAD_NUMBERS: list[Any] = [float("nan"), float("inf"), -1, 0, True, "2", 2**63, 1.5, [4], {}]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_bad_sizes_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_config(write(tmp_path, **{key: value}))
    is_constant = isinstance(value, float) and value != 1.5
    # json.dumps writes NaN and Infinity, which are no JSON: the whole file is refused.
    assert ("finite numbers" if is_constant else key) in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'"]),
        ({"rms_norm_eps": ...}, ["rms_norm_eps", "nothing"]),
        ({"vocab_size": ...}, ["vocab_size", "nothing"]),
        ({"hidden_size": None}, ["hidden_size", "null"]),
        ({"rope_theta": -3}, ["rope_theta"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divisor", "3"]),
        ({"num_attention_heads": 6}, ["hidden_size", "multiple", "64"]),
        ({"head_dim": 15}, ["head_dim", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"model_type": "lama"}, ["model_type", "'lama'", "nearest", "'llama'"]),
        ({"model_type": "gemma3"}, ["model_type", "llama, mistral, qwen2, qwen3"]),
        ({"model_type": ...}, ["model_type", "nothing"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "'awq'"]),
        ({"attention_multiplier": 0.5}, ["attention_multiplier", "0.5"]),
        ({"residual_multiplier": 0.22}, ["residual_multiplier"]),
        ({"logits_scaling": 8}, ["logits_scaling"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"embedding_multiplier": 12}, ["embedding_multiplier"]),
        ({"num_local_experts": 8}, ["num_local_experts"]),
        ({"sliding_window": 64}, ["sliding_window", "64"]),
        ({"rope_interleaved": True}, ["rope_interleaved"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"type": "su"}}, ["rope_scaling.type", "'su'"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_type", "'longrope'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "nothing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "default", "factor": 2}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"mrope_section": [4, 4]}}, ["mrope_section"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "an object"]),
        ({"rope_parameters": {"rope_theta": 5.0}}, ["rope_theta", "20000"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8"]),
        ({"eos_token_id": 100}, ["eos_token_id", "0..99"]),
        ({"eos_token_id": [2, True]}, ["eos_token_id"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false"]),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ["head_dim", "nothing"]),
        (
            {"model_type": "qwen2", "architectures": None, "layer_types": ["full_attention"]},
            ["layer_types", "2 names"],
        ),
        (
            {
                "model_type": "qwen2",
                "architectures": None,
                "layer_types": ["sliding_attention"] * 2,
            },
            ["layer_types[0]", "'sliding_attention'"],
        ),
        (
            {"model_type": "qwen2", "architectures": None, "attention_bias": False},
            ["attention_bias"],
        ),
    ],
    ids=lambda value: json.dumps(value, default=str)[:60] if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_served_are_refused_by_name(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_config(write(tmp_path, **changes))
    for word in [*words, "config.json", "required", "found"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "valid JSON"),
        ("[]", "a JSON object"),
        ("{", "valid JSON"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' twice"),
        ('{"hidden_size": NaN}', "NaN"),
        ("[" * 200_000, "valid JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "valid JSON"),
        ('{"a": "\udcff"}', "UTF-8"),
    ],
    ids=["empty", "list", "cut", "twice", "nan", "deep", "long-number", "not-utf8"],
)
def test_broken_files_are_refused(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=word):
        load_model_config(tmp_path)


def test_irregular_files_are_refused_without_a_hang(tmp_path: Path) -> None:
    for name in ("missing", "folder", "loop", "fifo"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "config.json").mkdir()
    (tmp_path / "loop" / "config.json").symlink_to(tmp_path / "loop" / "config.json")
    os.mkfifo(tmp_path / "fifo" / "config.json")
    for name in ("missing", "folder", "loop", "fifo"):
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model_config(tmp_path / name)
