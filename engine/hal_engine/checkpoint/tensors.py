"""Which tensors a model must have, and the check of a checkpoint before it is served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hal_engine.checkpoint.protocol import Checkpoint, CheckpointError, Progress
from hal_engine.config import ModelConfig

if TYPE_CHECKING:
    import torch

EMBEDDING, OUTPUT_HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Buffers that old versions of transformers saved; they are computed, not learnt.
_HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias)")
_FLOAT_FORMATS = ("float32", "bfloat16", "float16")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the model; linear weights are [outputs, inputs]."""
    hidden = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config).items():
            expected[f"model.layers.{layer}.{name}"] = shape
    expected["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        expected[OUTPUT_HEAD] = (config.vocab_size, hidden)
    return expected


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.query_size, config.key_value_size
    linear = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.v_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (outputs, inputs, has_bias) in linear.items():
        tensors[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            tensors[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        tensors["self_attn.q_norm.weight"] = (config.head_dim,)
        tensors["self_attn.k_norm.weight"] = (config.head_dim,)
    return tensors


def structure_problems(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Missing, unexpected, wrongly shaped and wrongly typed tensors; reads no tensor data."""
    expected = expected_tensors(config)
    found = set(checkpoint.names())
    problems = [
        f"{name}: required {list(shape)}, found nothing"
        for name, shape in expected.items()
        if name not in found
    ]
    for name in checkpoint.names():
        shape = expected.get(name)
        if shape is None and name == OUTPUT_HEAD and config.tie_word_embeddings:
            shape = expected[EMBEDDING]  # a saved copy of the tied weight; its values are compared
        if shape is None:
            if not _HARMLESS.fullmatch(name):
                problems.append(f"{name}: required no such tensor in this model, found it")
            continue
        if checkpoint.shape(name) != shape:
            problems.append(f"{name}: required {list(shape)}, found {list(checkpoint.shape(name))}")
        problems += _format_problems(name, checkpoint.stored_format(name), len(shape))
    return problems


def _format_problems(name: str, stored: str, dimensions: int) -> list[str]:
    if stored in _FLOAT_FORMATS:
        return []
    is_block = stored.startswith(("int", "gguf_")) and not stored.startswith(("gguf_i", "gguf_f64"))
    if dimensions == 2 and is_block:
        return []
    return [f"{name}: required {', '.join(_FLOAT_FORMATS)} or a GGUF block type, found {stored}"]


def verify_checkpoint(
    config: ModelConfig, checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Raises one CheckpointError with every problem of the checkpoint.

    First the table (names, shapes, formats); where that is right, every value is read once, one
    tensor at a time, and must be finite.
    """
    problems = structure_problems(config, checkpoint)
    if not problems:
        problems = _value_problems(config, checkpoint, progress)
    if problems:
        raise CheckpointError(checkpoint.path, problems)


def _value_problems(
    config: ModelConfig, checkpoint: Checkpoint, progress: Progress | None
) -> list[str]:
    names = [name for name in checkpoint.names() if not _HARMLESS.fullmatch(name)]
    total = sum(checkpoint.size_bytes(name) for name in names)
    problems, done = [], 0
    for name in names:
        for what, values in _values(checkpoint, name).items():
            if not _is_finite(values):
                where = f" among its {what}" if what != "values" else ""
                problems.append(f"{name}: required finite values, found NaN or infinity{where}")
        done += checkpoint.size_bytes(name)
        if progress is not None:
            progress(done, total, name)
    if config.tie_word_embeddings and OUTPUT_HEAD in names and not problems:
        problems += _tie_problems(checkpoint)
    return problems


def _values(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """What decides whether a tensor is finite: for groups of integers their scales and minima."""
    if not checkpoint.stored_format(name).startswith("int"):
        return {"values": checkpoint.read_float(name)}
    blocks = checkpoint.read_blocks(name)
    parts = {"scales": blocks.scale}
    if blocks.minimum is not None:
        parts["minima"] = blocks.minimum
    return parts


def _is_finite(values: torch.Tensor) -> bool:
    import torch

    least, most = torch.aminmax(values)  # NaN comes through; no temporary as large as the tensor
    return bool(torch.isfinite(least) and torch.isfinite(most))


def _tie_problems(checkpoint: Checkpoint) -> list[str]:
    import torch

    if torch.equal(checkpoint.read_float(EMBEDDING), checkpoint.read_float(OUTPUT_HEAD)):
        return []
    return [
        f"{OUTPUT_HEAD}: required the values of {EMBEDDING} (tie_word_embeddings is true), "
        "found others; set tie_word_embeddings to false if the head is its own"
    ]
