"""Weights as they are read, bit by bit against transformers and the gguf library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from hal_engine.checkpoint.opening import open_checkpoint
from hal_engine.checkpoint.protocol import CheckpointError
from hal_engine.checkpoint.tensors import expected_tensors, verify_checkpoint
from hal_engine.config import load_model_config

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", list(CLASSES))
def test_saved_models_are_read_bit_by_bit(
    family: str, dtype: torch.dtype, shard_size: str, tmp_path: Path
) -> None:
    extra = {"head_dim": 24} if family in ("llama", "qwen3") else {}
    settings = {**TINY, **extra, "tie_word_embeddings": family == "qwen2"}
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = True
    model = transformers.AutoModelForCausalLM.from_config(CLASSES[family](**settings)).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    config = load_model_config(tmp_path)
    checkpoint = open_checkpoint(config)
    seen: list[tuple[int, int]] = []
    verify_checkpoint(config, checkpoint, lambda done, total, name: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(map(checkpoint.size_bytes, checkpoint.names()))
    state = model.state_dict()
    for name, shape in expected_tensors(config).items():
        value = checkpoint.read_float(name)
        assert value.shape == shape
        assert value.dtype == dtype
        assert torch.equal(value, state[name]), name
        assert checkpoint.stored_format(name) == str(dtype).removeprefix("torch.")
    name = "model.layers.1.mlp.down_proj.weight"
    part = checkpoint.read_float(name, rows=slice(16, 48), cols=slice(32, 96))
    assert torch.equal(part, state[name][16:48, 32:96])
    with pytest.raises(CheckpointError, match=r"down_proj.*group-quantised.*found"):
        checkpoint.read_blocks(name)
    checkpoint.close()


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name: str) -> str:
    for theirs, ours in {**GGUF_NAMES, "model.embed_tokens": "token_embd"}.items():
        name = name.replace(theirs, ours)
    name = name.replace("model.layers.", "blk.").replace("model.norm", "output_norm")
    return name.replace("lm_head", "output")


def interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The row order that GGUF files of the architecture "llama" have."""
    rows = weight.shape[0] // heads // 2
    split = weight.reshape(heads, 2, rows, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, family: str, model: Any, kind: Kind) -> None:
    """A GGUF of a transformers model, with matrices of type `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_merges([])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = gguf_name(name)
        values = tensor.float().numpy()
        part = stored.split(".")[2] if stored.startswith("blk.") else ""
        if family == "llama" and part in heads:
            values = interleave(values, heads[part])
        own = kind if values.ndim == 2 else Kind.F32
        writer.add_tensor(stored, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_values_equal_transformers(family: str, kind: Kind, tmp_path: Path) -> None:
    settings = {**TINY, "tie_word_embeddings": kind is Kind.Q4_1}
    model = transformers.AutoModelForCausalLM.from_config(CLASSES[family](**settings))
    for parameter in model.parameters():  # norms are ones and biases zeros before training
        torch.nn.init.normal_(parameter, std=0.3)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, family, model, kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    config = load_model_config(path)
    checkpoint = open_checkpoint(config)
    verify_checkpoint(config, checkpoint)
    for name in expected_tensors(config):
        assert torch.equal(checkpoint.read_float(name).float(), theirs[name]), name
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        part = checkpoint.read_float(name, rows=slice(16, 48), cols=slice(8, 40)).float()
        assert torch.equal(part, theirs[name][16:48, 8:40])
        assert config.stored_format(name) == checkpoint.stored_format(name)
        if kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1):
            blocks = checkpoint.read_blocks(name, rows=slice(16, 48), cols=slice(32, 64))
            assert torch.equal(blocks.dequantize(), theirs[name][16:48, 32:64])
            assert blocks.shape == (32, 32)
            with pytest.raises(CheckpointError, match="whole groups"):
                checkpoint.read_blocks(name, cols=slice(8, 40))
        else:
            with pytest.raises(CheckpointError, match="Q4_0, Q4_1, Q8_0"):
                checkpoint.read_blocks(name)
    bias = "model.layers.0.self_attn.q_proj.bias"
    if family == "qwen2":
        assert torch.equal(checkpoint.read_float(bias, rows=slice(4, 9)), theirs[bias][4:9])


def test_real_gguf_equals_transformers_processing(smollm2_gguf: Path) -> None:
    config = load_model_config(smollm2_gguf)
    checkpoint = open_checkpoint(config)
    verify_checkpoint(config, checkpoint)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    processor = LlamaTensorProcessor(config=heads)
    names = {gguf_name(name): name for name in expected_tensors(config)}
    header = GgufHeader.from_file(str(smollm2_gguf))
    tensors = load_gguf_state_dict(header)
    assert set(tensors) == set(names)
    for stored_name, tensor in tensors.items():
        raw, kind = tensor[...].numpy(), Kind(tensor.ggml_type)
        values = processor.process(gguf.quants.dequantize(raw, kind), stored_name).weights
        name, expected = names[stored_name], torch.from_numpy(values.copy())
        assert torch.equal(checkpoint.read_float(name), expected), name
        if config.stored_format(name) != "float32":
            assert torch.equal(checkpoint.read_blocks(name).dequantize(), expected), name
