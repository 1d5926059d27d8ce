"""Stored evidence is what the compiler says: hashes of sources cannot show that a number was
edited, or stored of other code. Compiling all takes hours, so each run draws some anew."""

from __future__ import annotations

import dataclasses
import random

import pytest

from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.cli import differences
from hal_kernels.aot.compiling import compile_kernel
from hal_kernels.aot.evidence import Evidence, KernelEvidence, stored_evidence
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.triton_versions import store_of
from hal_kernels.tuning.store import triton_version


def drawn(backend: str) -> KernelEvidence:
    """One configuration of one kernel on one architecture of a backend, as it is stored."""
    stored = random.choice(
        [
            found
            for found in stored_evidence(store_of(triton_version()))
            if find_target(found.target).backend == backend and found.variants
        ]
    )
    config = random.choice(stored.variants).config
    variants = tuple(variant for variant in stored.variants if variant.config == config)
    return dataclasses.replace(stored, variants=variants)


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_variant_that_is_drawn_compiles_to_what_is_stored(backend: str) -> None:
    stored = drawn(backend)
    kernel, target = find_kernel(stored.kernel), find_target(stored.target)
    found = compile_kernel(kernel, target, only=stored.variants[0].config)
    where = f"{stored.kernel} {stored.target} {stored.variants[0].config}"
    difference = differences(stored, found)
    assert not difference, f"{where}: {difference}; run: hal kernels check --update"
    if found.triton == stored.triton:
        assert plain(found) == plain(stored), where


def plain(evidence: KernelEvidence) -> list[Evidence]:
    """All that is stored of the variants but the bytes of code, in which AMD's have padding."""
    return [dataclasses.replace(variant, code_bytes=0) for variant in evidence.variants]


def test_a_number_that_was_edited_is_a_difference() -> None:
    stored = drawn("cuda")
    edited = dataclasses.replace(stored.variants[0], spills=stored.variants[0].spills + 3)
    if stored.variants[0].spills:
        edited = dataclasses.replace(edited, spills=0)
    other = dataclasses.replace(stored, variants=(edited, *stored.variants[1:]))
    assert differences(stored, other)
