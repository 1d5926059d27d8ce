"""Where serving stacks quietly lose a fast path: each shows here, before any weight is loaded.

The numbers are those of the gates that were read in the source of other serving stacks. A gate is
shown if the trace names the faster candidate with its reason, or if the choice that would change
the model's numbers is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hal.candidates import KernelCandidate
from hal.device import DevicePolicy
from hal.reasons import Reason, ReasonKind
from hal.selection import Decision, SelectionRules, select
from hal.tiers import Tier
from hal_backends.reference.plugin import hal_kernel_candidates

RTX = "rtx-pro-6000-blackwell-server"
Asked = Callable[..., "Answer"]


class Answer:
    """What is chosen for one request of the matrix on one device, and what is said of the rest."""

    def __init__(
        self, candidates: list[KernelCandidate], request: Any, policy: DevicePolicy
    ) -> None:
        self.by_name = {c.name.rsplit(".", 1)[1]: c for c in candidates}
        self.request = request
        rules = SelectionRules(explicit={}, policy=policy)
        self.decision: Decision = select(request, candidates, rules)

    @property
    def chosen(self) -> str:
        return self.decision.choice.name.rsplit(".", 1)[1]

    def why_not(self, name: str) -> dict[str, Reason]:
        """The reasons in the trace, by what they are about."""
        found = [r for r in self.decision.rejected if r.name.rsplit(".", 1)[1] == name]
        assert found, f"{name} is not in the trace"
        return {reason.what: reason for reason in found[0].reasons}


@pytest.fixture
def ask(matrix: ModuleType) -> Asked:
    import importlib

    devices = {device.device_id: device for device in matrix.devices()}

    def answer(device_id: str, op: str, name: str, *, is_bare: bool = False) -> Answer:
        plain = devices[device_id]
        device = plain if is_bare else matrix.with_software(plain)
        policy = importlib.import_module(f"hal_backends.{device.backend}.policy")
        candidates = [*matrix.candidates(device, op), *hal_kernel_candidates(op, device)]
        return Answer(candidates, matrix.REQUESTS[op][name], policy.device_policy(device))

    return answer


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        ("8 on PCIe, no P2P, 10 KiB", ReasonKind.HARDWARE),
        ("8 on PCIe, P2P claimed, 10 KiB", ReasonKind.UNVERIFIED),
    ],
)
def test_1_custom_all_reduce_without_peer_access(ask: Asked, link: str, kind: ReasonKind) -> None:
    answer = ask("l40s", "collective", link)
    assert answer.chosen == "nccl_through_host"
    for faster in ("nccl", "triton_one_shot"):
        assert answer.why_not(faster)["peer access (P2P)"].kind is kind
    assert answer.decision.lost is not None


def test_2_the_size_at_which_an_algorithm_wins_is_part_of_the_choice(ask: Asked) -> None:
    small = ask(RTX, "collective", "8 on PCIe, P2P verified, 10 KiB")
    large = ask(RTX, "collective", "8 on PCIe, P2P verified, 80 MiB")
    assert small.chosen == "flashinfer_pcie_ipc"
    assert large.chosen == "nccl"
    assert "message" in large.why_not("flashinfer_pcie_ipc")
    bare = ask(RTX, "collective", "8 on PCIe, P2P verified, 10 KiB", is_bare=True)
    missing = bare.why_not("flashinfer_pcie_ipc")
    assert any(reason.kind is ReasonKind.SOFTWARE for reason in missing.values())
    assert bare.decision.lost is not None


def test_3_blocks_of_32_on_consumer_blackwell(ask: Asked) -> None:
    """Not the kernels for 128: the card's own instruction for a power of two per 32 serves."""
    answer = ask(RTX, "gemm", "fp8_block32_ue8m0_a8")
    assert answer.decision.choice.tier is Tier.NATIVE
    for for_128 in ("deep_gemm", "flashinfer_block128"):
        assert "fp8_block128" in answer.why_not(for_128)["weight format"].required


def test_4_deep_gemm_on_older_cards_and_on_consumer_blackwell(ask: Asked) -> None:
    old = ask("l40s", "gemm", "fp8_block128_a8").why_not("deep_gemm")["arch"]
    assert (old.kind, old.found) == (ReasonKind.HARDWARE, "sm_89")
    new = ask(RTX, "gemm", "fp8_block128_ue8m0_a8").why_not("deep_gemm")["arch"]
    assert new.kind is ReasonKind.UNVERIFIED


@pytest.mark.parametrize("name", ["v3.2 prefill", "16 heads bf16 decode"])
def test_6_sparse_attention_on_consumer_blackwell(ask: Asked, name: str) -> None:
    """Where only torch is left, the lists are still followed; attending to all is refused."""
    answer = ask(RTX, "mla_attention", name)
    assert answer.chosen == "torch_listed"
    assert answer.why_not("flash_mla_sparse")["arch"].kind is ReasonKind.HARDWARE
    dense = answer.by_name["torch_dense"]
    assert [n.name for n in dense.semantic_notes(answer.request)] == ["dense_attention_for_sparse"]
    assert answer.why_not("torch_dense")


@pytest.mark.parametrize("device", ["h200-sxm", "mi300x", "ascend-910b1", "metax-c500"])
def test_7_index_scoring_of_v4_1_is_plain_torch(ask: Asked, device: str) -> None:
    answer = ask(device, "index_logits", "v4.1 decode")
    assert answer.chosen == "torch_einsum"
    lost = answer.decision.lost
    assert lost is not None, "a portable path is not taken without a word"


def test_8_scoring_everything_is_visible_as_work(ask: Asked) -> None:
    """torch writes every head's score before it adds them: many times the keys' bytes."""
    answer = ask("h200-sxm", "index_logits", "bf16 decode")
    torch_work = answer.by_name["torch_einsum"].work(answer.request, 64)
    fused = answer.by_name["triton_widened"].work(answer.request, 64)
    assert torch_work is not None
    assert fused is None or torch_work.bytes > 2 * fused.bytes


def test_9_sm_120_is_not_sm_100(ask: Asked) -> None:
    for op, name in (
        ("mla_attention", "v3.2 decode"),
        ("compressed_attention", "v4 listed"),
    ):
        answer = ask(RTX, op, name)
        tied = [n for n in answer.by_name if n.startswith("flash_mla")]
        assert tied
        for other in tied:
            assert answer.why_not(other)["arch"].found == "sm_120"


def test_10_fixed_heads_of_flash_mla(ask: Asked) -> None:
    answer = ask("h200-sxm", "mla_attention", "16 heads decode")
    heads = answer.why_not("flash_mla_sparse_packed")["num_heads"]
    assert (heads.required, heads.found) == ("64 or 128", "16")


def test_10_lengths_of_lists(matrix: ModuleType, ask: Asked) -> None:
    """A length that a kernel does not take is a reason, never an error when it is called."""
    answer = ask("h200-sxm", "mla_attention", "1152 rows decode")
    odd = dataclasses.replace(answer.request, top_k=1153)
    kernel = answer.by_name["flash_mla_sparse_packed"]
    assert any("top_k" in reason.what for reason in kernel.not_supported_reasons(odd))


@pytest.mark.parametrize("device", ["h200-sxm", RTX, "mi300x", "ascend-910b1"])
def test_12_dense_attention_for_a_sparse_model(ask: Asked, device: str) -> None:
    answer = ask(device, "mla_attention", "v3.2 decode")
    assert not answer.decision.semantic_notes
    assert answer.chosen != "torch_dense"


def test_13_weights_only_instead_of_products_in_fp8(ask: Asked) -> None:
    answer = ask("a100-sxm-80g", "gemm", "fp8_block32_ue8m0_a8")
    only = answer.by_name["triton_weight_only"]
    work = only.work(answer.request, 64)
    assert work is not None
    assert work.unit == "bfloat16"
    assert [n.name for n in only.semantic_notes(answer.request)] == ["activations_not_rounded"]
    assert not answer.decision.semantic_notes


def test_14_aiter_is_asked_for_not_switched_on(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ROCM_USE_AITER", raising=False)
    assert ask("mi300x", "gemm", "fp8_block128_a8").chosen == "aiter"
    bare = ask("mi300x", "gemm", "fp8_block128_a8", is_bare=True)
    reasons = bare.why_not("aiter").values()
    assert [r.kind for r in reasons] == [ReasonKind.SOFTWARE]
    assert bare.decision.lost is not None


def test_14_requantised_blocks_are_a_waiver(ask: Asked) -> None:
    answer = ask("mi300x", "gemm", "fp8_block32_ue8m0_a8")
    lossy = answer.by_name["aiter_requantized"]
    assert [n.name for n in lossy.semantic_notes(answer.request)] == ["requantized_fp8_blocks"]
    assert answer.chosen != "aiter_requantized"
    assert answer.why_not("aiter_requantized")


@pytest.mark.parametrize("device", ["metax-c500", "bi-v150", "hygon-k100-ai"])
def test_16_looking_like_cuda_is_not_being_nvidia(matrix: ModuleType, device: str) -> None:
    spec = next(d for d in matrix.devices() if d.device_id == device)
    assert spec.torch_device == "cuda"
    full = matrix.with_software(spec)
    names = {c.name for op in matrix.REQUESTS for c in matrix.candidates(full, op)}
    assert all(name.startswith(f"{spec.backend}.") for name in names)
    foreign = ("deep_gemm", "flash_mla", "flashinfer", "sgl_", "cudnn", "torch_symmetric")
    assert not [n for n in names if n.rsplit(".", 1)[1].startswith(foreign)]
