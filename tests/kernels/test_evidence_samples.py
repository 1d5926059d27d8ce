"""Stored evidence is what the compiler says: hashes of sources cannot show that a number was
edited, or stored of other code. Compiling all takes hours, so each run draws some anew, of all and
of what a change touches: the seeds are in the tests' names, and `HALSTACK_TEST_SEED`, which heads
every run, draws the same again."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from changed_evidence import Change, NoHistory, sources_of
from fresh_draws import fresh_seeds
from hal_kernels.aot.catalogue import CATALOGUE, find_kernel
from hal_kernels.aot.checking import differences
from hal_kernels.aot.compiling import compile_kernel
from hal_kernels.aot.evidence import (
    STORE,
    Evidence,
    KernelEvidence,
    stored_evidence,
    write_evidence,
)
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.triton_versions import store_of
from hal_kernels.tuning.store import triton_version

# Of each back end; a drawn one takes 3 to 15 s.
SEEDS = fresh_seeds(2, "evidence")
SEEDS_OF_CHANGES = fresh_seeds(4, "changed evidence")


def drawn(backend: str, seed: int) -> KernelEvidence:
    """One configuration of one kernel on one architecture of a back end, as it is stored."""
    found = one_of(tuple(stored_evidence(store_of(triton_version()))), backend, seed)
    assert found is not None
    return found


def one_of(stored: Sequence[KernelEvidence], backend: str, seed: int) -> KernelEvidence | None:
    """A configuration of those on a back end; None where there is none."""
    chooser = random.Random(seed)
    some = [e for e in stored if e.variants and find_target(e.target).backend == backend]
    if not some:
        return None
    chosen = chooser.choice(some)
    config = chooser.choice(chosen.variants).config
    variants = tuple(variant for variant in chosen.variants if variant.config == config)
    return dataclasses.replace(chosen, variants=variants)


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
    check_compiles_so(drawn(backend, seed))


@pytest.mark.parametrize("seed", SEEDS_OF_CHANGES)
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_variant_that_a_change_touches_compiles_to_what_is_stored(
    backend: str, seed: int
) -> None:
    store = store_of(triton_version())
    try:
        change = Change(Path(__file__).parent)
    except NoHistory as error:
        pytest.skip(f"no history to compare with: {error}")
    stored = one_of(tuple(change.evidence(CATALOGUE, store)), backend, seed)
    if stored is None:
        pytest.skip(f"no machine code for {backend} changed since {change.base[:12]}")
    check_compiles_so(stored)


def check_compiles_so(stored: KernelEvidence) -> None:
    """stored: the variants of one configuration, of which those that are listed are compared."""
    kernel, target = find_kernel(stored.kernel), find_target(stored.target)
    found = compile_kernel(kernel, target, only=stored.variants[0].config)
    dtypes = {variant.dtype for variant in stored.variants}
    found = dataclasses.replace(
        found, variants=tuple(v for v in found.variants if v.dtype in dtypes)
    )
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


class Repository:
    """A repository with the evidence of one kernel, committed twice."""

    kernel = "embedding.gather"

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, root / "evidence"
        self.git("init", "--quiet", "--initial-branch", "main")
        self.variants = tuple(
            Evidence(target="sm_90", dtype=dtype, config="h2048", tier="native", registers=8)
            for dtype in ("bfloat16", "float16")
        )
        for text in ("one", "two"):
            (root / "other.txt").write_text(text)
            self.write(*self.variants)
            self.commit()

    def git(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
        command = ["git", "-C", str(self.root), *who, *arguments]
        subprocess.run(command, check=True, timeout=60, env=environment)

    def write(self, *variants: Evidence) -> Path:
        found = KernelEvidence(
            kernel=self.kernel, op="embedding", target="sm_90", source_hash="0", triton="3.9",
            variants=variants,
        )  # fmt: skip
        return write_evidence(found, self.store)

    def commit(self, at: str = "2026-03-04T12:00:00Z") -> None:
        self.git("add", "--all")
        dated = {**os.environ, "GIT_COMMITTER_DATE": at, "GIT_AUTHOR_DATE": at}
        command = ("commit", "--quiet", "--no-gpg-sign", "--message", "A change")
        self.git(*command, environment=dated)

    def changed(self) -> list[str]:
        from hal_kernels.aot.evidence import read_evidence

        read_evidence.cache_clear()
        (found,) = [*Change(self.root).evidence(CATALOGUE, self.store)] or [None]
        return [] if found is None else [variant.dtype for variant in found.variants]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_an_edited_variant_is_what_a_change_touches(repository: Repository) -> None:
    assert repository.changed() == []
    first, second = repository.variants
    repository.write(first, dataclasses.replace(second, registers=9))
    assert repository.changed() == ["float16"]  # in the working tree
    repository.commit()
    assert repository.changed() == ["float16"]  # in the last commit
    (repository.root / "other.txt").write_text("three")
    repository.commit()
    assert repository.changed() == []


def test_all_of_a_day_is_compared_on_the_main_branch(repository: Repository) -> None:
    first, second = repository.variants
    repository.write(dataclasses.replace(first, registers=7), second)
    repository.commit("2026-03-06T09:00:00Z")
    for hour in ("10", "11"):
        (repository.root / "other.txt").write_text(hour)
        repository.commit(f"2026-03-06T{hour}:00:00Z")
    assert repository.changed() == ["bfloat16"]
    (repository.root / "other.txt").write_text("later")
    repository.commit("2026-03-07T12:00:00Z")
    assert repository.changed() == []


def test_all_of_a_branch_is_compared_with_where_it_left_the_main_one(
    repository: Repository,
) -> None:
    repository.git("checkout", "--quiet", "-b", "branch")
    first, second = repository.variants
    repository.write(dataclasses.replace(first, registers=7), second)
    repository.commit()
    (repository.root / "other.txt").write_text("three")
    repository.commit()
    assert repository.changed() == ["bfloat16"]


def test_a_new_hash_alone_touches_every_variant(repository: Repository) -> None:
    path = repository.write(*repository.variants)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source_hash": "1"}))
    assert repository.changed() == ["bfloat16", "float16"]


def test_where_there_is_no_history_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoHistory, match="git"):
        Change(tmp_path)


def test_every_kernel_has_its_sources_in_the_repository() -> None:
    for kernel in CATALOGUE.values():
        sources = sources_of(kernel)
        assert len(sources) == 1 + len(set(kernel.sources) - {kernel.module})
        assert all(STORE.parent in path.parents for path in sources)
