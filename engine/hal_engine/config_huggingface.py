"""`ModelConfig` from a Hugging Face folder: config.json and generation_config.json."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hal_engine.config import ConfigError, Family, FloatFormat, ModelConfig, said
from hal_engine.config_rope import read_rope
from hal_engine.config_values import (
    MAX_LAYERS,
    MAX_POSITIONS,
    StrictValues,
    check_head_counts,
    check_head_dim,
)
from hal_engine.strict_json import JsonFileError, read_json_object


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
}

# Without effect on inference: training, storage and bookkeeping.
_HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cls_token_id",
        "embd_pdrop",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
    }
)
# A key that is not known but speaks of arithmetic is refused rather than ignored.
_ARITHMETIC_KEY = re.compile(
    r"scal|multipl|soft_?cap|logit|norm|bias|expert|moe|rope|rotary|window|sink|quant|attention|attn"
    r"|residual|embed|mup|lora|mtp|clip|clamp|act_fn|activation|hidden|layer|head|query|key|value|alibi"
    r"|position|cross|sparse|compress|theta|sliding|block|kv_|qk_|gate|shared|tie",
    re.IGNORECASE,
)
# Values that switch such a key off.
_NEUTRAL_VALUES: tuple[Any, ...] = (None, False, [], {})
_DTYPES: dict[str, FloatFormat] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


def read_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json (and generation_config.json). Raises ConfigError."""
    file = folder / "config.json"
    values = StrictValues(file, _read(file))
    family = _family(values)
    _refuse_quantisation(values)
    config = _build(values, family, folder)
    unread = values.unread_keys()
    for key in unread:
        if key not in _HARMLESS_KEYS and _ARITHMETIC_KEY.search(key):
            value = values.raw(key)
            if not any(value is neutral or value == neutral for neutral in _NEUTRAL_VALUES):
                raise values.error(
                    key,
                    f"a setting that {family} models have",
                    value,
                    "it may change the arithmetic and is not implemented",
                )
    return replace(config, ignored_keys=tuple(unread))


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except JsonFileError as error:
        raise ConfigError(
            file,
            "(file)",
            "a model's configuration",
            said(str(error).removeprefix(f"{file}: ")),
            "give a folder with config.json, or a .gguf file",
        ) from error


def _family(values: StrictValues) -> Family:
    model_type = values.string("model_type")
    supported = ", ".join(FAMILIES)
    for family, traits in FAMILIES.items():
        if family == model_type:
            _check_architectures(values, traits)
            return family
    nearest = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.4)
    remedy = f"the nearest supported one is {nearest[0]!r}" if nearest else ""
    raise values.error("model_type", f"one of {supported}", model_type, remedy)


def _check_architectures(values: StrictValues, traits: _FamilyTraits) -> None:
    found = values.raw("architectures")
    # A bare decoder (`LlamaModel`) has no output head; a classifier has another one.
    if found is not None and found != [traits.architecture]:
        raise values.error("architectures", repr([traits.architecture]), found)


def _refuse_quantisation(values: StrictValues) -> None:
    for key in ("quantization_config", "compression_config"):
        block = values.raw(key)
        if block is None:
            continue
        method = block.get("quant_method", "unnamed") if isinstance(block, dict) else block
        raise values.error(
            key,
            "unquantised weights (float32, bfloat16, float16) or a GGUF file",
            said(f"quantisation method {method!r}"),
            "use the unquantised checkpoint or a Q4_0, Q4_1 or Q8_0 GGUF of it",
        )


def _build(values: StrictValues, family: Family, folder: Path) -> ModelConfig:
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
    bos, eos = _special_ids(values, folder, vocab_size)
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
        hidden_act=_hidden_act(values),
        dtype=_dtype(values),
        bos_token_id=bos,
        eos_token_ids=eos,
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


def _hidden_act(values: StrictValues) -> Any:
    name = values.string("hidden_act", default="silu")
    if name not in ("silu", "swish"):  # two names of x·sigmoid(x)
        raise values.error("hidden_act", "'silu'", name)
    return "silu"


def _dtype(values: StrictValues) -> FloatFormat | None:
    key = "dtype" if "dtype" in values else "torch_dtype"
    if key not in values:
        values.raw("dtype")
        values.raw("torch_dtype")
        return None
    name = values.string(key)
    if name not in _DTYPES:
        raise values.error(key, f"one of {', '.join(_DTYPES)}", name)
    return _DTYPES[name]


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


def _special_ids(
    values: StrictValues, folder: Path, vocab_size: int
) -> tuple[int | None, tuple[int, ...]]:
    """bos and eos ids; generation_config.json, where present, has the last word."""
    bos = values.token_ids("bos_token_id", vocab_size)
    eos = values.token_ids("eos_token_id", vocab_size)
    file = folder / "generation_config.json"
    if file.is_symlink() or file.exists():
        generation = StrictValues(file, _read(file))
        bos = generation.token_ids("bos_token_id", vocab_size) or bos
        eos = generation.token_ids("eos_token_id", vocab_size) or eos
    return (bos[0] if bos else None), eos
