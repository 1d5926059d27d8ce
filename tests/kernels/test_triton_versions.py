"""Which Triton's machine code speaks for the one that is installed, and that it is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import MappingProxyType

import pytest
from packaging.version import InvalidVersion, Version

from absent_plans import PLAIN, plan, profile
from gpu_devices import gpu
from hal.errors import UsageError
from hal.kernel_uses import planned_uses
from hal.plan import Plan
from hal.reasons import ReasonKind
from hal_kernels.aot import cli, triton_versions
from hal_kernels.aot.evidence import (
    STORE,
    Evidence,
    KernelEvidence,
    read_evidence,
    stored_evidence,
    write_evidence,
)
from hal_kernels.aot.explanations import explain
from hal_kernels.aot.leaves import matrix_instructions
from hal_kernels.aot.limits import evidence_caveat, evidence_of, evidence_reasons
from hal_kernels.aot.machine_code import has_frame, read_nvidia
from hal_kernels.aot.triton_versions import (
    REFERENCE,
    STORES,
    evidence_for,
    minor_version,
    reference_variant,
    store_of,
)

KERNEL, ARCH = "norm.rms", "sm_90"


def reference() -> KernelEvidence:
    found = read_evidence(KERNEL, ARCH)
    assert found is not None
    return found


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of 3.6."""
    stores = MappingProxyType({REFERENCE: STORE, "3.6": tmp_path})
    monkeypatch.setattr(triton_versions, "STORES", stores)
    read_evidence.cache_clear()
    return tmp_path


def spilled(store: Path, **changes: str) -> KernelEvidence:
    """The reference's evidence with all variants spilled, stored as that of 3.6."""
    found = reference()
    variants = tuple(dataclasses.replace(v, tier="spilled", spills=7) for v in found.variants)
    found = dataclasses.replace(found, triton="3.6.0", variants=variants)
    found = dataclasses.replace(found, **changes)  # type: ignore[arg-type]
    write_evidence(found, store)
    read_evidence.cache_clear()
    return found


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("3.6.0", "3.6"), ("3.6.0+git1a2b3c", "3.6"), ("3.10.1", "3.10"), ("4", "4.0"),
        ("3.9.0rc1", "3.9"), ("", ""), ("main", ""),
    ],
)  # fmt: skip
def test_versions_are_told_by_two_numbers(version: str, minor: str) -> None:
    assert minor_version(version) == minor


@pytest.mark.parametrize(
    "version",
    [
        "3.6", "3", "3.6.0", "v3.6.0", "1!3.6", " 3.6.0 ", "03.06", "3.10.0.1", "3.6.0+git1a2b",
        "3.6.0+git.1-a_b", "3.6.0.post1", "3.6.0-1", "3.6r4", "3.6rc1", "3.6.0RC1", "3.7a",
        "3.7.0.dev20260101", "3.7.0rc2.post3.dev4+cu13", "3.6.0-beta.2", "3.6pre", "3.6.0c1",
        "main", "", "3.6.x", "3.6+", "3.6.0+git+b", "3..6", "3.6 0", "3.6.0.post1.rc1", "-3.6",
    ],
)  # fmt: skip
def test_versions_are_read_as_packaging_reads_them(version: str) -> None:
    """Which the kernels do without."""
    try:
        release = Version(version).release
    except InvalidVersion:
        assert minor_version(version) == ""
    else:
        assert minor_version(version) == ".".join(map(str, (*release, 0)[:2]))


@pytest.mark.parametrize("installed", ["", "3.9.0", "3.9.7"])
def test_the_reference_speaks_for_itself_and_where_nothing_is_installed(installed: str) -> None:
    found = evidence_for(KERNEL, ARCH, installed)
    assert found.evidence == reference()
    assert found.caveat == ""


@pytest.mark.parametrize("installed", ["3.7.1", "3.10.0", "main"])
def test_another_version_is_told_whose_code_it_is(installed: str) -> None:
    found = evidence_for(KERNEL, ARCH, installed)
    assert found.evidence == reference()
    assert found.caveat == f"made by triton {reference().triton}; {installed} is installed"
    device = dataclasses.replace(gpu(ARCH), software={"triton": installed})
    assert evidence_caveat(KERNEL, device) == found.caveat
    assert evidence_for(KERNEL, "sm_999", installed).caveat == ""  # there is nothing to doubt


def test_evidence_of_its_own_is_taken_while_it_is_of_the_same_source(older: Path) -> None:
    assert "3.6.2 is installed" in evidence_for(KERNEL, ARCH, "3.6.2").caveat
    own = spilled(older)
    assert evidence_for(KERNEL, ARCH, "3.6.2").evidence == own
    assert evidence_for(KERNEL, ARCH, "3.6.2").caveat == ""
    assert evidence_for(KERNEL, ARCH, "3.9.0").evidence == reference()
    spilled(older, source_hash="0" * 16)
    stale = evidence_for(KERNEL, ARCH, "3.6.2")
    assert stale.evidence == reference()
    assert f"an older source of {KERNEL}" in stale.caveat


def test_what_only_the_older_compiler_spills_is_a_matter_of_software(older: Path) -> None:
    device = dataclasses.replace(gpu(ARCH), software={"triton": "3.6.0"})
    dtype, config = reference().variants[0].dtype, reference().variants[0].config
    assert evidence_reasons(KERNEL, device, dtype=dtype, config=config) == []
    spilled(older)
    found = evidence_of(KERNEL, device, dtype, config)
    assert found is not None
    assert found.tier == "spilled"
    (reason,) = evidence_reasons(KERNEL, device, dtype=dtype, config=config)
    assert reason.kind is ReasonKind.SOFTWARE
    assert f"triton {REFERENCE}, whose code is native" in reason.required
    assert f"pip install 'triton=={REFERENCE}.*'" in reason.required
    assert "7 spills" in reason.found
    assert reason.found.endswith("by triton 3.6.0")
    for installed in ({}, {"triton": "3.9.0"}):
        other = dataclasses.replace(device, software=installed)
        assert evidence_reasons(KERNEL, other, dtype=dtype, config=config) == []


def test_a_leaf_has_the_instructions_of_the_installed_version(older: Path) -> None:
    found = read_evidence("gemm.dense", ARCH)
    assert found is not None
    only = Evidence(target=ARCH, dtype="bfloat16", config="a", tier="native", instruction="x.mma.y")
    write_evidence(dataclasses.replace(found, triton="3.6.0", variants=(only,)), older)
    read_evidence.cache_clear()
    assert "x.mma" in matrix_instructions("gemm", ARCH, "3.6.0")
    assert "x.mma" not in matrix_instructions("gemm", ARCH, "3.9.0")
    assert "x.mma" not in matrix_instructions("gemm", ARCH)


def test_a_plan_says_whose_code_it_rests_on_and_its_hash_does_not() -> None:
    def planned(triton: str) -> Plan:
        device = dataclasses.replace(profile("h200-sxm"), software={**PLAIN, "triton": triton})
        return plan("qwen3-30b-a3b", device, 1)

    found = planned("3.7.0")
    uses = [use for op in found.ops for use in planned_uses(op)]
    assert uses
    assert all("3.7.0 is installed" in use.caveat for use in uses if use.code)
    (note,) = [note for note in found.notes if "machine code of " in note]
    assert "made by triton 3.9.0; 3.7.0 is installed" in note
    assert "nvidia.norm.rms.triton" in note
    current = planned("3.9.0")
    assert not any("machine code of " in note for note in current.notes)
    assert not any(use.caveat for op in current.ops for use in planned_uses(op))


def test_evidence_is_kept_of_supported_versions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_of("3.9.0") == STORE
    assert store_of("3.6.0") == STORES["3.6"] != STORE
    monkeypatch.setattr(cli, "triton_version", lambda: "3.7.0")
    with pytest.raises(UsageError, match=r"3\.9, 3\.6") as raised:
        cli.check_kernels(["norm.rms"], ["sm_90"])
    assert raised.value.found == "3.7.0"


def test_what_another_version_does_worse_is_explained_by_the_comparison(older: Path) -> None:
    own = spilled(older)
    for variant in own.variants:
        text = explain(KERNEL, variant, reference_variant(own, variant))
        assert text == f"spilled (compiler): triton {REFERENCE} compiles the same source as native"
    assert reference_variant(reference(), reference().variants[0]) is None
    stale = spilled(older, source_hash="0" * 16)
    assert reference_variant(stale, stale.variants[0]) is None


def test_the_list_is_of_the_version_that_is_asked_for(older: Path, tmp_path: Path) -> None:
    spilled(older)
    path = tmp_path / "list.json"
    tiers = {}
    for version in ("3.9", "3.6.0"):
        cli.list_kernels([KERNEL], [ARCH], path, version)
        (kernel,) = json.loads(path.read_text())["kernels"]
        tiers[version] = {cell["tier"] for cell in kernel["evidence"]}
    assert tiers == {"3.9": {"native"}, "3.6.0": {"spilled"}}
    for version in ("abc", "3.8", ""):
        with pytest.raises(UsageError, match="name one of them"):
            cli.list_kernels([KERNEL], [ARCH], path, version)


@pytest.mark.parametrize("version", sorted(set(STORES) - {REFERENCE}))
def test_every_supported_version_compiles_what_the_reference_does(version: str) -> None:
    """What it does worse is explained; that it is current is checked where it is installed."""
    found = list(stored_evidence(STORES[version]))
    assert found
    for kernel in found:
        assert minor_version(kernel.triton) == version
        for variant in kernel.variants:
            better = reference_variant(kernel, variant)
            if variant.tier == "error" and better is not None:
                assert better.tier == "error", f"{kernel.kernel} {variant}"


def test_a_frame_that_nothing_touches_spills_nothing() -> None:
    usage = " Function k:\n  REG:33 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:584\n"
    assert has_frame(usage)
    assert not has_frame(usage.replace("STACK:8", "STACK:0"))
    assert read_nvidia("", usage, 1).spills == 2  # nobody looked
    assert read_nvidia("", usage, 1, "  /*0010*/  STL [R1], R0 ;\n").spills == 2
    assert read_nvidia("", usage, 1, "  /*0010*/  LDL.LU R77, [R1] ;\n").spills == 2
    assert read_nvidia("", usage, 1, "  /*0010*/  STG.E [R2.64], R0 ;\n").spills == 0
