"""Stored evidence is what the compiler says: hashes of sources cannot show that a number was
edited, or stored of other code. Compiling all takes hours, so each run draws some anew: the seeds
are in the tests' names, and `HALSTACK_TEST_SEED`, which heads every run, draws the same again."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fresh_draws import fresh_seeds
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.cli import differences
from hal_kernels.aot.compiling import compile_kernel
from hal_kernels.aot.evidence import Evidence, KernelEvidence, stored_evidence
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.triton_versions import store_of
from hal_kernels.tuning.store import triton_version

SEEDS = fresh_seeds(2, "evidence")  # of each back end; a drawn one takes 3 to 15 s


def drawn(backend: str, seed: int) -> KernelEvidence:
    """One configuration of one kernel on one architecture of a back end, as it is stored."""
    chooser = random.Random(seed)
    stored = chooser.choice(
        [
            found
            for found in stored_evidence(store_of(triton_version()))
            if find_target(found.target).backend == backend and found.variants
        ]
    )
    config = chooser.choice(stored.variants).config
    variants = tuple(variant for variant in stored.variants if variant.config == config)
    return dataclasses.replace(stored, variants=variants)


def unlike(stored: KernelEvidence, found: KernelEvidence) -> str:
    """What is stored and not so: all of it where the compiler is the same to the last number, what
    decides where it is another patch of the version. "" if nothing is."""
    difference = differences(stored, found)
    if difference or found.triton != stored.triton:
        return difference
    return "; ".join(
        f"{config} {field}: {before!r}, now {now!r}"
        for config, field, before, now in _fields(stored.variants, found.variants)
        if before != now
    )


def _fields(
    stored: tuple[Evidence, ...], found: tuple[Evidence, ...]
) -> list[tuple[str, str, object, object]]:
    """(configuration, field, before, now), but the bytes of code, in which AMD's have padding."""
    return [
        (before.config, field.name, getattr(before, field.name), getattr(now, field.name))
        for before, now in zip(stored, found, strict=True)
        for field in dataclasses.fields(Evidence)
        if field.name != "code_bytes"
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_variant_that_is_drawn_compiles_to_what_is_stored(backend: str, seed: int) -> None:
    stored = drawn(backend, seed)
    kernel, target = find_kernel(stored.kernel), find_target(stored.target)
    found = compile_kernel(kernel, target, only=stored.variants[0].config)
    where = f"{stored.kernel} {stored.target} {stored.variants[0].config}"
    difference = unlike(stored, found)
    assert not difference, f"{where}: {difference}; run: hal kernels check --update"


@pytest.mark.parametrize(
    "field",
    [
        "registers",
        "spills",
        "instruction_count",
        "shared_bytes",
        "num_warps",
        "widest_load_bytes",
    ],
)
def test_a_number_that_was_edited_is_seen(field: str) -> None:
    stored = drawn("cuda", SEEDS[0])
    first = stored.variants[0]
    edited = dataclasses.replace(first, **{field: getattr(first, field) + 1})
    other = dataclasses.replace(stored, variants=(edited, *stored.variants[1:]))
    assert not unlike(stored, stored)
    assert field in unlike(other, stored) or differences(other, stored)
    assert unlike(other, dataclasses.replace(stored, triton="0.0")) == differences(other, stored)
