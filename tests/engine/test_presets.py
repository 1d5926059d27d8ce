"""Presets: sizes against transformers' own models and published numbers, names, sources."""

from __future__ import annotations

import dataclasses
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hal.errors import PlanError
from hal.ops.formats import FORMATS
from hal_engine.config import ModelConfig, load_model_config
from hal_engine.kv_choice import IndexDType, KvDType
from hal_engine.model_source import ModelNotFoundError, resolve_model
from hal_engine.models.accounting import (
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    kv_copies,
    parameter_count,
    weight_bytes,
)
from hal_engine.precision import Precision, resolve_precision
from hal_engine.preset_files import PRESETS_FOLDER, load_presets, preset_of
from hal_engine.runnable import check_runnable

NAMES = list(load_presets())
GIB = 2**30


def config_of(name: str) -> ModelConfig:
    return load_model_config(load_presets()[name].path)


def precision_of(
    config: ModelConfig, kv_dtype: KvDType = "auto", index_dtype: IndexDType = "auto"
) -> Precision:
    """As on a device with a bfloat16 matrix unit."""
    features = frozenset({"matrix.bfloat16"})
    return resolve_precision(config, "auto", kv_dtype, features, index_dtype)


def transformers_model(name: str) -> Any:
    """The class of transformers with the preset's configuration, without memory for weights."""
    values = json.loads(load_presets()[name].path.read_text())
    values.pop("quantization_config", None)
    model_type = values["architectures"][0]
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return getattr(transformers, model_type)(config)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepseek-v4.1-flash"])
def test_parameters_are_those_of_the_model_in_transformers(name: str) -> None:
    """To the last one; the bias of a router's choice is a buffer there."""
    model = transformers_model(name)
    expected = sum(p.numel() for p in model.parameters())
    expected += sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias"))
    if model.config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert parameter_count(config_of(name)) == expected


def test_glm_5_has_the_parameters_of_the_published_tensors() -> None:
    """753,864,139,008 in the listing of zai-org/GLM-5.1, its draft layer 78 among them."""
    hidden, width, experts = 6144, 2048, 256
    attention = hidden * 2048 + 2048 + 2048 * 16384 + hidden * 576 + 512 + 512 * 28672
    attention += 16384 * hidden + 4096 * 2048 + 128 * hidden + 2 * 128 + 32 * hidden
    feed_forward = (experts + 1) * 3 * hidden * width + experts * hidden + experts
    draft = attention + feed_forward + 2 * hidden + 2 * hidden * hidden + 3 * hidden
    assert parameter_count(config_of("glm-5")) == 753_864_139_008 - draft


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m-instruct", 0.1345),
        ("llama-3-70b", 70.55),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.1),
        ("deepseek-v3.2", 671.9),  # 671 of V3 and 0.85 in indexers
        ("glm-5", 743.9),
        ("deepseek-v4-flash", 284.3),
        ("deepseek-v4.1-flash", 748.5),  # 552 and 196.6 in Engram tables
    ],
)
def test_parameters_are_as_many_as_published(name: str, billions: float) -> None:
    assert parameter_count(config_of(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_parameters_of_v41_by_part() -> None:
    config = config_of("deepseek-v4.1-flash")
    assert config.moe is not None
    assert config.engram is not None
    experts = 40 * 384 * 3 * 5120 * 2304
    assert experts / 1e9 == pytest.approx(543.6, abs=0.05)
    tables = sum(config.engram.rows) * config.engram.row_width
    assert tables / 1e9 == pytest.approx(196.6, abs=0.05)
    assert config.engram.rows_per_token == 24
    rest = parameter_count(config) - experts - tables
    assert (rest + experts) / 1e9 == pytest.approx(552, abs=0.5)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "index_dtype", "expected"),
    [
        ("deepseek-v3.2", "auto", "auto", 48_068),
        ("deepseek-v3.2", "fp8", "fp8", 48_068),
        ("deepseek-v3.2", "bfloat16", "auto", 61 * 2 * (576 + 128)),
        ("glm-5", "native", "auto", 61_464),
        ("glm-5", "auto", "auto", 78 * 2 * (576 + 128)),
        ("deepseek-v4-flash", "auto", "auto", 3_850),
        ("deepseek-v4-flash", "auto", "fp4", 3_514),
        ("deepseek-v4.1-flash", "auto", "auto", 890),
        ("deepseek-v4.1-flash", "native", "fp4", 890),
        ("deepseek-v4.1-flash", "fp8", "auto", 1_650),
        ("deepseek-v4.1-flash", "bfloat16", "auto", 3_200),
        ("llama-3-70b", "auto", "auto", 80 * 2 * 8 * 128 * 2),
    ],
)
def test_cache_bytes_per_token(
    name: str, kv_dtype: KvDType, index_dtype: IndexDType, expected: int
) -> None:
    config = config_of(name)
    precision = precision_of(config, kv_dtype, index_dtype)
    assert kv_bytes_per_token(config, precision) == expected
    is_shared = config.mla is not None or config.compressed is not None
    assert kv_copies(config, 8) == (8 if is_shared else 1)


def test_cache_bytes_per_sequence_are_windows_and_open_states() -> None:
    config = config_of("deepseek-v4-flash")
    windows = 43 * 128 * 584
    sparse, heavy = 21 * 8 * 2 * (2 * 512 + 2 * 128) * 4, 20 * 128 * 2 * 512 * 4
    assert kv_bytes_per_sequence(config, precision_of(config)) == windows + sparse + heavy
    dense = config_of("llama-3-70b")
    assert kv_bytes_per_sequence(dense, precision_of(dense)) == 0


def test_weight_bytes_follow_the_stored_formats() -> None:
    """GLM-5.1's files hold 1,404.18 GiB, of which its draft layer has about 18.5."""
    glm = config_of("glm-5")
    assert weight_bytes(glm, precision_of(glm)) / GIB == pytest.approx(1404.18 - 18.55, abs=0.5)
    v41 = config_of("deepseek-v4.1-flash")
    # 510.3 GB are published; drafts (13.6B in FP4) and vision (0.9 GB) are not planned.
    published = 510.3e9 - 13.6e9 * (4.25 / 8) - 0.9e9
    assert weight_bytes(v41, precision_of(v41)) == pytest.approx(published, rel=5e-3)
    widened = resolve_precision(v41, "bf16", "auto", frozenset())
    assert weight_bytes(v41, widened) > 2.4 * weight_bytes(v41, precision_of(v41))
    ranks = weight_bytes(v41, precision_of(v41), 8)
    assert (
        weight_bytes(v41, precision_of(v41)) / 8 < ranks < weight_bytes(v41, precision_of(v41)) / 7
    )


def test_fp8_checkpoints_run_as_stored_with_rounded_activations() -> None:
    v32, v41 = config_of("deepseek-v3.2"), config_of("deepseek-v4.1-flash")
    assert v41.quantization is not None
    name = "model.layers.3.self_attn.o_proj.weight"
    assert precision_of(v32).weight_format(v32, [name]) is FORMATS["fp8_block128_ue8m0_a8"]
    expert = "model.layers.3.mlp.experts.7.down_proj.weight"
    assert precision_of(v41).weight_format(v41, [expert]) is FORMATS["mxfp4_a8"]
    assert precision_of(v41).weight_format(v41, [name]) is FORMATS["fp8_block32_ue8m0_a8"]
    for kept in ("lm_head.weight", "model.layers.3.mlp.gate.weight", "model.norm.weight"):
        assert precision_of(v41).weight_format(v41, [kept]) is FORMATS["bfloat16"]
    bf16 = resolve_precision(v41, "bf16", "auto", frozenset())
    assert bf16.weight_format(v41, [expert]) is FORMATS["bfloat16"]
    assert any("widened" in note for note in bf16.notes)
    kept = dataclasses.replace(v41.quantization, kept_modules=("mlp.gate", "layers.3.self_attn"))
    partly = dataclasses.replace(v41, quantization=kept)
    assert partly.stored_format(name) == "bfloat16"
    assert partly.stored_format(name.replace("3", "33")) == "fp8_block32_ue8m0"
    assert partly.stored_format("model.layers.4.mlp.gate_proj.weight") == "fp8_block32_ue8m0"
    w8 = resolve_precision(v41, "w8", "auto", frozenset({"matrix.bfloat16"}))
    with pytest.raises(PlanError, match="a second time"):
        w8.weight_format(v41, [expert])


@pytest.mark.parametrize(
    ("name", "kv_dtype", "index_dtype", "words"),
    [
        ("llama-3-70b", "fp8", "auto", "engine.kv_dtype=fp8"),
        ("llama-3-70b", "auto", "fp4", "engine.index_dtype=fp4"),
        ("deepseek-v3.2", "float32", "auto", "engine.kv_dtype=float32"),
    ],
)
def test_cache_formats_that_a_model_does_not_have_are_refused(
    name: str, kv_dtype: KvDType, index_dtype: IndexDType, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        precision_of(config_of(name), kv_dtype, index_dtype)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_a_source(name: str) -> None:
    preset = load_presets()[name]
    keys = set(preset.values())
    for key in keys:
        assert preset.source_of(key).source
        assert preset.source_of(key).confidence in ("class", "copy", "report")
    for source in preset.sources:
        for pattern in source.keys:
            assert any(fnmatchcase(key, pattern) for key in keys), f"{name} has no {pattern}"


def test_every_file_is_a_preset() -> None:
    assert {path.stem for path in PRESETS_FOLDER.glob("*.json")} == set(NAMES)


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = resolve_model("deepseek-v3.2")
    assert path == load_presets()["deepseek-v3.2"].path
    assert preset_of(path) is load_presets()["deepseek-v3.2"]
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("./deepseek-v3.2")
    assert "found nothing" in str(caught.value)
    (tmp_path / "deepseek-v3.2").mkdir()
    (tmp_path / "deepseek-v3.2" / "config.json").write_text(path.read_text())
    found = resolve_model("deepseek-v3.2")  # what exists wins
    assert found == Path("deepseek-v3.2")
    assert preset_of(found) is None
    assert load_model_config(found).to_dict() | {"source": ""} == load_model_config(
        path
    ).to_dict() | {"source": ""}


@pytest.mark.parametrize("wrong", ["deepseek-v32", "DeepSeek-V3.2", "glm5", "qwen3-30b"])
def test_a_misspelt_preset_is_corrected(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(wrong)
    assert "did you mean the preset" in str(caught.value)
    assert "hal models" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_never_run(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_runnable(config_of(name))
    assert load_presets()[name].repository in str(caught.value)


def test_a_family_without_layers_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(load_presets()["deepseek-v3.2"].path.read_text())
    with pytest.raises(PlanError) as caught:
        check_runnable(load_model_config(tmp_path))
    assert "deepseek_v32" in str(caught.value)
    (tmp_path / "config.json").write_text(load_presets()["llama-3-70b"].path.read_text())
    check_runnable(load_model_config(tmp_path))
