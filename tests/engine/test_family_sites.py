"""No op of a model is forgotten: every module and product of transformers' forward has its site.

A tiny random model of each family runs once. Each module with weights that is called must be
mapped to a site of the plan whose sizes are the module's, every product and every choice of the
largest must happen inside such a module, and no site with weights may be left over.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.request import OpRequest
from hal.plan import OpSite
from hal_engine.config import ModelConfig, load_model_config
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from module_calls import ModuleCalls, watch_modules

LIMITS = StepLimits(max_num_batched_tokens=32, max_num_seqs=4, block_size=16)
VOCAB = 96
WEIGHTED = {"gemm", "grouped_gemm", "embedding", "layer_norm", "kv_compressor", "norm.rms"}

# Module of a layer -> the sites that stand for it. Order decides: the first match counts.
DENSE = {
    r"input_layernorm": ["input_norm"],
    r"post_attention_layernorm": ["post_norm"],
    r"mlp\.(gate|up)_proj": ["gate_up_proj"],
    r"mlp\.down_proj": ["down_proj"],
    r"mlp\.gate": ["router_proj", "router"],
    r"mlp\.experts": ["experts.gate_up_proj", "experts.down_proj"],
    r"mlp\.shared_experts\.(gate|up)_proj": ["shared.gate_up_proj"],
    r"mlp\.shared_experts\.down_proj": ["shared.down_proj"],
    r"self_attn": ["attention"],
    r"self_attn\.o_proj": ["o_proj"],
}
QWEN = {
    **DENSE,
    r"self_attn\.[qkv]_proj": ["qkv_proj"],
    r"self_attn\.(q|k)_norm": [r"\1_norm"],
}
MLA = {
    **DENSE,
    r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)": ["qkv_a_proj"],
    r"self_attn\.(q|kv)_a_layernorm": [r"\1_a_norm"],
    r"self_attn\.q_b_proj": ["q_b_proj"],
    r"self_attn\.kv_b_proj": ["q_absorb", "v_absorb"],
    r"self_attn\.indexer": ["indexer.logits", "indexer.top_k"],
    r"self_attn\.indexer\.wq_b": ["indexer.q_proj"],
    r"self_attn\.indexer\.wk": ["indexer.k_proj"],
    r"self_attn\.indexer\.k_norm": ["indexer.k_norm"],
    r"self_attn\.indexer\.weights_proj": ["indexer.weights_proj"],
}
COMPRESSED = {
    **DENSE,
    r"self_attn\.(q_a_proj|kv_proj)": ["qkv_a_proj"],
    r"self_attn\.q_a_norm": ["q_a_norm"],
    r"self_attn\.kv_norm": ["kv_norm"],
    r"self_attn\.q_b_proj": ["q_b_proj"],
    r"self_attn\.q_b_norm": ["q_head_norm"],
    r"self_attn\.o_a_proj": ["o_a_proj"],
    r"self_attn\.o_b_proj": ["o_b_proj"],
    r"self_attn\.compressor\.(kv|gate)_proj": ["compressor.kv_gate_proj"],
    r"self_attn\.compressor(\.kv_norm)?": ["compressor.pool"],
    r"self_attn\.compressor\.indexer": ["indexer.pool", "indexer.top_k"],
    r"self_attn\.compressor\.indexer\.(kv|gate)_proj": ["indexer.kv_gate_proj"],
    r"self_attn\.compressor\.indexer\.kv_norm": ["indexer.pool"],
    r"self_attn\.compressor\.indexer\.q_b_proj": ["indexer.q_proj"],
    r"self_attn\.compressor\.indexer\.scorer": ["indexer.logits"],
    r"self_attn\.compressor\.indexer\.scorer\.weights_proj": ["indexer.weights_proj"],
    r"attn_hc": ["attention_streams_in"],
    r"ffn_hc": ["feed_forward_streams_in"],
    r"": ["attention_streams_out", "feed_forward_streams_out"],  # products of the layer itself
}
OUTSIDE = {"embed_tokens": "embed", "norm": "final_norm", "hc_head": "stream_head"}


def common_sizes(rng: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": rng.choice([32, 48, 64]),
        "moe_intermediate_size": rng.choice([16, 24, 40]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "pad_token_id": None,
    }


def qwen3_moe(rng: random.Random) -> Any:
    kv_heads = rng.choice([1, 2])
    return transformers.Qwen3MoeConfig(
        **common_sizes(rng),
        intermediate_size=rng.choice([72, 80]),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=rng.choice([8, 16]),
        num_experts=8,
        decoder_sparse_step=rng.choice([1, 2]),
        mlp_only_layers=[3],
        norm_topk_prob=True,
        attention_bias=rng.random() < 0.5,
    )


def mla_sizes(rng: random.Random) -> dict[str, Any]:
    return {
        **common_sizes(rng),
        "intermediate_size": rng.choice([72, 80]),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": rng.choice([1, 2]),
        "kv_lora_rank": rng.choice([24, 32]),
        "q_lora_rank": rng.choice([20, 28]),
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": rng.choice([12, 20]),
        "v_head_dim": rng.choice([16, 24]),
        "n_group": rng.choice([1, 2, 4]),
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def deepseek_v3(rng: random.Random) -> Any:
    sizes = mla_sizes(rng) | {"num_experts_per_tok": 2}
    if rng.random() < 0.3:
        sizes["q_lora_rank"] = None
    return transformers.DeepseekV3Config(**sizes, num_hidden_layers=3)


def indexer_sizes(rng: random.Random) -> dict[str, Any]:
    return {
        "num_experts_per_tok": 2,
        "index_topk": rng.choice([4, 8]),
        "index_head_dim": rng.choice([16, 24]),
        "index_n_heads": 16,
    }


def deepseek_v32(rng: random.Random) -> Any:
    sizes = mla_sizes(rng) | indexer_sizes(rng)
    return transformers.DeepseekV32Config(**sizes, num_hidden_layers=3)


def glm_moe_dsa(rng: random.Random) -> Any:
    sizes = mla_sizes(rng) | indexer_sizes(rng)
    types = ["full", "shared", rng.choice(["full", "shared"]), "full", "shared"]
    return transformers.GlmMoeDsaConfig(**sizes, num_hidden_layers=5, indexer_types=types)


def deepseek_v4(rng: random.Random) -> Any:
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    types = [*rng.sample(kinds, 3), rng.choice(kinds)]
    groups = rng.choice([1, 2, 4])
    return transformers.DeepseekV4Config(
        **common_sizes(rng),
        num_hidden_layers=4,
        num_attention_heads=4,
        n_routed_experts=8,
        head_dim=32,
        partial_rotary_factor=0.25,
        q_lora_rank=rng.choice([20, 28]),
        o_groups=groups,
        o_lora_rank=rng.choice([12, 16]),
        sliding_window=8,
        index_topk=4,
        index_head_dim=16,
        index_n_heads=16,
        hc_mult=rng.choice([2, 4]),
        layer_types=types,
        compress_rates={kinds[1]: 4, kinds[2]: 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "hash_moe"],
    )


FAMILIES: dict[str, tuple[Any, dict[str, list[str]]]] = {
    "qwen3_moe": (qwen3_moe, QWEN),
    "deepseek_v3": (deepseek_v3, MLA | {r"self_attn\.q_proj": ["qkv_a_proj"]}),
    "deepseek_v32": (deepseek_v32, MLA),
    "glm_moe_dsa": (glm_moe_dsa, MLA),
    "deepseek_v4": (deepseek_v4, COMPRESSED),
}
SEEDS = range(3)


@dataclass
class Case:
    """One model that ran, and what is planned for it."""

    model: Any
    config: ModelConfig
    sites: list[OpSite]
    mapping: dict[str, list[str]]

    def site(self, name: str, layer: int | None) -> OpRequest:
        """The decode request of a site, or the one for any phase."""
        pattern = name if layer is None else f"layers.*.{name}"
        found = [
            site.request
            for site in self.sites
            if site.site == pattern
            and (layer is None or layer in site.layers)
            and site.request.phase != "prefill"
        ]
        assert len(found) == 1, f"{pattern} of layer {layer}: {len(found)} sites"
        return found[0]

    def names(self, module: str) -> tuple[int | None, list[str]]:
        """Layer and sites of a module by its name; no sites for one that is not mapped."""
        if module == "lm_head":
            return None, ["lm_head"]
        found = re.fullmatch(r"model\.layers\.(\d+)\.?(.*)", module)
        if found is None:
            return None, [OUTSIDE[rest]] if (
                rest := module.removeprefix("model.")
            ) in OUTSIDE else []
        for pattern, sites in self.mapping.items():
            match = re.fullmatch(pattern, found[2])
            if match is not None:
                return int(found[1]), [match.expand(site) for site in sites]
        return int(found[1]), []


@pytest.fixture(params=[(family, seed) for family in FAMILIES for seed in SEEDS], ids=str)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    family, seed = request.param
    make, mapping = FAMILIES[family]
    torch.manual_seed(seed)
    theirs = make(random.Random(f"{family}{seed}"))
    model = transformers.AutoModelForCausalLM.from_config(theirs).eval()
    theirs.architectures = [type(model).__name__]
    theirs.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.family == family
    precision = resolve_precision(config, "fp32", "auto", frozenset())
    return Case(model, config, model_sites(config, precision, LIMITS), mapping)


def own_weights(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters(recurse=False))


def test_every_called_module_has_its_site(case: Case) -> None:
    calls = calls_of(case)
    check_modules(case, calls)
    for index, site in enumerate(case.sites):  # and a forgotten one is noticed
        if site.request.op in WEIGHTED and site.request.phase != "prefill":
            rest = case.sites[:index] + case.sites[index + 1 :]
            if site.site.endswith("q_head_norm"):
                continue
            with pytest.raises(AssertionError):
                check_modules(dataclasses.replace(case, sites=rest), calls)


def calls_of(case: Case) -> ModuleCalls:
    with watch_modules(case.model) as calls:
        case.model(input_ids=torch.randint(0, VOCAB, (1, 24)))
    return calls


def check_modules(case: Case, calls: ModuleCalls) -> None:
    modules = dict(case.model.named_modules())
    planned: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for name in calls.called:
        layer, sites = case.names(name)
        has_op = any(module == name for module, _ in calls.ops)
        if own_weights(modules[name]) or has_op:
            assert sites, f"{name} has no site"
        for site in sites:
            if own_weights(modules[name]):
                planned[site, layer].append(name)
    for (site, layer), names in planned.items():
        check_sizes(case, site, layer, [modules[name] for name in names])
    for module, op in calls.ops:
        layer, sites = case.names(module)
        ops = {case.site(site, layer).op for site in sites}
        if op == "topk":
            assert ops & {"moe_router", "index_top_k"}, f"{module} chooses without a site"
    assert_nothing_left_over(case, set(planned))


def check_sizes(case: Case, site: str, layer: int | None, modules: list[torch.nn.Module]) -> None:
    """The request of a site against the modules whose weights it holds."""
    request, weights = case.site(site, layer), sum(own_weights(m) for m in modules)
    if isinstance(request, GemmRequest):
        assert request.n * request.k + (request.n if request.has_bias else 0) == weights
        inputs = {getattr(m, "in_features", None) or m.weight.shape[-1] for m in modules}
        assert inputs == {request.k}
    elif site in ("q_absorb", "v_absorb"):
        pair = [case.site(name, layer) for name in ("q_absorb", "v_absorb")]
        assert all(isinstance(r, GroupedGemmRequest) for r in pair)
        assert sum(r.num_experts * r.n * r.k for r in pair) == weights  # type: ignore[attr-defined]
    elif isinstance(request, GroupedGemmRequest) and site.startswith("experts."):
        name = "gate_up_proj" if "gate_up" in site else "down_proj"
        shape = tuple(getattr(modules[0], name).shape)
        assert (request.num_experts, request.n, request.k) == shape
        assert request.experts_per_token == case.model.config.num_experts_per_tok
    elif isinstance(request, GroupedGemmRequest):
        assert request.num_experts * request.n * request.k == weights
        assert request.k == modules[0].in_features
    elif request.op in ("norm.rms", "layer_norm"):
        assert {m.weight.numel() for m in modules} == {request.hidden_size}  # type: ignore[attr-defined]
    elif request.op == "embedding":
        assert request.vocab_size * request.hidden_size == weights  # type: ignore[attr-defined]
    elif request.op == "kv_compressor":
        rows = next(m.position_bias.shape for m in modules if hasattr(m, "position_bias"))
        assert (request.ratio, request.width) == tuple(rows)  # type: ignore[attr-defined]
    elif request.op == "hyper_connection":
        fn = getattr(modules[0], "fn", None)
        shape = tuple((modules[0].hc_fn if fn is None else fn).shape)
        assert (request.num_mixes, request.num_streams * request.hidden_size) == shape  # type: ignore[attr-defined]
    else:
        assert request.op in ("moe_router", "compressed_attention", "index_top_k"), request.op


def assert_nothing_left_over(case: Case, planned: set[tuple[str, int | None]]) -> None:
    """Sites with weights of their own that stand for no module of transformers."""
    for site in case.sites:
        if site.request.op not in WEIGHTED or site.request.phase == "prefill":
            continue
        name = site.site.removeprefix("layers.*.")
        if name == "q_head_norm":  # a norm without a weight
            continue
        for layer in site.layers or (None,):
            assert (name, layer) in planned, f"{name} of layer {layer} stands for nothing"


def test_attention_requests_have_the_heads_of_the_model(case: Case) -> None:
    theirs = case.model.config
    for layer in range(case.config.num_layers):
        request = case.site("attention", layer)
        assert request.num_heads == theirs.num_attention_heads  # type: ignore[attr-defined]
        if request.op == "attention":
            sizes = (request.num_kv_heads, request.head_dim)  # type: ignore[attr-defined]
            assert sizes == (theirs.num_key_value_heads, theirs.head_dim)
        elif request.op == "mla_attention":
            sizes = (request.kv_lora_rank, request.rope_dim)  # type: ignore[attr-defined]
            assert sizes == (theirs.kv_lora_rank, theirs.qk_rope_head_dim)
            assert request.top_k == getattr(theirs, "index_topk", 0)  # type: ignore[attr-defined]
        else:
            kind = theirs.layer_types[layer]
            assert request.window == theirs.sliding_window  # type: ignore[attr-defined]
            assert request.compress_ratio == theirs.compress_rates.get(kind, 0)  # type: ignore[attr-defined]
            is_sparse = kind == "compressed_sparse_attention"
            assert request.top_k == (theirs.index_topk if is_sparse else 0)  # type: ignore[attr-defined]
            assert request.has_sinks  # type: ignore[attr-defined]


def test_routers_score_as_the_model_does(case: Case) -> None:
    theirs = case.model.config
    for layer in range(case.config.num_layers):
        block = case.model.model.layers[layer].mlp
        if not hasattr(block, "experts"):
            assert case.config.moe_of(layer) is None
            continue
        router: Any = case.site("router", layer)
        assert router.top_k == theirs.num_experts_per_tok
        assert router.num_groups == getattr(theirs, "n_group", 1)
        assert router.num_groups_picked == getattr(theirs, "topk_group", 1)
        assert router.has_bias == hasattr(block.gate, "e_score_correction_bias")
        assert (router.scoring == "hash") == hasattr(block.gate, "tid2eid")
        scale = getattr(theirs, "routed_scaling_factor", 1.0)
        assert router.route_scale == scale
