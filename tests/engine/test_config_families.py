"""Configurations of families beyond dense decoders: against transformers' classes, and refused."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from hal.errors import HalError
from hal_engine.config import ConfigError, ModelConfig, load_model_config
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from hal_engine.preset_files import load_presets

REMOVED = "<removed>"


def changed(folder: Path, preset: str, changes: dict[str, Any]) -> Path:
    """The preset's file with keys changed ("a.b" is b of a) or removed."""
    values = load_presets()[preset].values()
    for key, value in changes.items():
        *outer, last = key.split(".")
        block = values
        for name in outer:
            block = block[name]
        if value is REMOVED:
            del block[last]
        else:
            block[last] = value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# What transformers calls a value, and where ours stands.
MLA = {
    "q_lora_rank": "mla.q_lora_rank",
    "kv_lora_rank": "mla.kv_lora_rank",
    "qk_nope_head_dim": "mla.nope_dim",
    "qk_rope_head_dim": "mla.rope_dim",
    "v_head_dim": "mla.v_dim",
    "qk_head_dim": "head_dim",
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.experts_per_token",
    "moe_intermediate_size": "moe.intermediate_size",
    "n_group": "moe.num_groups",
    "topk_group": "moe.num_groups_picked",
    "routed_scaling_factor": "moe.route_scale",
    "norm_topk_prob": "moe.normalizes",
}
INDEXER = {
    "index_n_heads": "indexer.num_heads",
    "index_head_dim": "indexer.head_dim",
    "index_topk": "indexer.top_k",
}
COMPRESSED = {
    **INDEXER,
    "head_dim": "head_dim",
    "q_lora_rank": "compressed.q_lora_rank",
    "qk_rope_head_dim": "compressed.rope_dim",
    "sliding_window": "compressed.window",
    "o_groups": "compressed.o_groups",
    "o_lora_rank": "compressed.o_lora_rank",
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.experts_per_token",
    "moe_intermediate_size": "moe.intermediate_size",
    "routed_scaling_factor": "moe.route_scale",
    "swiglu_limit": "moe.activation_clamp",
    "hc_mult": "hyper_connections.num_streams",
    "hc_sinkhorn_iters": "hyper_connections.sinkhorn_iterations",
    "hc_eps": "hyper_connections.eps",
}
EVERY = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
CLASSES: dict[str, tuple[str, dict[str, str]]] = {
    "deepseek_v3": ("DeepseekV3", MLA),
    "deepseek_v32": ("DeepseekV32", MLA | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", MLA | INDEXER),
    "deepseek_v4": ("DeepseekV4", COMPRESSED),
}


def value_at(config: ModelConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def random_changes(family: str, rng: random.Random) -> dict[str, Any]:
    layers = rng.randint(4, 12)
    changes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": rng.choice([64, 96]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "num_experts_per_tok": rng.choice([2, 4]),
        "n_routed_experts": rng.choice([16, 32]),
        "moe_intermediate_size": rng.choice([24, 32]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "vocab_size": rng.choice([300, 4000]),
    }
    if family == "deepseek_v4":
        kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
        changes["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
        changes["compress_rates"] = {kinds[1]: rng.choice([4, 8]), kinds[2]: rng.choice([64, 128])}
        changes["mlp_layer_types"] = [rng.choice(("hash_moe", "moe")) for _ in range(layers)]
        changes["swiglu_limit"] = rng.choice([7.0, 10.0])
    else:
        changes["first_k_dense_replace"] = rng.randint(0, 3)
        changes["n_group"], changes["topk_group"] = rng.choice([(1, 1), (4, 2), (8, 4)])
        changes["norm_topk_prob"] = rng.random() < 0.5
    if family == "glm_moe_dsa":
        changes["indexer_types"] = ["full"] + [
            rng.choice(("full", "shared")) for _ in range(layers - 1)
        ]
    return changes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", list(CLASSES))
def test_values_are_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    name, paths = CLASSES[family]
    changes = random_changes(family, random.Random(f"{family}{seed}"))
    theirs = getattr(transformers, f"{name}Config")(**changes)
    theirs.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    assert ours.family == family
    for key, path in (EVERY | paths).items():
        assert value_at(ours, path) == getattr(theirs, key), key
    assert ours.moe is not None
    if family == "deepseek_v4":
        assert ours.compressed is not None
        rates = [theirs.compress_rates.get(kind, 0) for kind in theirs.layer_types]
        assert list(ours.compressed.ratios) == rates
        hashed = [i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "hash_moe"]
        assert list(ours.moe.hash_layers) == hashed
        assert ours.compressed.compress_rope.theta == theirs.compress_rope_theta
    else:
        first = theirs.first_k_dense_replace
        assert list(ours.moe.layers) == list(range(first, theirs.num_hidden_layers))
    if family == "glm_moe_dsa":
        assert ours.indexer is not None
        full = [i for i, kind in enumerate(theirs.indexer_types) if kind == "full"]
        assert list(ours.indexer.layers) == full


@pytest.mark.parametrize(("step", "offset"), [(1, 2), (4, 3), (2, 0), (3, 5)])
def test_shared_index_choices_by_rule(step: int, offset: int, tmp_path: Path) -> None:
    rule = {"index_topk_freq": step, "index_skip_topk_offset": offset}
    theirs = transformers.GlmMoeDsaConfig(**rule)
    full = [i for i, kind in enumerate(theirs.indexer_types) if kind == "full"]
    if full[0] != 0:
        with pytest.raises(ConfigError, match="indexer_types"):
            load_model_config(changed(tmp_path, "glm-5", rule))
        return
    config = load_model_config(changed(tmp_path, "glm-5", rule))
    assert config.indexer is not None
    assert list(config.indexer.layers) == full


def test_transformers_spelling_of_v4_is_the_released_one(tmp_path: Path) -> None:
    """The class reads the released file and writes it in its own words; both mean the same."""
    released = load_model_config(load_presets()["deepseek-v4-flash"].path)
    values = load_presets()["deepseek-v4-flash"].values()
    values.pop("quantization_config")
    values.pop("expert_dtype")
    transformers.DeepseekV4Config(**values).save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    for part in ("compressed", "moe", "indexer", "hyper_connections", "rope", "head_dim"):
        assert getattr(ours, part) == getattr(released, part), part


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("deepseek-v3.2", {"kv_lora_rank": REMOVED}, ["kv_lora_rank", "nothing"]),
        ("deepseek-v3.2", {"kv_lora_rank": "512"}, ["kv_lora_rank", "'512'"]),
        ("deepseek-v3.2", {"num_key_value_heads": 8}, ["num_key_value_heads", "128"]),
        ("deepseek-v3.2", {"qk_head_dim": 128}, ["qk_head_dim", "192"]),
        ("deepseek-v3.2", {"head_dim": 100}, ["head_dim", "100"]),
        ("deepseek-v3.2", {"q_lora_rank": None}, ["q_lora_rank", "indexer"]),
        ("deepseek-v3.2", {"n_group": 7}, ["n_group", "256"]),
        ("deepseek-v3.2", {"topk_group": 9}, ["topk_group", "n_group"]),
        ("deepseek-v3.2", {"num_experts_per_tok": 300}, ["num_experts_per_tok", "300"]),
        ("deepseek-v3.2", {"num_local_experts": 128}, ["num_local_experts", "256"]),
        ("deepseek-v3.2", {"scoring_func": "softmax"}, ["scoring_func", "'softmax'"]),
        ("deepseek-v3.2", {"topk_method": "greedy"}, ["topk_method", "'greedy'"]),
        ("deepseek-v3.2", {"index_head_dim": 32}, ["index_head_dim", "64"]),
        ("deepseek-v3.2", {"layer_types": ["full_attention"] * 61}, ["layer_types[0]"]),
        ("deepseek-v3.2", {"mlp_layer_types": ["dense"] * 61}, ["mlp_layer_types", "3"]),
        ("deepseek-v3.2", {"mlp_layer_types": ["dense"] * 60}, ["mlp_layer_types", "61"]),
        ("deepseek-v3.2", {"attention_scale_factor": 2.0}, ["attention_scale_factor"]),
        ("deepseek-v3.2", {"rope_scaling.mrope": 4}, ["rope_scaling.mrope"]),
        ("deepseek-v3.2", {"architectures": ["DeepseekV3ForCausalLM"]}, ["architectures"]),
        (
            "deepseek-v3.2",
            {"quantization_config.quant_method": "awq"},
            ["quantization_config.quant_method", "'awq'"],
        ),
        (
            "deepseek-v3.2",
            {"quantization_config.weight_block_size": [128, 64]},
            ["quantization_config.weight_block_size", "[128, 128]"],
        ),
        (
            "deepseek-v3.2",
            {"quantization_config.weight_block_size": REMOVED},
            ["quantization_config.weight_block_size"],
        ),
        (
            "deepseek-v3.2",
            {"quantization_config.activation_scheme": "static"},
            ["quantization_config.activation_scheme", "'static'"],
        ),
        (
            "deepseek-v3.2",
            {"quantization_config.scale_fmt": "e5m3"},
            ["quantization_config.scale_fmt"],
        ),
        (
            "deepseek-v3.2",
            {"quantization_config.bits": 8},
            ["quantization_config.bits", "block-wise"],
        ),
        ("glm-5", {"indexer_types": ["shared"] + ["full"] * 77}, ["indexer_types[0]"]),
        ("glm-5", {"indexer_types": ["full"] * 77}, ["indexer_types", "78"]),
        (
            "glm-5",
            {"indexer_types": ["full"] * 78, "index_topk_freq": 4, "index_skip_topk_offset": 3},
            ["indexer_types", "index_topk_freq (4)"],
        ),
        ("glm-5", {"index_topk_pattern": "FSX"}, ["index_topk_pattern", "78 letters"]),
        ("deepseek-v4-flash", {"compress_ratios": [0, 4]}, ["compress_ratios", "43"]),
        ("deepseek-v4-flash", {"compress_ratios": [0] * 42 + [7]}, ["compress_ratios", "7"]),
        ("deepseek-v4-flash", {"compress_ratios": REMOVED}, ["compress_ratios", "nothing"]),
        ("deepseek-v4-flash", {"num_key_value_heads": 8}, ["num_key_value_heads", "1"]),
        ("deepseek-v4-flash", {"o_groups": 7}, ["o_groups", "64"]),
        ("deepseek-v4-flash", {"partial_rotary_factor": 0.5}, ["qk_rope_head_dim", "256"]),
        ("deepseek-v4-flash", {"hc_mult": 0}, ["hc_mult"]),
        ("deepseek-v4-flash", {"scoring_func": "tanh"}, ["scoring_func", "sqrtsoftplus"]),
        ("deepseek-v4-flash", {"norm_topk_prob": False}, ["norm_topk_prob"]),
        ("deepseek-v4-flash", {"expert_dtype": "int4"}, ["expert_dtype", "'int4'"]),
        (
            "deepseek-v4-flash",
            {"quantization_config.expert_dtype": "fp8"},
            ["quantization_config.expert_dtype", "'fp4'"],
        ),
        (
            "deepseek-v4-flash",
            {"quantization_config": REMOVED},
            ["expert_dtype", "quantization_config"],
        ),
        (
            "deepseek-v4-flash",
            {"layer_types": ["sliding_attention"] * 43},
            ["layer_types", "compress_ratios"],
        ),
        ("deepseek-v4.1-flash", {"text_config": REMOVED}, ["text_config", "nothing"]),
        (
            "deepseek-v4.1-flash",
            {"text_config.kv_source_layer_ids": [8, 2]},
            ["text_config.kv_source_layer_ids", "rising"],
        ),
        (
            "deepseek-v4.1-flash",
            {"text_config.kv_source_layer_ids": [2, 8, 14]},
            ["text_config.compress_ratios[20]"],
        ),
        (
            "deepseek-v4.1-flash",
            {"text_config.kv_source_layer_ids": [0, 2, 8, 14, 20]},
            ["text_config.kv_source_layer_ids"],
        ),
        (
            "deepseek-v4.1-flash",
            {"text_config.index_source_layer_ids": [2, 8, 20]},
            ["text_config.index_source_layer_ids", "14"],
        ),
        (
            "deepseek-v4.1-flash",
            {"text_config.candidate_source_layer_id": 21},
            ["text_config.candidate_source_layer_id"],
        ),
        (
            "deepseek-v4.1-flash",
            {"text_config.engram_num_embeddings": [384006168]},
            ["text_config.engram_num_embeddings", "2 integers"],
        ),
        (
            "deepseek-v4.1-flash",
            {"text_config.new_attention_gate": 1},
            ["text_config.new_attention_gate"],
        ),
        ("qwen3-30b-a3b", {"num_experts": REMOVED}, ["num_experts", "nothing"]),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, ["mlp_only_layers", "47"]),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 5}, ["shared_expert"]),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_method": "fp8"}}, ["'fp8'"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_unknown_or_contradictory_is_refused_by_name(
    preset: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_config(changed(tmp_path, preset, changes))
    assert all(word in str(caught.value) for word in ["config.json", *words]), str(caught.value)


def test_window_only_and_sources_of_v41() -> None:
    config = load_model_config(load_presets()["deepseek-v4.1-flash"].path)
    assert config.compressed is not None
    assert config.indexer is not None
    assert config.compressed.ratios == (0,) * 2 + (2,) * 18 + (1,) * 20
    filling = [i for i in range(40) if config.compressed.compresses(i)]
    assert filling == [2, 8, 14, 20]
    assert config.compressed.sources[7] == 2
    assert config.compressed.sources[39] == 20
    assert config.indexer.layers == (2, 8, 14, 20, 24, 28, 32, 36)
    assert config.num_draft_layers == 3


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**70, 0.5, 1e308, "", "x", "full", "F" * 78,
    [], [0], [1, 2], [-1], ["full"], [None], {}, {"a": 1}, [[]], "deepseek_v3", "bfloat16", "fp8",
]  # fmt: skip


def mutate(values: dict[str, Any], rng: random.Random) -> None:
    """One key of the object or of an object in it gets another value, or goes, or comes."""
    nested = [value for value in values.values() if isinstance(value, dict)]
    if nested and rng.random() < 0.5:
        mutate(rng.choice(nested), rng)
        return
    key = rng.choice([*values, "new_key", "num_experts", "head_dim"])
    if rng.random() < 0.15:
        values.pop(key, None)
        return
    value = values.get(key)
    if isinstance(value, list) and value and rng.random() < 0.5:
        value[rng.randrange(len(value))] = copy.deepcopy(rng.choice(JUNK))
    elif isinstance(value, int) and rng.random() < 0.5:
        values[key] = max(0, value + rng.choice([-2, -1, 1, 2, value]))
    else:
        values[key] = copy.deepcopy(rng.choice(JUNK))


@pytest.mark.parametrize("preset", list(load_presets()))
def test_a_changed_file_is_read_or_refused_and_never_crashes(preset: str, tmp_path: Path) -> None:
    """What is read can be planned, or the plan says why not: only errors made for users."""
    rng = random.Random()
    seed = rng.randrange(2**32)
    rng.seed(seed)
    limits = StepLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=64)
    read, refusals = 0, list[str]()
    for trial in range(60):
        values = load_presets()[preset].values()
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate(values, rng)
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            config = load_model_config(tmp_path)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        read += 1
        if config.num_layers > 200 or config.num_attention_heads > 1024:
            continue  # valid and slow
        try:
            precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
            model_sites(config, precision, limits, rng.choice([1, 2, 8]))
        except HalError:
            continue
        except Exception as error:
            error.add_note(f"{preset}: seed {seed}, trial {trial}: {values}")
            raise
    assert read > 2, f"seed {seed}"
    assert all("config.json" in refusal for refusal in refusals)
