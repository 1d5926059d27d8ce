"""`ModelConfig` from the header of a GGUF file."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from hal_engine.checkpoint.gguf_header import GGUFError, GGUFHeader, read_gguf_header
from hal_engine.checkpoint.gguf_names import huggingface_name, stored_format
from hal_engine.config import ABSENT, ConfigError, Family, FloatFormat, ModelConfig
from hal_engine.config_parts import RopeConfig
from hal_engine.config_rope import DEFAULT_THETA
from hal_engine.config_values import (
    MAX_LAYERS,
    MAX_POSITIONS,
    StrictValues,
    check_head_counts,
    check_head_dim,
)

# Mistral models are published with the architecture "llama"; the arithmetic is the same.
_FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_FLOATS: dict[str, FloatFormat] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_config(path: Path) -> ModelConfig:
    """Reads the header of `path`; no tensor data. Raises ConfigError."""
    try:
        header = read_gguf_header(path)
    except GGUFError as error:
        raise ConfigError(path, error.what, error.required, str(error.found)) from error
    return config_of_header(header)


def config_of_header(header: GGUFHeader) -> ModelConfig:
    """The configuration that a header that was read before describes. Raises ConfigError."""
    top = StrictValues(header.path, header.metadata)
    architecture = top.string("general.architecture")
    if architecture not in _FAMILIES:
        nearest = difflib.get_close_matches(architecture, _FAMILIES, n=1, cutoff=0.4)
        remedy = f"the nearest supported one is {nearest[0]!r}" if nearest else ""
        raise top.error(
            "general.architecture", f"one of {', '.join(_FAMILIES)}", architecture, remedy
        )
    if top.integer("split.count", least=0, default=1) > 1:
        raise top.error("split.count", "one file", top.raw("split.count"), "merge the parts first")
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    values = StrictValues(header.path, own, prefix)
    config = _build(header, top, values, _FAMILIES[architecture])
    unread = values.unread_keys()
    for key in unread:  # what stands under the architecture's name is there to change arithmetic
        if values.raw(key) not in (0, False, ""):
            raise values.error(
                key,
                f"a setting of {architecture} models that is implemented",
                values.raw(key),
                "it may change the arithmetic",
            )
    ignored = [key for key in header.metadata if key.startswith("general.")]
    return replace(
        config, ignored_keys=tuple(sorted([*ignored, *(prefix + key for key in unread)]))
    )


def _build(
    header: GGUFHeader, top: StrictValues, values: StrictValues, family: Family
) -> ModelConfig:
    names = _names(header)
    layers = values.integer("block_count", most=MAX_LAYERS)
    hidden = values.integer("embedding_length")
    heads, kv_heads, head_dim = _heads(values, hidden)
    positions = values.integer("context_length", most=MAX_POSITIONS)
    vocab_size = _vocab_size(header, values)
    bos = top.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    return ModelConfig(
        source=str(header.path),
        source_format="gguf",
        family=family,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=values.integer("feed_forward_length"),
        vocab_size=vocab_size,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon", most=1.0),
        rope=_rope(values),
        max_position_embeddings=positions,
        sliding_windows=(_window(values),) * layers,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        output_bias="model.layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in names,
        qk_norm=family == "qwen3",
        tie_word_embeddings="lm_head.weight" not in names,
        hidden_act="silu",
        dtype=_float_type(header),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos(top, vocab_size),
        stored_formats=names,
    )


def _names(header: GGUFHeader) -> dict[str, str]:
    """Hugging Face name -> stored format, for every tensor of the file."""
    formats: dict[str, str] = {}
    for tensor in header.tensors.values():
        name = huggingface_name(tensor.name)
        if name is None and tensor.name.startswith("rope_f"):
            raise ConfigError(
                header.path,
                tensor.name,
                "rope settings in the metadata",
                "a table of frequency factors",
                "use the Hugging Face folder of this model",
            )
        formats[name or tensor.name] = stored_format(tensor.type_name)
    return formats


def _heads(values: StrictValues, hidden: int) -> tuple[int, int, int]:
    heads = values.integer("attention.head_count", most=2**16)
    kv_heads = values.integer("attention.head_count_kv", most=2**16, default=heads)
    check_head_counts(values, "attention.head_count", heads, "attention.head_count_kv", kv_heads)
    if "attention.key_length" in values:
        head_dim = values.integer("attention.key_length")
    elif hidden % heads:
        required = f"a multiple of attention.head_count ({heads})"
        raise values.error("embedding_length", required, hidden)
    else:
        head_dim = hidden // heads
    check_head_dim(values, "attention.key_length", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(key, default=head_dim) != head_dim:
            raise values.error(key, f"the head size ({head_dim})", values.raw(key))
    return heads, kv_heads, head_dim


def _vocab_size(header: GGUFHeader, values: StrictValues) -> int:
    """Rows of the embedding; the metadata and the list of tokens must agree with it."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(header.path, "token_embd.weight", "an embedding tensor", ABSENT)
    rows = embedding.shape[0]
    if values.integer("vocab_size", default=rows) != rows:
        raise values.error("vocab_size", f"the embedding's rows ({rows})", values.raw("vocab_size"))
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        required = f"at most {rows} tokens, the embedding's rows"
        raise ConfigError(header.path, "tokenizer.ggml.tokens", required, len(tokens))
    return rows


def _rope(values: StrictValues) -> RopeConfig:
    theta = values.number("rope.freq_base", above=1.0, default=DEFAULT_THETA)
    kind = values.string("rope.scaling.type", default="none")
    if kind not in ("none", "linear"):
        raise values.error(
            "rope.scaling.type", "'none' or 'linear'", kind, "use the Hugging Face folder"
        )
    # Old files write the linear factor as `rope.scale_linear`.
    factor = values.number("rope.scale_linear", most=1e6, default=1.0)
    factor = values.number("rope.scaling.factor", most=1e6, default=factor)
    if "rope.scaling.type" in values and kind == "none" and factor != 1.0:
        raise values.error("rope.scaling.factor", "1 with scaling type 'none'", factor)
    if factor != 1.0:
        return RopeConfig(theta=theta, type="linear", factor=factor)
    return RopeConfig(theta=theta)


def _window(values: StrictValues) -> int | None:
    if "attention.sliding_window" not in values:
        return None
    # llama.cpp does not apply a window to these architectures; which one is meant is not sayable.
    window = values.integer("attention.sliding_window", least=0, most=MAX_POSITIONS)
    if window:
        raise values.error("attention.sliding_window", "no window in a GGUF file", window)
    return None


def _float_type(header: GGUFHeader) -> FloatFormat | None:
    """The float type of the matrices where they have one in common; None for quantised files."""
    kinds = {t.type_name for t in header.tensors.values() if len(t.shape) > 1}
    return _FLOATS.get(kinds.pop()) if len(kinds) == 1 else None


def _eos(top: StrictValues, vocab_size: int) -> tuple[int, ...]:
    """End of text, and end of turn where the file names one."""
    keys = ("eos", "eot", "eom")
    ids = [top.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size) for key in keys]
    return tuple(dict.fromkeys(token_id for found in ids for token_id in found))
