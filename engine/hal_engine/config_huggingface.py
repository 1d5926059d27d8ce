"""`ModelConfig` from a Hugging Face folder: config.json and generation_config.json."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hal_engine.config import Family, ModelConfig
from hal_engine.config_compressed import read_compressed_config
from hal_engine.config_fields import (
    ignored_keys,
    read_dtype,
    read_hidden_act,
    read_json,
    read_special_ids,
)
from hal_engine.config_mla import read_mla_config
from hal_engine.config_moe import read_qwen_moe
from hal_engine.config_quantization import refuse_quantization
from hal_engine.config_rope import read_rope
from hal_engine.config_values import (
    MAX_LAYERS,
    MAX_POSITIONS,
    StrictValues,
    check_head_counts,
    check_head_dim,
)


@dataclass(frozen=True, slots=True)
class _FamilyTraits:
    """What a family fixes and its configuration therefore does not say."""

    architecture: str  # the only class name whose arithmetic is implemented
    fixed_qkv_bias: bool | None  # None: `attention_bias` decides, for q, k, v and o
    reads_mlp_bias: bool
    qk_norm: bool
    requires_head_dim: bool  # False: hidden_size / num_attention_heads
    requires_kv_heads: bool  # False: as many as query heads


FAMILIES: dict[Family, _FamilyTraits] = {
    "llama": _FamilyTraits("LlamaForCausalLM", None, True, False, False, False),
    "mistral": _FamilyTraits("MistralForCausalLM", False, False, False, False, True),
    "qwen2": _FamilyTraits("Qwen2ForCausalLM", True, False, False, False, False),
    "qwen3": _FamilyTraits("Qwen3ForCausalLM", None, False, True, True, False),
    "qwen3_moe": _FamilyTraits("Qwen3MoeForCausalLM", None, False, True, False, False),
}

# Families whose configuration has parts of its own.
Reader = Callable[[StrictValues, Family], tuple[ModelConfig, list[StrictValues]]]
_READERS: dict[Family, tuple[str, Reader]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", read_mla_config),
    "deepseek_v32": ("DeepseekV32ForCausalLM", read_mla_config),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", read_mla_config),
    "deepseek_v4": ("DeepseekV4ForCausalLM", read_compressed_config),
    "deepseek_v41": ("DeepseekV41ForCausalLM", read_compressed_config),
}


def read_config(file: Path) -> ModelConfig:
    """Reads a config.json (and generation_config.json beside it). Raises ConfigError."""
    values = StrictValues(file, read_json(file))
    family = _family(values)
    if family in _READERS:
        config, read = _READERS[family][1](values, family)
    else:
        refuse_quantization(values)
        config, read = _build(values, family), [values]
    ignored = [key for part in read for key in ignored_keys(part, family)]
    return replace(config, ignored_keys=tuple(ignored))


def family_architectures() -> dict[Family, str]:
    """`model_type` -> the class name in `architectures`, of every family that is understood."""
    classes = {name: traits.architecture for name, traits in FAMILIES.items()}
    return classes | {name: architecture for name, (architecture, _) in _READERS.items()}


def _family(values: StrictValues) -> Family:
    model_type = values.string("model_type")
    classes = family_architectures()
    for family, architecture in classes.items():
        if family == model_type:
            _check_architectures(values, architecture)
            return family
    nearest = difflib.get_close_matches(model_type, classes, n=1, cutoff=0.4)
    remedy = f"the nearest supported one is {nearest[0]!r}" if nearest else ""
    raise values.error("model_type", f"one of {', '.join(classes)}", model_type, remedy)


def _check_architectures(values: StrictValues, architecture: str) -> None:
    found = values.raw("architectures")
    # A bare decoder (`LlamaModel`) has no output head; a classifier has another one.
    if found is not None and found != [architecture]:
        raise values.error("architectures", repr([architecture]), found)


def _build(values: StrictValues, family: Family) -> ModelConfig:
    traits = FAMILIES[family]
    hidden = values.integer("hidden_size")
    layers = values.integer("num_hidden_layers", most=MAX_LAYERS)
    heads, kv_heads, head_dim = _heads(values, traits, hidden)
    vocab_size = values.integer("vocab_size")
    positions = values.integer("max_position_embeddings", most=MAX_POSITIONS)
    attention_bias = values.boolean("attention_bias", default=traits.fixed_qkv_bias or False)
    if traits.fixed_qkv_bias is not None and attention_bias != traits.fixed_qkv_bias:
        raise values.error("attention_bias", f"{traits.fixed_qkv_bias} ({family})", attention_bias)
    mlp_bias = values.boolean("mlp_bias", default=False)
    if mlp_bias and not traits.reads_mlp_bias:
        raise values.error("mlp_bias", f"false ({family})", mlp_bias)
    bos, eos = read_special_ids(values, vocab_size)
    return ModelConfig(
        source=str(values.file),
        source_format="huggingface",
        family=family,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=values.integer("intermediate_size"),
        vocab_size=vocab_size,
        rms_norm_eps=values.number("rms_norm_eps", most=1.0),
        rope=read_rope(values, positions),
        max_position_embeddings=positions,
        sliding_windows=_sliding_windows(values, family, layers),
        qkv_bias=attention_bias,
        output_bias=attention_bias and traits.fixed_qkv_bias is None,
        mlp_bias=mlp_bias,
        qk_norm=traits.qk_norm,
        tie_word_embeddings=values.boolean("tie_word_embeddings", default=False),
        hidden_act=read_hidden_act(values),
        dtype=read_dtype(values),
        bos_token_id=bos,
        eos_token_ids=eos,
        moe=read_qwen_moe(values, layers) if family == "qwen3_moe" else None,
    )


def _heads(values: StrictValues, traits: _FamilyTraits, hidden: int) -> tuple[int, int, int]:
    heads = values.integer("num_attention_heads", most=2**16)
    default_kv_heads = None if traits.requires_kv_heads else heads
    kv_heads = values.integer("num_key_value_heads", most=2**16, default=default_kv_heads)
    check_head_counts(values, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if "head_dim" in values or traits.requires_head_dim:
        head_dim = values.integer("head_dim")
    elif hidden % heads:
        raise values.error("hidden_size", f"a multiple of num_attention_heads ({heads})", hidden)
    else:
        head_dim = hidden // heads
    check_head_dim(values, "head_dim", head_dim)
    return heads, kv_heads, head_dim


def _sliding_windows(values: StrictValues, family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, by the family's own rule (transformers' configuration classes)."""
    if family == "llama":
        # LlamaForCausalLM has full attention only; a window here would be silently dropped.
        return (None,) * layers
    if family == "mistral":
        # An absent key means 4096 (the class default); only an explicit null means full attention.
        if values.is_null("sliding_window"):
            return (None,) * layers
        mistral_window = values.integer("sliding_window", most=MAX_POSITIONS, default=4096)
        return (mistral_window,) * layers
    window: int | None = None
    if values.boolean("use_sliding_window", default=False):
        window = values.integer("sliding_window", most=MAX_POSITIONS, default=4096)
    values.raw("sliding_window")
    first = values.integer("max_window_layers", least=0, most=MAX_LAYERS, default=28)
    types = values.raw("layer_types")
    if types is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    return tuple(_windows_of_types(values, types, window, layers))


def _windows_of_types(
    values: StrictValues, types: Any, window: int | None, layers: int
) -> list[int | None]:
    if not isinstance(types, list) or len(types) != layers:
        raise values.error("layer_types", f"a list of {layers} names, one a layer", types)
    windows: list[int | None] = []
    for layer, name in enumerate(types):
        if name == "full_attention":
            windows.append(None)
        elif name == "sliding_attention" and window is not None:
            windows.append(window)
        else:
            required = "'full_attention'" + (" or 'sliding_attention'" if window else "")
            raise values.error(f"layer_types[{layer}]", required, name)
    return windows
