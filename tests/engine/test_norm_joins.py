"""Norms that round their rows for the product behind them: which calls of the models are joined."""

from __future__ import annotations

import dataclasses

import pytest

from absent_plans import plan, profile
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.norm_quantize import NormQuantizeRequest
from hal.ops.quantize import QuantizeRequest
from hal.plan import OpSite
from hal.tiers import Tier
from hal_engine.config import load_model_config
from hal_engine.models.norm_joins import norm_joins
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from hal_engine.preset_files import load_presets

LIMITS = StepLimits(max_num_batched_tokens=512, max_num_seqs=32, block_size=64)


def sites_of(name: str) -> list[OpSite]:
    config = load_model_config(load_presets()[name].path)
    precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
    return model_sites(config, precision, LIMITS, 1)


def joined(sites: list[OpSite], layer: int) -> dict[str, NormQuantizeRequest]:
    found = {}
    for join in norm_joins(sites):
        request = join.site.request
        if layer in join.site.layers:
            assert isinstance(request, NormQuantizeRequest)
            found[join.site.site.removeprefix("layers.*.")] = request
    return found


def test_every_norm_before_a_rounded_product() -> None:
    """DeepSeek-V3.2: a dense layer, and one of experts."""
    dense, experts = (joined(sites_of("deepseek-v3.2"), layer) for layer in (1, 10))
    assert set(dense) == set(experts) == {
        "input_norm_quantize", "q_a_norm_quantize", "post_norm_quantize",
    }  # fmt: skip
    for request in (*dense.values(), *experts.values()):
        assert (request.out_dtype, request.group_size) == ("fp8_e4m3fn", 128)
    # The weights of the indexer's heads, and the router: products of the rows as they are.
    assert dense["input_norm_quantize"].keeps_rows
    assert experts["post_norm_quantize"].keeps_rows
    assert not dense["post_norm_quantize"].keeps_rows
    assert not dense["q_a_norm_quantize"].keeps_rows
    assert dense["input_norm_quantize"].has_residual
    assert not joined(sites_of("deepseek-v3.2"), 0)["input_norm_quantize"].has_residual


def test_a_float_reader_keeps_the_rows() -> None:
    sites = sites_of("deepseek-v3.2")
    (index,) = [s for s in sites if s.site == "layers.*.indexer.q_proj"]
    assert isinstance(index.request, GemmRequest)
    wide = dataclasses.replace(index.request, weight_format=FORMATS["fp8_block128"])
    changed = [dataclasses.replace(s, request=wide) if s is index else s for s in sites]
    assert joined(changed, 10)["q_a_norm_quantize"].keeps_rows


def test_rows_that_are_rounded_in_two_ways_or_to_four_bits_are_not_joined() -> None:
    sites = sites_of("deepseek-v3.2")
    (rounding,) = [s for s in sites if s.site == "layers.*.q_a_quantize"]
    assert isinstance(rounding.request, QuantizeRequest)
    other = dataclasses.replace(rounding.request, group_size=32)
    both = [*sites, dataclasses.replace(rounding, request=other)]
    assert "q_a_norm_quantize" not in joined(both, 10)
    four = dataclasses.replace(rounding.request, out_dtype="mxfp4", scale_dtype="ue8m0")
    changed = [dataclasses.replace(s, request=four) if s is rounding else s for s in sites]
    assert "q_a_norm_quantize" not in joined(changed, 10)
    assert "input_norm_quantize" in joined(changed, 10)


@pytest.mark.parametrize("model", ["deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4.1-flash"])
@pytest.mark.parametrize("device", ["rtx-pro-6000-blackwell-server", "h200-sxm"])
def test_plans_take_them(model: str, device: str) -> None:
    ops = plan(model, profile(device), 8).ops
    names = {op.site.site for op in ops if op.site.request.op == "norm_quantize"}
    assert {f"layers.*.{n}_norm_quantize" for n in ("input", "q_a", "post")} <= names
    for op in ops:
        if op.site.request.op == "norm_quantize":
            assert op.decision.choice.tier is Tier.NATIVE
            assert op.decision.choice.name == "nvidia.norm_quantize.triton"
    apart = {"layers.*.q_a_norm", "layers.*.q_a_quantize", "layers.*.attention_input_quantize"}
    assert not apart & {op.site.site for op in ops}
