"""Gates of real stacks that closed without a word, of whole models and of groups of devices.

See test_silent_gates.py. Each plan is of a preset on recorded or known hardware, made before any
weight is there, and changes when the cause is taken away.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from absent_plans import (
    PLAIN,
    decide,
    kinds,
    plan,
    profile,
    profiles,
    reasons,
    sites,
)
from accelerator_plugins import look_at
from hal.errors import PlanError, SelectionError
from hal.host import RecordedHost
from hal.ops.collective import CollectiveRequest
from hal.ops.request import TokenRange
from hal.plan import Plan
from hal.reasons import ReasonKind
from host_catalogue import compose

CONSUMER_BLACKWELL = "rtx-pro-6000-blackwell-server"


@functools.cache
def planned(preset: str, device: str, tp: int, has_libraries: bool = False) -> Plan:
    return plan(preset, profile(device, has_libraries=has_libraries), tp)


def on_host(preset: str, name: str, tp: int) -> Plan:
    host: RecordedHost = compose(name)[0]
    specs = look_at(host).specs
    return plan(preset, specs[min(specs)], tp, host=host)


def texts(found: Plan, label: str) -> str:
    return "\n".join(v.text for v in found.violations if v.label == label)


def all_reduce(**changes: Any) -> CollectiveRequest:
    values: dict[str, Any] = {
        "kind": "all_reduce",
        "world_size": 8,
        "width": 4096,
        "dtype": "bfloat16",
        "transport": "pcie",
        "p2p": "claimed",
        "is_full_mesh": False,
        "tokens": TokenRange(1, 16),
    }
    return CollectiveRequest(**(values | changes))


# 1


def test_gate_01_bridges_between_some_cards_are_no_full_mesh() -> None:
    """Four H100 NVL with bridges between pairs: more than two ranks cross PCIe, and that is a
    violation that names what is missing."""
    bridged = on_host("llama-3-70b", "h100-nvl-x4-bridges", 4)
    assert bridged.link is not None
    assert not bridged.link.is_full_mesh
    text = texts(bridged, "collective.all_reduce")
    assert "nccl_through_host is portable" in text
    assert "nvlink is not known to link every pair" in text
    for op in sites(bridged, "o_all_reduce"):
        fabric = reasons(op.decision, "torch_symmetric_two_shot")["fabric"]
        assert fabric.required == "nvlink between every pair"
    pair = on_host("llama-3-70b", "h100-nvl-x4-bridges", 2)
    mesh = on_host("llama-3-70b", "h200-x8-nvlink", 4)
    for better in (pair, mesh):
        assert better.link is not None
        assert better.link.is_full_mesh
        assert "does not link every pair" not in texts(better, "collective.all_reduce")
        for op in sites(better, "o_all_reduce"):
            assert op.choice.name == "nvidia.collective.nccl"


def test_gate_01_unverified_peer_access_is_a_violation_that_names_it() -> None:
    text = texts(on_host("llama-3-70b", "rtx-pro-6000-x8", 8), "collective.all_reduce")
    assert "peer access (P2P): required verified on this host" in text
    assert "found claimed, not verified" in text
    # GeForce: off in the stock driver, so nothing to verify; still no silence.
    none = on_host("llama-3-70b", "rtx-4090-x8", 8)
    text = texts(none, "collective.all_reduce")
    assert "nccl_through_host is portable" in text
    assert "peer access (P2P): required verified on this host" in text
    verified = plan("llama-3-70b", profile(CONSUMER_BLACKWELL, p2p="verified"), 8)
    assert "P2P" not in texts(verified, "collective.all_reduce")


@pytest.mark.parametrize(("device", "fabric"), [("mi300x", "xgmi"), ("h200-sxm", "nvlink")])
def test_gate_01_custom_all_reduce_wants_every_pair_linked(device: str, fabric: str) -> None:
    spec = profile(device, has_libraries=True)
    some = decide(spec, all_reduce(transport=fabric, p2p="verified"))
    found = reasons(some, "triton_one_shot")["fabric"]
    assert found.required == f"{fabric} between every pair"
    assert found.kind is ReasonKind.HARDWARE
    full = decide(spec, all_reduce(transport=fabric, p2p="verified", is_full_mesh=True))
    if not full.choice.name.endswith("triton_one_shot"):
        assert "fabric" not in reasons(full, "triton_one_shot")


# 2


def test_gate_02_the_pcie_all_reduce_is_offered_and_its_absence_said() -> None:
    """One stack has it and leaves it off. Here it is the lost path, with what unlocks it."""
    lost = sites(planned("llama-3-70b", CONSUMER_BLACKWELL, 8), "o_all_reduce")[0].decision.lost
    assert lost is not None
    assert lost.better == "nvidia.collective.flashinfer_pcie_ipc"
    assert {r.kind for r in lost.reasons} == {ReasonKind.SOFTWARE, ReasonKind.UNVERIFIED}
    three = decide(profile(CONSUMER_BLACKWELL, has_libraries=True), all_reduce(world_size=6))
    assert reasons(three, "flashinfer_pcie_ipc")["world_size"].required == "2 or 4 or 8"


def test_gate_02_the_size_at_which_an_algorithm_wins_is_part_of_the_plan() -> None:
    """Beyond 8 MiB the library serves: at prefill sizes the other one raised the time to the first
    token. The switch is a row of the plan, at a number of tokens."""
    spec = profile(CONSUMER_BLACKWELL, has_libraries=True, p2p="verified")
    found = plan("llama-3-70b", spec, 8, max_num_batched_tokens=4096)
    ranges = sites(found, "o_all_reduce")
    chosen = [(op.tokens.low, op.tokens.high, op.choice.name.split(".")[-1]) for op in ranges]
    assert [str(op.tokens) for op in sites(found, "o_reduce_norm")] == ["1-16"]
    assert chosen[0][0] == 17  # below, the sum is one call with the norm behind it
    assert chosen[-1][1] == 4096
    small = [high for _, high, name in chosen if name != "nccl"]
    assert small, chosen
    assert max(small) == 512  # rows of 8192 values of two bytes: 8 MiB
    assert chosen[-1] == (513, 4096, "nccl")
    # On eight cards of two sockets one step is worth it for 48 KiB only.
    far = decide(spec, all_reduce(p2p="verified", distance="SYS"))
    message = reasons(far, "triton_one_shot")["message"]
    assert f"at most {48 << 10} bytes" in message.required


# 5


def test_gate_05_a_configuration_that_nobody_measured_is_said() -> None:
    def notes() -> list[str]:
        found = plan("deepseek-v4.1-flash", profile(CONSUMER_BLACKWELL), 8)
        said = ("configuration not measured on this device", "configuration ranked by a model")
        return [n for n in found.notes if n.startswith(said)]

    # What was ranked by a model was not measured either.
    default, ranked = notes()
    assert "nvidia.norm.rms.triton" in default
    assert "sm_120" in default
    assert "not measured on it" in ranked
    assert "nvidia.gemm.triton" in ranked


# 6


@pytest.mark.parametrize("preset", ["deepseek-v4-flash", "deepseek-v4.1-flash"])
def test_gate_06_sparse_prefill_of_v4_on_sm120_stays_sparse_or_is_a_violation(preset: str) -> None:
    plain = planned(preset, CONSUMER_BLACKWELL, 8)
    full = planned(preset, CONSUMER_BLACKWELL, 8, True)
    for found in (plain, full):
        listed = [op for op in sites(found, "attention", "prefill") if _top_k(op.site.request)]
        assert listed
        for op in listed:
            assert not op.decision.semantic_notes, "dense attention is another model"
            assert kinds(op.decision, "flash_mla_compressed") >= {ReasonKind.HARDWARE}
    text = texts(plain, "compressed_attention.prefill")
    if "is portable" in text:
        assert "flashinfer_sparse_sm120" in text
    else:
        assert not text
    served = {op.choice.name for op in sites(full, "attention", "prefill") if _listed(op)}
    assert not [name for name in served if "torch" in name or "reference" in name]


def _top_k(request: Any) -> int:
    return int(request.top_k)


def _listed(op: Any) -> bool:
    return _top_k(op.site.request) > 0


# 7 and 8


@pytest.mark.parametrize(
    ("device", "tp"), [("h200-sxm", 8), ("mi300x", 8), ("ascend-910b2", 8), ("metax-c550", 8)]
)
def test_gate_07_scores_of_v41_are_fast_or_a_violation(device: str, tp: int) -> None:
    found = planned("deepseek-v4.1-flash", device, tp)
    for phase in ("prefill", "decode"):
        names = ("indexer.logits", "indexer.selection")
        calls = [op for op in found.ops if op.site.site.endswith(names)]
        calls = [op for op in calls if op.site.request.phase == phase]
        assert calls
        for op in calls:
            is_plain = "torch" in op.choice.name or "reference" in op.choice.name
            said = op.choice.name in texts(found, op.site.request.label)
            assert said or not is_plain, op.choice.name


def test_gate_08_scores_of_the_whole_context_are_said() -> None:
    """V4.1's later layers choose among candidates: scoring all and masking afterwards is what one
    stack does by default. A decode scores the candidates alone where one call does both, and a plan
    says where that is not so."""

    def said(device: str) -> list[str]:
        notes = planned("deepseek-v4.1-flash", device, 8).notes
        return [n for n in notes if "whole context" in n]

    (note,) = said("h200-sxm")
    assert "layers 24, 28, 32, 36" in note
    assert "in prompts, though they choose among 16,384 entries" in note
    apart = said("ascend-910b2")  # whose library has no such call
    assert [("in prompts" in n, "in decodes" in n) for n in apart] == [(True, False), (False, True)]
    other = planned("deepseek-v4-flash", "h200-sxm", 8)
    assert not [n for n in other.notes if "whole context" in n]


# 11 and 12


def test_gate_11_a_fused_all_reduce_and_norm_is_planned_or_said_why_not() -> None:
    def found(tp: int, **attributes: str) -> tuple[list[str], list[str]]:
        device = profile("h200-sxm", **attributes)
        report = plan("llama-3-70b", device, tp)
        ranges = [str(op.tokens) for op in report.ops if op.site.site.endswith("o_reduce_norm")]
        return ranges, [note for note in report.notes if note.startswith("all_reduce_norm")]

    ranges, notes = found(8, p2p="verified")
    assert ranges == ["1-16"]
    assert len(notes) == 1
    assert "above 16 tokens" in notes[0]
    ranges, (note,) = found(8, p2p="claimed")
    assert not ranges
    assert "at any size" in note
    assert "required verified on this host" in note
    assert found(1) == ([], [])


def test_gate_12_short_prompts_of_sparse_models_are_said() -> None:
    def said(preset: str) -> list[str]:
        notes = planned(preset, "h200-sxm", 8).notes
        return [n for n in notes if "dense attention for them is not planned" in n]

    (note,) = said("deepseek-v3.2")
    assert "at most 2,048 tokens" in note
    assert not said("llama-3-70b")


# 13


def test_gate_13_use_is_for_the_whole_model_or_an_error() -> None:
    """V3.2's router is bfloat16: a kernel for FP8 cannot be "the" product of the model."""
    with pytest.raises(SelectionError, match="never degraded"):
        plan(
            "deepseek-v3.2",
            profile("h200-sxm", has_libraries=True),
            8,
            use={"gemm": "nvidia.gemm.deep_gemm"},
        )
    with pytest.raises(PlanError, match="an op of this model's plan"):
        plan("llama-3-70b", profile("h200-sxm"), 8, use={"index_logits": "nvidia.x"})


def test_plain_software_is_torch_and_triton() -> None:
    assert set(PLAIN) == {"torch", "triton"}
    assert all(set(spec.software) == set(PLAIN) for spec in profiles().values())
