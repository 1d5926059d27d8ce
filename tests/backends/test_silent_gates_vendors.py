"""Vendors outside of CUDA and ROCm: sparse attention that is off, cards that look like NVIDIA's.

See test_silent_gates.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest

from absent_plans import (
    ProfileRegistry,
    plan,
    profile,
    reasons,
    sites,
)
from accelerator_plugins import look_at
from hal.errors import PlanError, SelectionError
from hal.ops import CATALOGUE
from hal.plan import Plan
from hal.reasons import ReasonKind
from host_catalogue import compose


@functools.cache
def planned(preset: str, device: str, tp: int) -> Plan:
    return plan(preset, profile(device), tp)


# 15

CHINESE: Mapping[str, str] = {
    "ascend": "ascend-910b2",
    "cambricon": "mlu590",
    "moore_threads": "mtt-s5000",
    "metax": "metax-c550",
    "iluvatar": "bi-v150",
    "hygon": "hygon-k100-ai",
    "kunlunxin": "kunlunxin-p800",
    "enflame": "enflame-s60",
}


@pytest.mark.parametrize("backend", CHINESE)
def test_gate_15_sparse_attention_is_on_and_dense_is_refused(backend: str) -> None:
    """Recipes for these leave it to the user to switch sparse attention on, and two run dense."""
    spec = profile(CHINESE[backend])
    assert spec.backend == backend
    found = planned("deepseek-v3.2", spec.device_id, 8)
    assert found.policy["forced_features"]["sparse_attention"]
    for phase in ("prefill", "decode"):
        for op in sites(found, "attention", phase):
            request: Any = op.site.request
            assert request.top_k == 2048
            assert not op.decision.semantic_notes
            dense = reasons(op.decision, "torch_dense")
            assert dense["semantics (dense_attention_for_sparse)"].kind is ReasonKind.SEMANTIC
    dense_asked: dict[str, Any] = {
        "sparse_attention": "off",
        "allow_semantics": ("dense_attention_for_sparse",),
    }
    with pytest.raises(PlanError, match=f"{backend} forces on"):
        plan("deepseek-v3.2", spec, 8, **dense_asked)
    with pytest.raises(SelectionError, match="dense_attention_for_sparse"):
        plan(
            "deepseek-v3.2", spec, 8, use={"mla_attention": f"{backend}.mla_attention.torch_dense"}
        )


def test_gate_15_dense_attention_elsewhere_needs_to_be_allowed_by_name() -> None:
    spec = profile("h200-sxm")
    with pytest.raises(PlanError, match="dense_attention_for_sparse"):
        plan("deepseek-v3.2", spec, 8, sparse_attention="off")
    found = plan(
        "deepseek-v3.2",
        spec,
        8,
        sparse_attention="off",
        allow_semantics=("dense_attention_for_sparse",),
    )
    assert any("dense_attention_for_sparse" in note for note in found.notes)


@pytest.mark.parametrize("backend", CHINESE)
def test_gate_15_mechanisms_of_other_vendors_are_off_by_name_and_reason(backend: str) -> None:
    disabled = planned("deepseek-v3.2", CHINESE[backend], 8).policy["disabled"]
    for mechanism in ("one_shot", "deep_gemm", "flashinfer", "_cudnn", "_tma"):
        (glob,) = [glob for glob in disabled if mechanism in glob]
        assert "'s" in disabled[glob], "whose mechanism it is"


# 16

MASQUERADERS = (
    "metax-c550-x8",
    "bi-v150-x8",
    "hygon-k100-ai-x8",
    "kunlunxin-p800-x8",
    "thead-ppu-x4",
)
NVIDIA_ONLY = (
    "deep_gemm",
    "flashinfer",
    "flash_mla",
    "cudnn",
    "symmetric",
    "sgl_",
    "flash_attention_3",
)


@pytest.mark.parametrize("name", MASQUERADERS)
def test_gate_16_no_gate_of_nvidia_fires_on_a_card_that_looks_like_one(name: str) -> None:
    """torch.cuda is there on all of these. What decides is the PCI vendor and the torch build."""
    host, expected = compose(name)
    (backend,) = expected.devices
    found = look_at(host)
    assert set(found.devices) == {backend}
    if backend == "thead":  # none of its products is in the database, so a plan refuses the card
        assert found.undescribed
        spec = dataclasses.replace(profile("metax-c550"), backend="thead")
    else:
        spec = found.specs[min(found.specs)]
    assert spec.torch_device.startswith("cuda")
    registry = ProfileRegistry(host)
    for op in CATALOGUE:
        for candidate in registry.candidates(op, spec):
            assert not candidate.name.startswith(("nvidia.", "amd."))
            last = candidate.name.split(".")[-1]
            assert not last.startswith(NVIDIA_ONLY), candidate.name


def test_gate_16_the_same_gates_are_there_on_a_real_one() -> None:
    host, _ = compose("h200-x8-nvlink")
    found = look_at(host)
    assert set(found.devices) == {"nvidia"}
    registry = ProfileRegistry(host)
    names = [
        candidate.name.split(".")[-1]
        for op in CATALOGUE
        for candidate in registry.candidates(op, found.specs[min(found.specs)])
    ]
    for mechanism in ("deep_gemm", "flashinfer", "flash_mla", "flash_attention_3"):
        assert any(name.startswith(mechanism) for name in names), mechanism
