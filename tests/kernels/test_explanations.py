"""The reasons of cells that are not native: each is of a cell that there is, and wrong ones are
named with their place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hal.errors import SettingsError
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.evidence import (
    Evidence,
    read_evidence,
    stored_evidence,
    write_evidence,
)
from hal_kernels.aot.evidence_tables import print_overview
from hal_kernels.aot.explanations import Explanation, explanations, find_explanation
from hal_kernels.aot.targets import find_target
from hal_kernels.located_documents import read_document


def test_every_reason_is_that_of_a_cell() -> None:
    found = [
        find_explanation(stored.kernel, variant)
        for stored in stored_evidence()
        for variant in stored.variants
    ]
    unused = [reason.text for reason in explanations() if reason not in found]
    assert not unused, "remove what explains nothing any more"


def test_emulated_code_spills_nothing() -> None:
    """What is emulated is slow enough, and no candidate may call it tuned."""
    spilling = [
        f"{stored.kernel} {variant.target} {variant.config}: {variant.spills} words"
        for stored in stored_evidence()
        for variant in stored.variants
        if variant.tier == "emulated" and variant.spills
    ]
    assert not spilling


def test_the_overview_says_what_spills(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kernel, target = find_kernel("gemm.fp8_widened"), find_target("gfx1100")
    found = read_evidence(kernel.name, target.arch)
    assert found is not None
    first, *others = found.variants
    spilling = dataclasses.replace(first, spills=3)
    write_evidence(dataclasses.replace(found, variants=(spilling, *others)), tmp_path)
    print_overview([kernel], [target], tmp_path)
    assert "1 of them spill" in " ".join(capsys.readouterr().out.split())


def test_a_reason_covers_its_kernels_targets_dtypes_and_tier_only() -> None:
    reason = Explanation(
        kernels=["gemm.*"], targets=["sm_80"], dtypes=["fp8_*"], configs=["g128*"],
        tier="emulated", cause="instruction set", text="x" * 20, source="y" * 10,
    )  # fmt: skip
    cell = Evidence(target="sm_80", dtype="fp8_e4m3fn", config="g128-small", tier="emulated")
    assert reason.covers("gemm.fp8_block", cell)
    assert not reason.covers("grouped_gemm.fp8_block", cell)
    for change in (
        {"target": "sm_89"},
        {"dtype": "bfloat16"},
        {"config": "g32"},
        {"tier": "spilled"},
    ):
        fields = {"target": "sm_80", "dtype": "fp8_e4m3fn", "config": "g128", "tier": "emulated"}
        other = Evidence(**(fields | change))  # type: ignore[arg-type]
        assert not reason.covers("gemm.fp8_block", other)
    of_spills = reason.model_copy(update={"spills": True})
    assert not of_spills.covers("gemm.fp8_block", cell)
    assert of_spills.covers("gemm.fp8_block", dataclasses.replace(cell, spills=1))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"cause": "bad luck"}, "cause"),
        ({"text": "no"}, "text"),
        ({"source": ""}, "source"),
        ({"targets": []}, "targets"),
        ({"tier": "golden"}, "tier"),
        ({"where": "here"}, "where"),
    ],
)
def test_a_wrong_reason_is_an_error_at_its_place(
    change: dict[str, object], place: str, tmp_path: Path
) -> None:
    path = tmp_path / "reason.json"
    path.write_text(json.dumps(explanations()[0].model_dump() | change))
    with pytest.raises(SettingsError, match=rf"at {place}") as raised:
        read_document(Explanation, path)
    assert str(path) in str(raised.value)
