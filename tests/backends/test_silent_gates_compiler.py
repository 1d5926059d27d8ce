"""The compiler's trap: FP8 products that compile without an error to instructions of 16 bits.

Stored evidence decides what a Triton candidate may call itself; here it says what a compiler did.
tests/kernels/test_aot.py compiles such a product for real.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from absent_plans import decide, kinds, profile, reasons
from gate_requests import product
from hal.reasons import ReasonKind
from hal.tiers import Tier
from hal_kernels.aot import limits as evidence_limits
from hal_kernels.aot import triton_versions
from hal_kernels.aot.evidence import Evidence, KernelEvidence


def stored(
    monkeypatch: pytest.MonkeyPatch, tier: Any, instruction: str, dtype: str, spills: int = 0
) -> None:
    """As if every Triton kernel had been compiled to that instruction."""

    def read(kernel: str, target: str, *_: object) -> KernelEvidence:
        variants = tuple(
            Evidence(target=target, dtype=dtype, config=config, tier=tier,
                     instruction=instruction, instruction_count=8, spills=spills)
            for config in ("g128", "g32")
        )  # fmt: skip
        return KernelEvidence(
            kernel=kernel, op="gemm", target=target, source_hash="", triton="", variants=variants
        )

    for module in (evidence_limits, triton_versions):
        monkeypatch.setattr(module, "read_evidence", read)


@pytest.mark.parametrize(
    ("name", "arch", "instruction"),
    [
        ("mi300x", "gfx90a", "v_mfma_f32_32x32x8_f16"),
        ("rx-7900-xtx", "gfx1100", "v_wmma_f32_16x16x16_f16"),
        ("a100-sxm-80g", "sm_80", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    ],
)
def test_compiler_trap_widened_fp8_is_never_called_native(
    monkeypatch: pytest.MonkeyPatch, name: str, arch: str, instruction: str
) -> None:
    """An FP8 product compiles without an error for these, and ends in 16-bit instructions."""
    device = profile(name)
    if device.arch != arch:  # no product with gfx90a is in the database
        features = frozenset(f for f in device.features if "fp8" not in f)
        device = dataclasses.replace(device, arch=arch, features=features)
    assert not [f for f in device.features if "fp8" in f]
    stored(monkeypatch, "emulated", instruction, "fp8_e4m3fn")
    decision = decide(device, product("fp8_block128_a8"))
    assert ReasonKind.HARDWARE in kinds(decision, "triton")
    code = reasons(decision, "triton")["machine code of gemm.fp8_widened"]
    assert f"emulated: 8× {instruction}" in code.found
    assert decision.choice.name.endswith("gemm.triton_widened")
    assert decision.choice.tier is Tier.TUNED
    work = decision.choice.work(product("fp8_block128_a8"), 64)
    assert work is not None
    assert work.unit == "bfloat16"


def test_compiler_trap_widened_fp8_that_spills_is_not_called_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, instruction = profile("rx-7900-xtx"), "v_wmma_f32_16x16x16_f16"
    stored(monkeypatch, "emulated", instruction, "fp8_e4m3fn", spills=407)
    decision = decide(device, product("fp8_block128_a8"))
    code = reasons(decision, "triton_widened")["machine code of gemm.fp8_widened"]
    assert code.required == "emulated fp8_e4m3fn and no spills"
    assert "407 spills" in code.found
    assert code.kind is ReasonKind.ARGUMENT
    assert decision.choice.tier < Tier.TUNED


@pytest.mark.parametrize(
    ("name", "dtype", "native"),
    [
        ("mi350x", "fp8_e4m3fn", "v_mfma_f32_32x32x16_fp8_fp8"),
        ("mi300x", "fp8_e4m3fnuz", "v_mfma_f32_32x32x16_fp8_fp8"),
    ],
)
def test_compiler_trap_fnuz_is_for_gfx942_only(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, native: str
) -> None:
    """On gfx950 the fnuz type is widened with a warning of the compiler alone."""
    device = profile(name)
    other = "fp8_e4m3fn" if dtype.endswith("uz") else "fp8_e4m3fnuz"
    stored(monkeypatch, "native", native, dtype)
    assert decide(device, product("fp8_block128_a8")).choice.name == "amd.gemm.triton"
    # Code for the other encoding is no evidence for this architecture, native or not.
    stored(monkeypatch, "native", native, other)
    decision = decide(device, product("fp8_block128_a8"))
    assert reasons(decision, "triton")["machine code of gemm.fp8_block"].found == "no evidence"
    stored(monkeypatch, "emulated", "v_mfma_f32_32x32x8_f16", dtype)
    assert decide(device, product("fp8_block128_a8")).choice.name == "amd.gemm.triton_widened"
