"""Plans of families that cannot run yet: calls of V4.1, ranks, rounding, dense attention."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from hal.device import DevicePolicy
from hal.device_group import GroupLink
from hal.errors import PlanError
from hal.ops.collective import CollectiveRequest
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import OpRequest
from hal.plan import OpSite
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook, parse_waivers
from hal_engine.config import ModelConfig, load_model_config
from hal_engine.models.accounting import kv_copies, parameter_count
from hal_engine.models.site_parts import HOST_LINK
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.precision import resolve_precision
from hal_engine.preset_files import load_presets
from hal_engine.sparse_choice import CHANGE, check_sparse_off
from hal_process import run_hal

LIMITS = StepLimits(max_num_batched_tokens=512, max_num_seqs=32, block_size=64)
LATENT = ["deepseek-v3.2", "glm-5"]
COMPRESSED = ["deepseek-v4-flash", "deepseek-v4.1-flash"]
MOE = ["qwen3-30b-a3b", "qwen3-235b-a22b", *LATENT, *COMPRESSED]


def config_of(name: str) -> ModelConfig:
    return load_model_config(load_presets()[name].path)


def sites_of(
    name: str, world_size: int = 1, link: GroupLink = HOST_LINK, *, attends_sparsely: bool = True
) -> list[OpSite]:
    config = config_of(name)
    precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
    limits = StepLimits(
        max_num_batched_tokens=512,
        max_num_seqs=32,
        block_size=64,
        attends_sparsely=attends_sparsely,
    )
    return model_sites(config, precision, limits, world_size, link)


def names_of_layer(sites: list[OpSite], layer: int) -> set[str]:
    return {s.site.removeprefix("layers.*.") for s in sites if layer in s.layers}


def requests(sites: list[OpSite], name: str, rank: int = 0) -> dict[int | None, list[OpRequest]]:
    """layer -> requests of a site on a rank."""
    found: dict[int | None, list[OpRequest]] = defaultdict(list)
    for site in sites:
        if site.site.removeprefix("layers.*.") == name and rank in site.ranks:
            for layer in site.layers or (None,):
                found[layer].append(site.request)
    return found


@pytest.mark.parametrize(
    ("row_format", "kv_dtype"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp8_656", "uint8")],
)
def test_a_write_of_rows_names_the_dtype_of_its_format(row_format: str, kv_dtype: str) -> None:
    config = config_of("deepseek-v3.2")
    precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
    sites = model_sites(config, replace(precision, kv_format=row_format), LIMITS)
    written = {
        (request.kv_format, request.kv_dtype)
        for found in requests(sites, "kv_write").values()
        for request in found
        if isinstance(request, KvWriteRequest)
    }
    assert written == {(row_format, kv_dtype)}


def test_calls_of_v41_by_kind_of_layer() -> None:
    """Four layers fill a cache, three of them by pairs; eight choose; two read n-grams."""
    sites = sites_of("deepseek-v4.1-flash")
    filling, choosing = {2, 8, 14, 20}, {2, 8, 14, 20, 24, 28, 32, 36}
    for layer in range(40):
        names = names_of_layer(sites, layer)
        assert ("compressor.kv_write" in names) == (layer in filling)
        assert ("compressor.pool" in names) == (layer in {2, 8, 14})
        assert ("compressor.kv_norm" in names) == (layer == 20)
        assert ("indexer.k_proj" in names) == (layer in filling)
        assert ("indexer.top_k" in names) == (layer in choosing)
        assert ("engram.gather" in names) == (layer in {1, 14})
        assert "q_head_norm" not in names
        assert {"window_write", "o_rope", "attention_streams_in", "router"} <= names
    gates = requests(sites, "compressor.kv_gate_proj")
    assert {layer: r[0].n for layer, r in gates.items()} == {2: 1024, 8: 1024, 14: 1024, 20: 512}  # type: ignore[attr-defined]


def test_attention_and_choices_of_v41() -> None:
    sites = sites_of("deepseek-v4.1-flash")
    attention = requests(sites, "attention")
    ratios = [0, 0] + [2] * 18 + [1] * 20
    for layer, found in attention.items():
        assert {r.phase for r in found} == {"prefill", "decode"}
        for request in found:
            values: Any = request
            assert layer is not None
            assert values.compress_ratio == ratios[layer]
            assert values.top_k == (512 if ratios[layer] else 0)
            assert (values.window, values.main_format) == (128, "fp4_288")
            assert values.window_format == "v41_528"
    choices: Any = {layer: r[0] for layer, r in requests(sites, "indexer.top_k").items()}
    assert [layer for layer, r in choices.items() if r.publishes_candidates] == [20]
    assert {layer: r.candidate_blocks for layer, r in choices.items()} == {
        **dict.fromkeys((2, 8, 14), 0),
        **dict.fromkeys((20, 24, 28, 32, 36), 2048),
    }
    hidden: Any = requests(sites, "attention_streams_in")[5][0]
    assert (hidden.num_streams, hidden.is_lagged) == (4, True)
    kv: Any = requests(sites, "engram.kv_proj")[1][0]
    assert (kv.n, kv.k) == (25600, 6144)


def test_hash_routing_is_in_the_first_layers_of_v4_only() -> None:
    routers: Any = {k: r[0] for k, r in requests(sites_of("deepseek-v4-flash"), "router").items()}
    assert [layer for layer, r in routers.items() if r.scoring == "hash"] == [0, 1, 2]
    others: Any = requests(sites_of("deepseek-v4.1-flash"), "router")
    assert {r[0].scoring for r in others.values()} == {"sqrt_softplus"}


# How a product is cut: by its outputs, its inputs, its groups, or not at all.
CUT_BY_OUTPUTS = {
    "q_b_proj", "gate_up_proj", "shared.gate_up_proj", "experts.gate_up_proj", "qkv_proj",
}  # fmt: skip
CUT_BY_INPUTS = {
    "o_proj", "o_b_proj", "down_proj", "shared.down_proj", "experts.down_proj", "engram.kv_proj",
}  # fmt: skip
CUT_BY_GROUPS = {"q_absorb", "v_absorb", "o_a_proj"}


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", [*LATENT, *COMPRESSED])
def test_ranks_share_each_product(name: str, world_size: int) -> None:
    whole, cut = sites_of(name), sites_of(name, world_size)
    for site in {s.site.removeprefix("layers.*.") for s in whole}:
        one = requests(whole, site)
        ranks = [requests(cut, site, rank) for rank in range(world_size)]
        for layer, found in one.items():
            request: Any = found[0]
            parts: list[Any] = [rank[layer][0] for rank in ranks if layer in rank]
            if not isinstance(request, GemmRequest | GroupedGemmRequest):
                continue
            assert len(parts) == world_size
            if site in CUT_BY_OUTPUTS:
                assert sum(part.n for part in parts) == request.n, site
                assert {part.k for part in parts} == {request.k}
            elif site in CUT_BY_INPUTS:
                assert sum(part.k for part in parts) == request.k, site
                assert {part.n for part in parts} == {request.n}
            elif site in CUT_BY_GROUPS:
                assert sum(part.num_experts for part in parts) == request.num_experts, site
                assert {(p.n, p.k) for p in parts} == {(request.n, request.k)}
            elif site == "lm_head":
                assert 0 <= sum(part.n for part in parts) - request.n < world_size
            else:
                assert {(p.n, p.k) for p in parts} == {(request.n, request.k)}, site


@pytest.mark.parametrize("name", [*LATENT, *COMPRESSED])
def test_too_many_ranks_are_refused(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        sites_of(name, 64 if name in LATENT else 16)
    assert "--tp" in str(caught.value)


@pytest.mark.parametrize("name", MOE)
def test_ranks_meet_once_a_sublayer(name: str) -> None:
    link = GroupLink(kind="pcie", p2p="verified", is_full_mesh=False, distance="SYS")
    config, sites = config_of(name), sites_of(name, 4, link)
    found = [s for s in sites if isinstance(s.request, CollectiveRequest)]
    for site in found:
        request: Any = site.request
        assert (request.transport, request.p2p, request.distance) == ("pcie", "verified", "SYS")
        assert not request.is_full_mesh
        assert site.ranks == (0, 1, 2, 3)
    layers = Counter(layer for site in found for layer in site.layers)
    for layer in range(config.num_layers):
        has_engram = config.engram is not None and layer in config.engram.layers
        assert layers[layer] == (3 if has_engram else 2)
    assert [s.site for s in found if not s.layers] == ["lm_head_all_gather"]
    assert not any(s.request.op == "collective" for s in sites_of(name))


@pytest.mark.parametrize(("world_size", "kv_heads"), [(2, 2), (4, 1), (8, 1), (16, 1)])
def test_key_value_heads_are_kept_by_several_ranks(world_size: int, kv_heads: int) -> None:
    """Qwen3-MoE has four; the query heads of a rank are those that read the head it keeps."""
    sites = sites_of("qwen3-235b-a22b", world_size)
    for rank in range(world_size):
        attention: Any = requests(sites, "attention", rank)[0][0]
        assert (attention.num_heads, attention.num_kv_heads) == (64 // world_size, kv_heads)
        qkv: Any = requests(sites, "qkv_proj", rank)[0][0]
        assert qkv.n == (64 // world_size + 2 * kv_heads) * 128
    assert kv_copies(config_of("qwen3-235b-a22b"), world_size) == max(1, world_size // 4)


def test_copies_of_key_value_heads_are_for_plans_only() -> None:
    with pytest.raises(PlanError, match="8 key-value heads"):
        sites_of("llama-3-70b", 16)
    with pytest.raises(PlanError, match="4 key-value heads"):
        sites_of("qwen3-235b-a22b", 6)  # no whole number of ranks a head


GROUPS = {"fp8_group128_ue8m0": (128, "ue8m0"), "mxfp8_group32": (32, "ue8m0")}


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("name", ["deepseek-v3.2", *COMPRESSED])
def test_every_rounded_product_has_its_rounding(name: str, world_size: int) -> None:
    """In the same layer, of a width that holds the product's inputs, with the format's groups."""
    sites = sites_of(name, world_size)
    rounded = 0
    for site in sites:
        product = site.request
        if not isinstance(product, GemmRequest | GroupedGemmRequest):
            continue
        activation = product.weight_format.activation
        if activation == "float":
            continue
        rounded += 1
        inputs = product.k
        if isinstance(product, GroupedGemmRequest):
            inputs *= product.experts_per_token
        for layer in site.layers:
            assert any(
                isinstance(s.request, QuantizeRequest)
                and layer in s.layers
                and set(site.ranks) <= set(s.ranks)
                and s.request.width == inputs
                and (s.request.group_size, s.request.scale_dtype) == GROUPS[activation]
                for s in sites
            ), f"{site.site} of layer {layer}"
    assert rounded > 5


def test_unquantised_checkpoints_round_nothing_but_index_queries() -> None:
    for name in ("qwen3-30b-a3b", "glm-5"):
        assert not any(isinstance(s.request, QuantizeRequest) for s in sites_of(name))


@pytest.mark.parametrize("name", [*LATENT, *COMPRESSED])
def test_dense_attention_runs_no_indexer_and_lists_no_keys(name: str) -> None:
    sites = sites_of(name, attends_sparsely=False)
    assert not any("indexer" in site.site for site in sites)
    for found in requests(sites, "attention").values():
        assert {request.top_k for request in found} == {0}  # type: ignore[attr-defined]
    assert parameter_count(config_of(name)) > 0


@pytest.fixture(scope="module")
def registry() -> BackendRegistry:
    return load_backends()


def plan(name: str, registry: BackendRegistry, waivers: WaiverBook, **options: Any) -> Any:
    chosen = EngineOptions(**options)
    path = load_presets()[name].path
    return plan_model(path, chosen, registry, waivers, is_strict=False).plan


@pytest.mark.parametrize("name", list(load_presets()))
def test_every_preset_is_planned_on_this_host(name: str, registry: BackendRegistry) -> None:
    planned = plan(name, registry, WaiverBook())
    sites = {op.site.site for op in planned.ops}
    assert {"embed", "final_norm", "lm_head", "sampler.top_k_top_p"} <= sites
    assert len(planned.hash) == 16
    is_planned_only = not config_of(name).is_runnable
    assert any("plan only" in note for note in planned.notes) == is_planned_only
    is_unverified = load_presets()[name].is_unverified
    assert any("unverified" in note for note in planned.notes) == is_unverified
    if config_of(name).num_draft_layers:
        assert any("speculative" in note for note in planned.notes)


def test_a_latent_cache_counts_whole_on_every_rank(registry: BackendRegistry) -> None:
    latent = plan("deepseek-v3.2", registry, WaiverBook(), tp=4).memory
    assert latent.kv_bytes_per_token_of_rank == 48_068
    dense = plan("llama-3-70b", registry, WaiverBook(), tp=4).memory
    assert dense.kv_bytes_per_token_of_rank * 4 == 80 * 2 * 8 * 128 * 2
    tables = plan("deepseek-v4.1-flash", registry, WaiverBook(), tp=8).memory
    assert 58 < tables.weight_bytes / 2**30 < 62  # a share of Engram's tables included


def test_blocks_are_those_of_the_family(registry: BackendRegistry) -> None:
    assert plan("deepseek-v3.2", registry, WaiverBook()).settings["block_size"] == 64
    assert plan("llama-3-70b", registry, WaiverBook()).settings["block_size"] == 16
    asked = plan("deepseek-v3.2", registry, WaiverBook(), block_size=32)
    assert asked.settings["block_size"] == 32


def test_dense_attention_needs_its_name(registry: BackendRegistry) -> None:
    with pytest.raises(PlanError) as caught:
        plan("deepseek-v3.2", registry, WaiverBook(), sparse_attention="off")
    assert CHANGE in str(caught.value)
    assert 'kind = "semantic"' in str(caught.value)
    allowed = plan(
        "deepseek-v3.2",
        registry,
        WaiverBook(),
        sparse_attention="off",
        allow_semantics=(CHANGE,),
    )
    assert any(CHANGE in note for note in allowed.notes)
    assert allowed.settings["sparse_attention"] == "off"


def test_dense_attention_may_be_waived(registry: BackendRegistry) -> None:
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    text = f"""
[[waiver]]
op = "mla_attention"
component = "layers.*.attention"
device = "*"
kind = "semantic"
reason = "a comparison of both"
owner = "tests"
expires = {tomorrow.isoformat()}
max_call_share = 1.0
"""
    book = parse_waivers(text, "waivers of a test")
    planned = plan("glm-5", registry, book, sparse_attention="off")
    assert any("a comparison of both" in note for note in planned.notes)
    book = parse_waivers(text.replace("mla_attention", "gemm"), "waivers of a test")
    with pytest.raises(PlanError):
        plan("glm-5", registry, book, sparse_attention="off")


def test_forced_sparse_attention_is_not_switched_off(registry: BackendRegistry) -> None:
    device = registry.describe("cpu:0")
    config = config_of("deepseek-v4.1-flash")
    policy = DevicePolicy(forced_features={"sparse_attention": "dense attention is not served"})
    with pytest.raises(PlanError, match="dense attention is not served"):
        check_sparse_off(config, policy, device)
    check_sparse_off(config, DevicePolicy(), device)
    with pytest.raises(PlanError, match="chooses its keys"):
        check_sparse_off(config_of("llama-3-70b"), DevicePolicy(), device)


def test_the_command_knows_presets_and_never_serves_them() -> None:
    result = run_hal("plan", "deepseek-v3.2", "--json", "-")
    assert result.returncode == 2
    assert "lost fast paths" in result.stderr
    assert '"kv_bytes_per_token": 48068' in result.stdout
    result = run_hal("serve", "deepseek-v3.2", "--port", "0")
    assert result.returncode == 2
    assert "a preset" in result.stderr
    assert "deepseek-ai/DeepSeek-V3.2" in result.stderr
    result = run_hal("models")
    assert result.returncode == 0
    assert all(name in result.stdout for name in load_presets())
    result = run_hal("models", "glm-5")
    assert "GlmMoeDsaConfig" in result.stdout
    result = run_hal("models", "glm5")
    assert result.returncode == 2
    assert "glm-5" in result.stderr
