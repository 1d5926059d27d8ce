"""The clamped gate of V4's experts in the call that a plan joins, in the interpreter, against the
module of transformers in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

import hal_kernels.grouped_gemm.triton as triton_grouped
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.formats import quantize_weight
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal_engine.config import load_model_config
from hal_engine.models.product_joins import product_joins
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from hal_engine.preset_files import load_presets
from kernel_errors import assert_exact

EXPERTS, PER_TOKEN, HIDDEN, WIDTH, TOKENS = 6, 2, 96, 64, 13
LIMIT = 0.7  # well inside what the products reach


def planned_request(name: str) -> GroupedGemmRequest:
    """Of a model of the presets, with its clamp and format, at the sizes of this test."""
    config = load_model_config(load_presets()[name].path)
    precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
    limits = StepLimits(max_num_batched_tokens=512, max_num_seqs=32, block_size=64)
    sites = model_sites(config, precision, limits, 1)
    (join,) = [
        j for j in product_joins(sites) if j.site.site.endswith("experts.gate_up_activation")
    ]
    found = join.site.request
    assert isinstance(found, GroupedGemmRequest)
    assert config.moe is not None
    assert found.clamp == config.moe.activation_clamp
    return dataclasses.replace(
        found, num_experts=EXPERTS, experts_per_token=PER_TOKEN, n=2 * WIDTH, k=HIDDEN, clamp=LIMIT
    )


def experts_of(gate_up: torch.Tensor, down: torch.Tensor) -> DeepseekV4Experts:
    config = DeepseekV4Config(
        hidden_size=HIDDEN, intermediate_size=WIDTH, moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS, num_local_experts=EXPERTS, swiglu_limit=LIMIT,
    )  # fmt: skip
    module = DeepseekV4Experts(config).double()
    assert module.gate_up_proj.shape == gate_up.shape
    assert module.limit == LIMIT
    with torch.no_grad():
        module.gate_up_proj.copy_(gate_up)
        module.down_proj.copy_(down)
    return module


def is_cut(gate_up: torch.Tensor) -> float:
    gate, up = gate_up.chunk(2, dim=-1)
    return float(((gate > LIMIT) | (up.abs() > LIMIT)).double().mean())


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4.1-flash"])
def test_experts_of_a_plan_with_a_joined_activation(name: str) -> None:
    request = planned_request(name)
    form = request.weight_format
    is_fp4 = form.element == "fp4_e2m1"
    assert is_fp4, "the experts of these models have weights of four bits"
    arch = "sm_120"
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    gate_up = [
        quantize_weight(torch.randn(2 * WIDTH, HIDDEN) / HIDDEN**0.5, form) for _ in range(EXPERTS)
    ]
    down = [quantize_weight(torch.randn(HIDDEN, WIDTH) / WIDTH**0.5, form) for _ in range(EXPERTS)]
    module = experts_of(
        *(torch.stack([w.dequantize().double() for w in ws]) for ws in (gate_up, down))
    )

    ids = torch.stack([torch.randperm(EXPERTS)[:PER_TOKEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, PER_TOKEN)
    dispatch = CATALOGUE["moe_dispatch"].reference
    fields = {
        "num_experts": EXPERTS,
        "top_k": PER_TOKEN,
        "hidden_size": HIDDEN,
        "dtype": "bfloat16",
    }
    permute = MoeDispatchRequest(kind="permute", **fields)  # type: ignore[arg-type]
    rows, offsets, source = dispatch(permute)(x, ids.int())
    joined = triton_grouped.bind(request, gpu(arch), weight=gate_up)(rows, offsets)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_groups(
            values, group_size=32, element="fp8_e4m3fn", scale_kind="ue8m0"
        )
        return dequantize_groups(codes, scales, element="fp8_e4m3fn", scale_kind="ue8m0").double()

    owner = torch.repeat_interleave(torch.arange(EXPERTS), offsets.diff())
    with torch.no_grad():
        products = torch.stack(
            [
                functional.linear(r, module.gate_up_proj[e])
                for r, e in zip(rounded(rows), owner, strict=True)
            ]
        )
        assert 0.1 < is_cut(products) < 0.9
        want = module._apply_gate(products)
    assert_exact("grouped_gemm", joined, want, floor=1e-6)

    # The whole of it: what the module makes of the same tokens, but for the rounding of rows.
    behind = dataclasses.replace(request, epilogue="none", clamp=0.0, n=HIDDEN, k=WIDTH)
    y = triton_grouped.bind(behind, gpu(arch), weight=down)(joined, offsets)
    combine = MoeDispatchRequest(kind="combine", **fields)  # type: ignore[arg-type]
    found = dispatch(combine)(y, source, weights).double()
    with torch.no_grad():
        whole = module(x.double(), ids, weights.double())
    assert float((found - whole).norm() / whole.norm()) < 0.08  # two roundings of rows to e4m3
