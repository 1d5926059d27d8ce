"""Fields that the configurations of all Hugging Face families have, and what may be ignored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from hal_engine.config import ConfigError, FloatFormat, said
from hal_engine.config_values import StrictValues
from hal_engine.strict_json import JsonFileError, read_json_object

# Without effect on inference: training, storage and bookkeeping.
HARMLESS_KEYS = frozenset(
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
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
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


def read_json(file: Path) -> dict[str, Any]:
    """The object in a model's JSON file. Raises ConfigError."""
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


def ignored_keys(values: StrictValues, family: str) -> tuple[str, ...]:
    """The keys that nothing read. Raises ConfigError for one that may change the arithmetic."""
    unread = values.unread_keys()
    for key in unread:
        if key not in HARMLESS_KEYS and _ARITHMETIC_KEY.search(key):
            value = values.raw(key)
            if not any(value is neutral or value == neutral for neutral in _NEUTRAL_VALUES):
                raise values.error(
                    key,
                    f"a setting that {family} models have",
                    value,
                    "it may change the arithmetic and is not implemented",
                )
    return tuple(unread)


def read_hidden_act(values: StrictValues) -> Literal["silu"]:
    """The activation of the feed-forward: SiLU under one of its two names."""
    name = values.string("hidden_act", default="silu")
    if name not in ("silu", "swish"):
        raise values.error("hidden_act", "'silu'", name)
    return "silu"


def read_dtype(values: StrictValues) -> FloatFormat | None:
    """The dtype that the checkpoint says it has; None where it does not say."""
    key = "dtype" if "dtype" in values else "torch_dtype"
    if key not in values:
        values.raw("dtype")
        values.raw("torch_dtype")
        return None
    name = values.string(key)
    if name not in _DTYPES:
        raise values.error(key, f"one of {', '.join(_DTYPES)}", name)
    return _DTYPES[name]


def read_special_ids(values: StrictValues, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """bos and eos ids; generation_config.json beside config.json has the last word."""
    bos = values.token_ids("bos_token_id", vocab_size)
    eos = values.token_ids("eos_token_id", vocab_size)
    file = values.file.parent / "generation_config.json"
    if values.file.name == "config.json" and (file.is_symlink() or file.exists()):
        generation = StrictValues(file, read_json(file))
        bos = generation.token_ids("bos_token_id", vocab_size) or bos
        eos = generation.token_ids("eos_token_id", vocab_size) or eos
    return (bos[0] if bos else None), eos
