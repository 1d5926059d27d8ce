"""Limits as data: each by a request that just misses it, on devices that need not be here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hal.device import DeviceSpec
from hal.ops.attention import AttentionRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest
from hal.ops.sampling import TopKTopPRequest
from hal.reasons import ReasonKind
from hal.tiers import Tier
from hal_opencl.candidates import candidates_for

CPU = DeviceSpec(
    device_id="opencl:0",
    vendor="khronos",
    backend="opencl",
    name="",
    arch="opencl-cpu",
    torch_device="cpu",
    features=frozenset({"unit.cpu", "memory.shared", "fp64"}),
)
GPU = replace(CPU, arch="opencl-gpu", features=frozenset({"unit.gpu"}))
FLOAT = {"dtype": "float32", "kv_dtype": "float32"}
GEMM = GemmRequest(n=64, k=64, dtype="float32", weight_format=FORMATS["float32"])
KV_WRITE = KvWriteRequest(num_kv_heads=2, head_dim=32, v_head_dim=32, block_size=16, **FLOAT)
ATTENTION = AttentionRequest(
    phase="decode",
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    v_head_dim=32,
    block_size=16,
    **FLOAT,
)
NORM = RmsNormRequest(hidden_size=17, dtype="float32")


@pytest.mark.parametrize("request_", [GEMM, KV_WRITE, ATTENTION, NORM])
def test_serves_what_it_is_for(request_: OpRequest) -> None:
    (candidate,) = candidates_for(request_.op, CPU)
    assert candidate.not_supported_reasons(request_) == []


@pytest.mark.parametrize(
    ("request_", "change", "kind"),
    [
        (GEMM, {"dtype": "bfloat16", "out_dtype": "float32"}, ReasonKind.SCOPE),
        (GEMM, {"out_dtype": "bfloat16"}, ReasonKind.SCOPE),
        (GEMM, {"weight_format": FORMATS["int8_channel"]}, ReasonKind.SCOPE),
        (NORM, {"quantize": "int8_per_token"}, ReasonKind.SCOPE),
        (KV_WRITE, {"kv_dtype": "bfloat16"}, ReasonKind.SCOPE),
        (
            KV_WRITE,
            {"kv_format": "bf16", "num_kv_heads": 1, "v_head_dim": 0},
            ReasonKind.SCOPE,
        ),
        (ATTENTION, {"kv_dtype": "bfloat16"}, ReasonKind.SCOPE),
        (ATTENTION, {"head_dim": 40}, ReasonKind.ARGUMENT),
        (ATTENTION, {"v_head_dim": 272}, ReasonKind.ARGUMENT),
        (ATTENTION, {"block_size": 24}, ReasonKind.ARGUMENT),
    ],
)
def test_each_limit(request_: Any, change: dict[str, Any], kind: ReasonKind) -> None:
    (candidate,) = candidates_for(request_.op, CPU)
    (reason,) = candidate.not_supported_reasons(replace(request_, **change))
    assert reason.kind is kind
    assert reason.found


def test_limits_of_the_device() -> None:
    """A KV cache in host memory needs a device that shares it; top-p sums in double."""
    for request_ in (KV_WRITE, TopKTopPRequest(vocab_size=9)):
        (candidate,) = candidates_for(request_.op, GPU)
        (reason,) = candidate.not_supported_reasons(request_)
        assert reason.kind is ReasonKind.HARDWARE


@pytest.mark.parametrize(("device", "tier"), [(CPU, Tier.TUNED), (GPU, Tier.PORTABLE)])
def test_tiers_follow_the_rule(device: DeviceSpec, tier: Tier) -> None:
    (candidate,) = candidates_for("gemm", device)
    assert candidate.tier is tier


def test_other_ops_are_not_offered() -> None:
    assert candidates_for("grouped_gemm", CPU) == ()
