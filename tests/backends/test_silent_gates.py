"""Gates of real stacks that closed without a word, one request each: products, attention, indexer.

Each test names a device and a request on which a serving stack silently ran something slower or
something else, what our decision says there, and that it says so no longer once the cause is gone.
Gates of whole models and of groups of devices are in test_silent_gates_models.py, those of vendors
in test_silent_gates_vendors.py, the compiler's trap in test_silent_gates_compiler.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from absent_plans import decide, kinds, profile, profiles, reasons
from gate_requests import latent, product, scores, without_triton
from hal.errors import SelectionError
from hal.reasons import ReasonKind
from hal.selection import Decision
from hal.tiers import Tier

CONSUMER_BLACKWELL = "rtx-pro-6000-blackwell-server"
HOPPER = "h200-sxm"


def lost_text(decision: Decision) -> str:
    assert decision.lost is not None, decision.choice.name
    return decision.lost.describe(decision.choice)


# 3


def test_gate_03_blocks_of_32_on_sm120_never_run_as_another_block_size() -> None:
    """One stack hands 32x32 blocks to a generic kernel without a word. Here kernels of 128x128
    blocks say that they are for others, and a requantised one is a change of meaning."""
    device = profile(CONSUMER_BLACKWELL, has_libraries=True)
    narrow = decide(device, product("fp8_block32_ue8m0_a8"))
    for name in ("deep_gemm", "flashinfer_block128"):
        found = reasons(narrow, name)["weight format"]
        assert found.kind is ReasonKind.SCOPE
        assert "fp8_block128_a8" in found.required
        assert found.found == "fp8_block32_ue8m0_a8"
    assert not narrow.semantic_notes
    # torch's own MX product is no lost word either: nobody verified it on this architecture.
    assert kinds(narrow, "torch_scaled_mm_mx") == {ReasonKind.UNVERIFIED}
    datacentre = decide(profile("b200-sxm", has_libraries=True), product("fp8_block32_ue8m0_a8"))
    if datacentre.choice.name != "nvidia.gemm.torch_scaled_mm_mx":
        assert kinds(datacentre, "torch_scaled_mm_mx") == {ReasonKind.RANKED}
    # With blocks of 128 the same kernels are meant.
    wide = decide(device, product("fp8_block128_a8"))
    for name in ("deep_gemm", "flashinfer_block128"):
        if wide.choice.name != f"nvidia.gemm.{name}":
            assert "weight format" not in reasons(wide, name)


def test_gate_03_without_a_kernel_for_blocks_of_32_the_loss_is_said() -> None:
    bare = without_triton(profile(CONSUMER_BLACKWELL))
    decision = decide(bare, product("fp8_block32_ue8m0_a8"))
    assert decision.choice.tier < Tier.TUNED
    assert "flashinfer-python" in lost_text(decision)
    full = without_triton(profile(CONSUMER_BLACKWELL, has_libraries=True))
    served = decide(full, product("fp8_block32_ue8m0_a8"))
    assert served.choice.name == "nvidia.gemm.flashinfer_mxfp8"
    assert served.lost is None


# 4


@pytest.mark.parametrize("name", ["a100-sxm-80g", "rtx-4090", "l4"])
def test_gate_04_deep_gemm_below_sm90_says_why(name: str) -> None:
    decision = decide(profile(name, has_libraries=True), product("fp8_block128_a8"))
    arch = reasons(decision, "deep_gemm")["arch"]
    assert arch.kind is ReasonKind.HARDWARE
    assert arch.found == profile(name).arch
    assert "sm_90" in arch.required


def test_gate_04_deep_gemm_on_sm120_is_a_claim_until_somebody_verifies_it() -> None:
    decision = decide(profile(CONSUMER_BLACKWELL, has_libraries=True), product("fp8_block128_a8"))
    arch = reasons(decision, "deep_gemm")["arch"]
    assert (arch.kind, arch.found) == (ReasonKind.UNVERIFIED, "sm_120, claimed only")
    # Float32 scales become powers of two on Blackwell: no silent change of the numbers.
    assert ReasonKind.SEMANTIC in kinds(decision, "deep_gemm")
    hopper = decide(profile(HOPPER, has_libraries=True), product("fp8_block128_a8"))
    assert hopper.choice.name == "nvidia.gemm.deep_gemm"


def test_gate_04_deep_gemm_not_installed_is_a_reason_among_the_losers() -> None:
    decision = decide(profile(HOPPER), product("fp8_block128_a8"))
    assert kinds(decision, "deep_gemm") == {ReasonKind.SOFTWARE}
    assert "deep-gemm" in reasons(decision, "deep_gemm")["software"].required


# 7


@pytest.mark.parametrize(
    "name", [HOPPER, CONSUMER_BLACKWELL, "mi300x", "ascend-910b2", "metax-c550", "bi-v150"]
)
def test_gate_07_scores_in_plain_torch_are_a_lost_path(name: str) -> None:
    """V4.1's FP4 keys: where only plain torch is left, the plan refuses and names the intermediates
    that make it slow by their bytes."""
    device = without_triton(profile(name, has_libraries=True))
    request = scores("fp4_68", "bfloat16", num_heads=32, compress_ratio=2)
    decision = decide(device, request)
    assert decision.choice.name.endswith("index_logits.torch_einsum")
    assert "portable" in lost_text(decision)
    work = decision.choice.work(request, 32)
    assert work is not None
    assert work.bytes > 16 * 32 * 32 * request.context_tokens / request.compress_ratio


def test_gate_07_a_kernel_for_the_scores_takes_the_loss_away() -> None:
    device = without_triton(profile(HOPPER))
    missing = decide(device, scores("fp8_132", "float8_e4m3fn"))
    assert "deep-gemm" in lost_text(missing)
    installed = without_triton(profile(HOPPER, has_libraries=True))
    served = decide(installed, scores("fp8_132", "float8_e4m3fn"))
    assert served.choice.name == "nvidia.index_logits.deep_gemm"
    assert served.lost is None


# 9


@pytest.mark.parametrize(
    ("request_", "implementation"),
    [
        (latent(), "flash_mla_sparse_packed"),
        (latent(kv_format="bf16", phase="prefill"), "flash_mla_sparse"),
        (product("nvfp4_a4"), "torch_scaled_mm_nvfp4"),
        (product("fp8_block32_ue8m0_a8"), "torch_scaled_mm_mx"),
        (scores("fp8_132", "float8_e4m3fn"), "deep_gemm"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_gate_09_sm120_is_not_taken_for_sm100(request_: Any, implementation: str) -> None:
    """ "major >= 10" is no predicate: a kernel of data-centre Blackwell is out of reach of a
    workstation's, or at best a claim, whatever is installed."""
    big = decide(profile("b200-sxm", has_libraries=True), request_)
    if not big.choice.name.endswith(f".{implementation}"):
        assert "arch" not in reasons(big, implementation)
    small = decide(profile("rtx-5090", has_libraries=True), request_)
    assert not small.choice.name.endswith(f".{implementation}")
    arch = reasons(small, implementation)["arch"]
    assert arch.kind in (ReasonKind.HARDWARE, ReasonKind.UNVERIFIED)
    assert arch.found.startswith("sm_120")
    assert "sm_100" in arch.required


# 10


def test_gate_10_flash_mla_sparse_exists_for_exact_numbers_of_heads() -> None:
    device = profile(HOPPER, has_libraries=True)
    few = decide(device, latent(num_heads=16))
    heads = reasons(few, "flash_mla_sparse_packed")["num_heads"]
    assert (heads.required, heads.found) == ("64 or 128", "16")
    assert heads.kind is ReasonKind.ARGUMENT
    for enough in (64, 128):
        served = decide(device, latent(num_heads=enough))
        assert served.choice.name == "nvidia.mla_attention.flash_mla_sparse_packed"


def test_gate_10_a_length_of_list_that_the_kernel_lacks_is_found_before_the_weights() -> None:
    """1152 is a length on which kernels for fixed pairs failed at run time; ours say which lengths
    they take: multiples of 64 or 128."""
    device = profile(HOPPER, has_libraries=True)
    odd = decide(device, latent(top_k=1144))
    top_k = reasons(odd, "flash_mla_sparse_packed")["top_k"]
    assert (top_k.required, top_k.found) == ("a multiple of 64", "1144")
    prefill = decide(device, latent(top_k=1088, kv_format="bf16", phase="prefill"))
    assert reasons(prefill, "flash_mla_sparse")["top_k"].required == "a multiple of 128"
    served = decide(device, latent(top_k=1152))
    assert served.choice.name == "nvidia.mla_attention.flash_mla_sparse_packed"


def test_gate_10_sm120_has_another_kernel_and_flash_mla_says_that_it_is_not_it() -> None:
    device = without_triton(profile(CONSUMER_BLACKWELL))
    decision = decide(device, latent(top_k=1152))
    assert kinds(decision, "flash_mla_sparse_packed") >= {ReasonKind.HARDWARE}
    assert "flashinfer_sparse_sm120" in lost_text(decision)
    full = without_triton(profile(CONSUMER_BLACKWELL, has_libraries=True))
    assert decide(full, latent(top_k=1152)).choice.name.endswith("flashinfer_sparse_sm120")


# 13


def test_gate_13_a_choice_without_a_kernel_is_an_error() -> None:
    request = product("fp8_block128_a8")
    wanted = {"gemm": "nvidia.gemm.deep_gemm"}
    with pytest.raises(SelectionError, match="never degraded") as raised:
        decide(profile("rtx-4090", has_libraries=True), request, use=wanted)
    assert "sm_89" in raised.value.found
    with pytest.raises(SelectionError, match=r"nvidia\.gemm\.deep_gemm"):
        decide(profile(HOPPER), request, use={"gemm": "nvidia.gemm.deepgemm"})
    chosen = decide(profile(HOPPER, has_libraries=True), request, use=wanted)
    assert chosen.is_explicit
    assert chosen.choice.name == wanted["gemm"]


def test_gate_13_activations_that_stay_wide_are_a_change_of_meaning() -> None:
    """MXFP8 on a card without it: one stack quietly keeps the activations in 16 bits."""
    device = profile("a100-sxm-80g", has_libraries=True)
    request = product("fp8_block32_ue8m0_a8")
    strict = decide(device, request)
    found = reasons(strict, "triton_weight_only")["semantics (activations_not_rounded)"]
    assert found.kind is ReasonKind.SEMANTIC
    allowed = decide(device, request, allows=frozenset({"activations_not_rounded"}))
    if allowed.choice.name.endswith("triton_weight_only"):
        assert [note.name for note in allowed.semantic_notes] == ["activations_not_rounded"]
    else:
        assert ReasonKind.SEMANTIC not in kinds(allowed, "triton_weight_only")


# 14


def test_gate_14_aiter_is_a_loser_with_a_reason_and_no_variable_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = product("fp8_block128_a8")
    for value in (None, "0", "1"):
        if value is not None:
            for name in ("SGLANG_USE_AITER", "VLLM_ROCM_USE_AITER"):
                monkeypatch.setenv(name, value)
        absent = decide(profile("mi300x"), request)
        assert kinds(absent, "aiter") == {ReasonKind.SOFTWARE}
        assert "aiter" in reasons(absent, "aiter")["software"].required
        present = decide(profile("mi300x", has_libraries=True), request)
        assert present.choice.name == "amd.gemm.aiter"
    bare = decide(without_triton(profile("mi300x")), request)
    assert "amd.gemm.aiter" in lost_text(bare)


def test_gate_14_blocks_of_32_on_gfx942_are_requantised_by_permission_only() -> None:
    device = without_triton(profile("mi300x", has_libraries=True))
    request = product("fp8_block32_ue8m0_a8")
    strict = decide(device, request)
    assert kinds(strict, "aiter_requantized") == {ReasonKind.SEMANTIC}
    allowed = decide(device, request, allows=frozenset({"requantized_fp8_blocks"}))
    assert allowed.choice.name == "amd.gemm.aiter_requantized"
    assert [note.name for note in allowed.semantic_notes] == ["requantized_fp8_blocks"]


def test_every_gate_is_about_a_device_of_the_database() -> None:
    assert {CONSUMER_BLACKWELL, HOPPER, "b200-sxm", "mi300x", "mi350x"} <= set(profiles())
