"""Products of experts whose gate is clamped: the activation is joined into the first of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from absent_plans import plan, profile
from hal.joins import JoinedSite
from hal.ops.activation import GatedActivationRequest
from hal.ops.gemm import GroupedGemmRequest
from hal.plan import OpSite
from hal.tiers import Tier
from hal_engine.config import load_model_config
from hal_engine.models.product_joins import product_joins
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from hal_engine.preset_files import load_presets

LIMITS = StepLimits(max_num_batched_tokens=512, max_num_seqs=32, block_size=64)
STEM = "layers.*.experts."
CLAMPED = ["deepseek-v4-flash", "deepseek-v4.1-flash"]


def sites_of(name: str, world_size: int = 1) -> list[OpSite]:
    config = load_model_config(load_presets()[name].path)
    precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
    return model_sites(config, precision, LIMITS, world_size)


def of_experts(sites: list[OpSite]) -> list[JoinedSite]:
    return [j for j in product_joins(sites) if j.site.site == f"{STEM}gate_up_activation"]


def one(sites: list[OpSite], name: str) -> OpSite:
    (found,) = [site for site in sites if site.site == f"{STEM}{name}"]
    return found


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("name", CLAMPED)
def test_the_joined_product_is_the_one_of_every_expert_with_its_clamp(
    name: str, world_size: int
) -> None:
    config = load_model_config(load_presets()[name].path)
    moe = config.moe
    assert moe is not None
    sites = sites_of(name, world_size)
    (join,) = of_experts(sites)
    product = one(sites, "gate_up_proj")
    assert isinstance(product.request, GroupedGemmRequest)
    assert join.site.layers == product.layers
    assert join.site.ranks == product.ranks
    assert join.site.request == dataclasses.replace(
        product.request, epilogue="silu_gated", clamp=moe.activation_clamp
    )
    assert moe.activation_clamp > 0
    assert [part.site for part in join.parts] == [f"{STEM}gate_up_proj", f"{STEM}activation"]


def test_a_gate_without_a_clamp_has_nothing_to_join() -> None:
    for name in ("deepseek-v3.2", "qwen3-30b-a3b"):
        sites = sites_of(name)
        assert not of_experts(sites)
        product = one(sites, "gate_up_proj").request
        assert isinstance(product, GroupedGemmRequest)
        assert product.epilogue == "silu_gated"


def test_only_a_gated_silu_of_these_rows_is_joined() -> None:
    sites = sites_of("deepseek-v4-flash")
    site = one(sites, "activation")
    assert isinstance(site.request, GatedActivationRequest)
    half = site.request.width // 2
    for changed in ({"activation": "gelu_tanh"}, {"width": half}, {"rows_per_token": 1}):
        request = dataclasses.replace(site.request, **changed)  # type: ignore[arg-type]
        other = [dataclasses.replace(s, request=request) if s is site else s for s in sites]
        assert not of_experts(other)
    # Layers with another clamp are calls of their own.
    first, others = site.layers[:1], site.layers[1:]
    tighter = dataclasses.replace(site.request, clamp=3.0)
    apart = [s for s in sites if s is not site] + [
        dataclasses.replace(site, layers=others),
        dataclasses.replace(site, layers=first, request=tighter),
    ]
    clamps = {
        join.site.request.clamp: join.site.layers
        for join in of_experts(apart)
        if isinstance(join.site.request, GroupedGemmRequest)
    }
    assert clamps == {3.0: first, site.request.clamp: others}


@pytest.mark.parametrize("model", CLAMPED)
@pytest.mark.parametrize(
    "device", ["rtx-pro-6000-blackwell-server", "h200-sxm", "mi300x", "rtx-4090"]
)
def test_plans_take_them(model: str, device: str) -> None:
    """At all sizes and in native code; nothing is left of the activation by itself."""
    found = plan(model, profile(device), 8)
    joined = [op for op in found.ops if op.site.site == f"{STEM}gate_up_activation"]
    assert joined
    sizes = sorted((op.tokens.low, op.tokens.high) for op in joined)
    assert sizes[0][0] == 1
    assert all(low == high + 1 for (_, high), (low, _) in itertools.pairwise(sizes))
    for op in joined:
        assert op.decision.choice.tier is Tier.NATIVE
        assert op.decision.choice.name.endswith(".grouped_gemm.triton")
        uses = op.choice.kernel_uses(op.site.request.with_tokens(op.tokens))
        assert any(use.config.endswith("gated") for use in uses)
    names = {op.site.site for op in found.ops}
    assert not names & {f"{STEM}gate_up_proj", f"{STEM}activation"}
    assert f"{STEM}down_proj" in names
