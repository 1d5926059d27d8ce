"""Damaged checkpoints: each is refused by name, without a hang, a crash or a half-loaded model."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from hal_engine.checkpoint.gguf_header import GGUFError, read_gguf_header
from hal_engine.checkpoint.opening import open_checkpoint
from hal_engine.checkpoint.protocol import CheckpointError
from hal_engine.checkpoint.tensors import verify_checkpoint
from hal_engine.config import ConfigError, load_model_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def save(folder: Path, shard_size: str) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=shard_size)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    save(root / "single", "1GB")
    save(root / "shards", "30KB")
    return {"single": root / "single", "shards": root / "shards"}


def verify(folder: Path) -> None:
    config = load_model_config(folder)
    checkpoint = open_checkpoint(config)
    try:
        verify_checkpoint(config, checkpoint)
    finally:
        checkpoint.close()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / SINGLE)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    values = tensors(folder)
    change(values)
    safetensors.torch.save_file(values, folder / SINGLE)


def with_value(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(values: dict[str, torch.Tensor]) -> None:
        values[UP][7, 3] = value

    return change


def replaced(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda values: values.__setitem__(name, value)


def with_header(folder: Path, change: Callable[[str], str]) -> None:
    raw = (folder / SINGLE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(raw[8 : 8 + length].decode()).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def repeated_name(header: str) -> str:
    entry = json.dumps(json.loads(header)[UP])
    return header.rstrip().rstrip("}") + f'}},"{UP}":{entry}}}'


def cut(folder: Path, keep: int) -> None:
    raw = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(raw[:keep])


def link_to_itself(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(folder / SINGLE)


def as_fifo(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def as_folder(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


def as_pickle(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def untied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))


SINGLE_MUTANTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda f: rewrite(f, lambda v: v.pop(UP)), [UP, "[48, 32]", "found nothing"]),
    "extra": (
        lambda f: rewrite(f, replaced("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32))),
        ["model.layers.2.mlp.up_proj.weight", "no such tensor"],
    ),
    "shape": (lambda f: rewrite(f, replaced(UP, torch.ones(47, 32))), [UP, "[48, 32]", "[47, 32]"]),
    "transposed": (lambda f: rewrite(f, replaced(UP, torch.ones(32, 48))), [UP, "[32, 48]"]),
    "rank": (lambda f: rewrite(f, replaced(UP, torch.ones(48 * 32))), [UP, "[1536]"]),
    "int8": (
        lambda f: rewrite(f, replaced(UP, torch.ones(48, 32, dtype=torch.int8))),
        [UP, "float32", "safetensors_i8"],
    ),
    "float8": (
        lambda f: rewrite(f, replaced(UP, torch.ones(48, 32).to(torch.float8_e4m3fn))),
        [UP, "safetensors_f8_e4m3"],
    ),
    "float64": (
        lambda f: rewrite(f, replaced(UP, torch.ones(48, 32, dtype=torch.float64))),
        [UP, "safetensors_f64"],
    ),
    "nan": (lambda f: rewrite(f, with_value(float("nan"))), [UP, "finite", "NaN"]),
    "infinity": (lambda f: rewrite(f, with_value(float("inf"))), [UP, "finite"]),
    "minus-infinity": (lambda f: rewrite(f, with_value(float("-inf"))), [UP, "finite"]),
    "cut-data": (lambda f: cut(f, (f / SINGLE).stat().st_size - 5), [SINGLE, "whole"]),
    "cut-header": (lambda f: cut(f, 300), [SINGLE, "truncated"]),
    "cut-length": (lambda f: cut(f, 5), [SINGLE, "truncated"]),
    "empty": (lambda f: cut(f, 0), [SINGLE]),
    "huge-header": (
        lambda f: (f / SINGLE).write_bytes(b"\xff" * 7 + b"\x7f" + b"x" * 999),
        [SINGLE, "header"],
    ),
    "garbage-header": (lambda f: with_header(f, lambda h: "{" + h), [SINGLE, "valid JSON"]),
    "repeated-name": (lambda f: with_header(f, repeated_name), [UP, "twice"]),
    "offsets": (
        lambda f: with_header(f, lambda h: h.replace('"data_offsets":[0,', '"data_offsets":[8,')),
        [SINGLE],
    ),
    "negative-shape": (
        lambda f: with_header(f, lambda h: h.replace("[48,32]", "[-48,32]")),
        [SINGLE, "shape"],
    ),
    "no-dtype": (lambda f: with_header(f, lambda h: h.replace('"dtype"', '"type"')), ["dtype"]),
    "trailing": (lambda f: (f / SINGLE).open("ab").write(b"xxxx"), [SINGLE]),
    "loop": (link_to_itself, [SINGLE, "regular file"]),
    "fifo": (as_fifo, [SINGLE, "regular file"]),
    "folder": (as_folder, [SINGLE, "a folder"]),
    "pickle": (as_pickle, ["pytorch_model.bin", "convert"]),
    "nothing": (lambda f: (f / SINGLE).unlink(), [SINGLE, INDEX, "neither"]),
    "other-head": (untied, ["lm_head.weight", "tie_word_embeddings"]),
    "both": (lambda f: (f / INDEX).write_text("{}"), [SINGLE, INDEX, "both"]),
}


@pytest.mark.parametrize("name", list(SINGLE_MUTANTS))
def test_one_file_mutants(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    mutate, words = SINGLE_MUTANTS[name]
    folder = shutil.copytree(originals["single"], tmp_path / "model")
    verify(folder)
    mutate(folder)
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def index_of(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return index


def reindex(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = index_of(folder)
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(folder: Path, name: str = UP) -> Path:
    return folder / str(index_of(folder)["weight_map"][name])


def duplicate_over_shards(folder: Path) -> None:
    others = sorted(set(folder.glob("*.safetensors")) - {shard_of(folder)})
    values = safetensors.torch.load_file(others[0])
    safetensors.torch.save_file({**values, UP: torch.ones(48, 32)}, others[0])


def outside(folder: Path, name: str) -> None:
    shutil.copy(shard_of(folder), folder.parent / "x.safetensors")
    reindex(folder, lambda m: m.update({UP: name}))


SHARD_MUTANTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "parent": (lambda f: outside(f, "../x.safetensors"), [UP, "'../x.safetensors'"]),
    "absolute": (lambda f: outside(f, str(f.parent / "x.safetensors")), [UP, "file name in this"]),
    "number": (lambda f: outside(f, 7), [UP, "found 7"]),  # type: ignore[arg-type]
    "other-suffix": (lambda f: reindex(f, lambda m: m.update({UP: "x.bin"})), [UP, "'x.bin'"]),
    "nul": (lambda f: reindex(f, lambda m: m.update({UP: "\0.safetensors"})), [".safetensors"]),
    "no-shard": (lambda f: shard_of(f).unlink(), ["No such file"]),
    "not-in-shard": (lambda f: reindex(f, lambda m: m.update({"x": shard_of(f).name})), ["x: req"]),
    "not-in-index": (lambda f: reindex(f, lambda m: m.pop(UP)), [UP, "found only in"]),
    "twice": (duplicate_over_shards, [UP, "one shard"]),
    "no-map": (lambda f: (f / INDEX).write_text("{}"), ["weight_map"]),
    "list": (lambda f: (f / INDEX).write_text('{"weight_map": []}'), ["weight_map"]),
    "repeated-key": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
        ["'a' twice"],
    ),
    "not-json": (lambda f: (f / INDEX).write_text("weights"), [INDEX, "valid JSON"]),
    "swapped": (
        lambda f: shutil.copy(shard_of(f), shard_of(f, "model.embed_tokens.weight")),
        ["model.embed_tokens.weight"],
    ),
}


@pytest.mark.parametrize("name", list(SHARD_MUTANTS))
def test_shard_mutants(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    mutate, words = SHARD_MUTANTS[name]
    folder = shutil.copytree(originals["shards"], tmp_path / "model")
    verify(folder)
    mutate(folder)
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_problems_are_told_at_once(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(originals["single"], tmp_path / "model")
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]

    def change(values: dict[str, torch.Tensor]) -> None:
        del values[names[0]]
        values[names[1]] = torch.ones(3, 3)
        values["strange"] = torch.ones(1)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert len(caught.value.problems) == 3
    rewrite(folder, lambda values: values.update({str(i): torch.ones(1) for i in range(50)}))
    with pytest.raises(CheckpointError, match="and 33 more"):
        verify(folder)


def test_harmless_buffers_and_links_are_accepted(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(originals["single"], tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, replaced(name, torch.full((4,), float("nan"))))
    (folder / SINGLE).rename(tmp_path / "blob")
    (folder / SINGLE).symlink_to("../blob")  # as a download cache keeps its files
    verify(folder)


HEADER_KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
SHAPES = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def write_gguf(
    path: Path,
    keys: dict[str, Any] | None = None,
    drop: str = "",
    change: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]] = lambda _, v: v,
    architecture: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**HEADER_KEYS, **(keys or {})}.items():
        name = key if key.startswith("split") else f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_layer_norm_rms_eps(1e-5)
    rng = np.random.default_rng(3)
    shapes = {"token_embd.weight": (96, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
    for name, shape in shapes.items():
        values = change(name, rng.normal(size=shape).astype(np.float32))
        if name == drop:
            continue
        if values.ndim == 2 and values.shape[1] % 32 == 0 and values.dtype == np.float32:
            writer.add_tensor(name, gguf.quants.quantize(values, Q4_1), raw_dtype=Q4_1)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_MUTANTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": ({"drop": "blk.1.ffn_up.weight"}, ["model.layers.1.mlp.up_proj.weight", "nothing"]),
    "no-embedding": ({"drop": "token_embd.weight"}, ["token_embd.weight", "nothing"]),
    "layers": ({"keys": {"block_count": 3}}, ["model.layers.2.", "found nothing"]),
    "fewer-layers": ({"keys": {"block_count": 1}}, ["model.layers.1.", "no such tensor"]),
    "width": ({"keys": {"embedding_length": 64}}, ["[96, 64]", "[96, 32]"]),
    "no-heads": ({"keys": {"attention.head_count": None}}, ["llama.attention.head_count"]),
    "zero-heads": ({"keys": {"attention.head_count": 0}}, ["head_count", "found 0"]),
    "kv-heads": ({"keys": {"attention.head_count_kv": 3}}, ["head_count_kv", "divisor"]),
    "text": ({"keys": {"block_count": "2"}}, ["llama.block_count", "'2'"]),
    "bool": ({"keys": {"block_count": True}}, ["llama.block_count", "True"]),
    "float": ({"keys": {"context_length": 64.0}}, ["llama.context_length"]),
    "nan-theta": ({"keys": {"rope.freq_base": float("nan")}}, ["rope.freq_base", "nan"]),
    "yarn": ({"keys": {"rope.scaling.type": "yarn"}}, ["rope.scaling.type", "'yarn'"]),
    "rotary": ({"keys": {"rope.dimension_count": 4}}, ["rope.dimension_count", "found 4"]),
    "logit-scale": ({"keys": {"logit_scale": 0.5}}, ["llama.logit_scale", "0.5"]),
    "experts": ({"keys": {"expert_count": 8}}, ["llama.expert_count"]),
    "window": ({"keys": {"attention.sliding_window": 16}}, ["sliding_window"]),
    "vocabulary": ({"keys": {"vocab_size": 97}}, ["vocab_size", "97"]),
    "split": ({"keys": {"split.count": 2}}, ["split.count", "merge"]),
    "architecture": ({"architecture": "lama"}, ["'lama'", "nearest", "'llama'"]),
    "nan-norm": (
        {"change": lambda n, v: v * np.nan if n == "blk.0.attn_norm.weight" else v},
        ["model.layers.0.input_layernorm.weight", "finite"],
    ),
    "infinite-scale": (
        {"change": lambda n, v: v * 1e9 if n == "blk.0.ffn_up.weight" else v},
        ["model.layers.0.mlp.up_proj.weight", "finite", "scales"],
    ),
    "integers": (
        {"change": lambda n, v: v.astype(np.int32) if n == "blk.0.ffn_up.weight" else v},
        ["model.layers.0.mlp.up_proj.weight", "gguf_i32"],
    ),
    "quantised-norm": (
        {"change": lambda n, v: v[None] if n == "output_norm.weight" else v},
        ["model.norm.weight", "[32]", "[1, 32]"],
    ),
}


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize("name", list(GGUF_MUTANTS))
def test_gguf_mutants(name: str, tmp_path: Path) -> None:
    verify(write_gguf(tmp_path / "good.gguf"))
    arguments, words = GGUF_MUTANTS[name]
    path = write_gguf(tmp_path / "bad.gguf", **arguments)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        verify(path)
    assert "bad.gguf" in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_cut_of_a_gguf_is_refused(tmp_path: Path) -> None:
    raw = write_gguf(tmp_path / "good.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for keep in [*range(0, 4000, 7), *range(4000, len(raw) - 32, 997)]:
        path.write_bytes(raw[:keep])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            load_model_config(path)


def test_damaged_gguf_bytes_never_crash_or_hang(tmp_path: Path) -> None:
    """Random bytes in the header: read, or refused with our own errors, in bounded time."""
    raw = bytearray(write_gguf(tmp_path / "good.gguf").read_bytes())
    path, rng, refused = tmp_path / "bad.gguf", random.Random(5), 0
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(0, 3000)
            length = rng.choice([1, 1, 8])
            damaged[at : at + length] = rng.choice([rng.randbytes(length), b"\xff" * length])
        path.write_bytes(damaged)
        try:
            verify(path)
        except (ConfigError, CheckpointError):
            refused += 1
    assert refused > 200


def test_hostile_counts_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    start = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    array = struct.pack("<IIQ", 9, 8, 2**62)
    for body in (
        struct.pack("<QQ", 2**63, 0),
        struct.pack("<QQ", 0, 2**63),
        struct.pack("<QQ", 0, 1) + key + array,
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, 2**62),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**63),
        struct.pack("<QQ", 1, 0) + key + struct.pack("<IQ", 2**31, 1),
    ):
        path.write_bytes(start + body + b"\0" * 64)
        with pytest.raises(GGUFError, match=r"bad\.gguf"):
            read_gguf_header(path)
