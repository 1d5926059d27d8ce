"""Plans of quantised weights on GPUs: each product has a native kernel, with its activation."""

from __future__ import annotations

from pathlib import Path

import pytest

from absent_plans import plan, profile, sites
from hal.kernel_uses import planned_uses
from hal.ops.gemm import GemmRequest
from hal.tiers import Tier
from packaged_configurations import LLAMA_8B


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configurations of whoever runs the test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("device", ["h200-sxm", "rtx-4090", "mi300x", "radeon-pro-w7900"])
def test_int8_weights_with_activations_as_they_are(device: str) -> None:
    found = plan(str(LLAMA_8B), profile(device), precision="w8")
    products = [op for op in found.ops if isinstance(op.site.request, GemmRequest)]
    assert products
    for op in products:
        assert op.decision.choice.tier == Tier.NATIVE, op.site.label()
    for op in sites(found, "gate_up_proj"):
        request = op.site.request
        assert isinstance(request, GemmRequest)
        assert (request.epilogue, request.weight_format.name) == ("silu_gated", "int8_channel")
        assert op.decision.choice.name.endswith(".gemm.triton")
        configurations = [use.config for use in planned_uses(op)]
        assert configurations
        assert all("gated" in configuration for configuration in configurations)
