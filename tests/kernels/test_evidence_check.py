"""`hal kernels check` with stores that are damaged, foreign, older or cannot be written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from absent_plans import plan, profile
from gpu_devices import gpu
from hal.errors import PlanError
from hal_kernels.aot import compiling, source_state, triton_versions
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.checking import check_kernel
from hal_kernels.aot.cli import kernels_document
from hal_kernels.aot.evidence import (
    KernelEvidence,
    evidence_path,
    read_evidence,
    write_evidence,
)
from hal_kernels.aot.evidence_tables import print_evidence, print_overview
from hal_kernels.aot.limits import evidence_caveat
from hal_kernels.aot.source_state import outdated
from hal_kernels.aot.targets import find_target

KERNEL, ARCH = "embedding.gather", "sm_120"


def evidence() -> KernelEvidence:
    found = read_evidence(KERNEL, ARCH)
    assert found is not None
    return dataclasses.replace(
        found, source_hash=find_kernel(KERNEL).source_hash(find_target(ARCH))
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled; the result is what is stored of the project."""
    names: list[str] = []

    def compile_kernel(kernel: object, *_: object, **__: object) -> KernelEvidence:
        names.append(getattr(kernel, "name", ""))
        return evidence()

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    return names


def check(store: Path, *, update: bool = False, changed: bool = False) -> str:
    read_evidence.cache_clear()
    return check_kernel(
        find_kernel(KERNEL), find_target(ARCH), store, update=update, changed=changed
    )


Damage = Callable[[dict[str, object], dict[str, object]], None]
DAMAGES: dict[str, Damage] = {
    "another kernel": lambda document, _: document.update(kernel="gemm.dense"),
    "another target": lambda document, _: document.update(target="sm_90"),
    "a variant of another target": lambda _, variant: variant.update(target="sm_90"),
    "no variants": lambda document, _: document.update(variants=[]),
    "twice": lambda document, variant: document.update(variants=[variant, variant]),
    "negative": lambda _, variant: variant.update(spills=-3),
    "a number of nothing": lambda _, variant: variant.update(shared_bytes=10**400),
    "native and spills": lambda _, variant: variant.update(spills=9),
    "spilled without spills": lambda _, variant: variant.update(tier="spilled"),
    "error without a message": lambda _, variant: variant.update(tier="error"),
    "a message without an error": lambda _, variant: variant.update(error="ptxas"),
}


def test_a_block_that_no_multiprocessor_holds_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = evidence().variants
    variants = (dataclasses.replace(first, shared_bytes=224 << 10), *others)
    found = dataclasses.replace(evidence(), variants=variants)
    monkeypatch.setattr(compiling, "compile_kernel", lambda *_, **__: found)
    for update in (True, False):
        assert "no block fits, by shared memory: 224 KiB" in check(tmp_path, update=update)
    capsys.readouterr()
    read_evidence.cache_clear()
    print_evidence([find_kernel(KERNEL)], [find_target(ARCH)], tmp_path)
    assert "no block fits" in capsys.readouterr().out


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_no_machine_code_says_is_refused_and_can_be_made_anew(
    damage: Damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_evidence(evidence(), tmp_path)
    document = json.loads(path.read_text())
    damage(document, document["variants"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=rf"--kernel {KERNEL} --target {ARCH} --update"):
        check(tmp_path)
    assert check(tmp_path, update=True) == ""
    assert "is replaced" in capsys.readouterr().out
    read_evidence.cache_clear()
    assert read_evidence(KERNEL, ARCH, tmp_path) == evidence()


def test_differences_are_named_and_an_update_stores_them(
    compiled: list[str], tmp_path: Path
) -> None:
    assert "nothing is stored" in check(tmp_path)
    assert check(tmp_path, update=True) == ""
    assert check(tmp_path) == ""
    assert len(compiled) == 3
    assert check(tmp_path, changed=True) == ""
    assert len(compiled) == 3  # the source is the same
    write_evidence(dataclasses.replace(evidence(), source_hash="0" * 16), tmp_path)
    assert "source 0000000000000000, now" in check(tmp_path, changed=True)


def test_a_store_that_cannot_be_written_is_named_before_the_work(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PlanError, match="cannot be"):
        check(tmp_path / "store", update=True)
    assert not compiled
    monkeypatch.undo()
    evidence_path(KERNEL, ARCH, tmp_path).mkdir(parents=True)
    with pytest.raises(PlanError, match="move it away"):
        check(tmp_path, update=True)
    assert not compiled
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="a place that can be written"):
        write_evidence(evidence(), tmp_path / "file")


def test_compile_times_that_cannot_be_kept_hide_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_kernel(*_: object, seconds: dict[str, float], **__: object) -> KernelEvidence:
        seconds["a"] = 1.0
        return evidence()

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert check(tmp_path, update=True) == ""
    out = capsys.readouterr().out
    assert "native" in out
    assert "compile times are not kept" in out
    assert evidence_path(KERNEL, ARCH, tmp_path).exists()


def test_evidence_of_another_source_is_said_wherever_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel, target = find_kernel(KERNEL), find_target(ARCH)
    device = gpu(ARCH)
    monkeypatch.setattr(source_state, "_hash_now", lambda *_: evidence().source_hash)
    assert outdated(evidence()) == ""
    monkeypatch.setattr(source_state, "_hash_now", lambda *_: "0" * 16)
    assert "made from another source" in evidence_caveat(KERNEL, device)
    (shown,) = kernels_document([kernel], [target])["kernels"]
    assert all("another source" in variant["outdated"] for variant in shown["evidence"])
    print_evidence([kernel], [target])
    print_overview([kernel], [target])
    out = " ".join(capsys.readouterr().out.split())
    assert "made from another source" in out
    assert "the source is another one now" in out


def test_where_there_is_no_evidence_it_is_said_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_evidence([find_kernel("gemm.mxfp8")], [find_target("sm_80")])
    assert "gemm.mxfp8 on sm_80: not meant for" in capsys.readouterr().out
    print_evidence([find_kernel(KERNEL)], [find_target(ARCH)], tmp_path)
    assert "no evidence is stored" in capsys.readouterr().out


def test_a_plan_names_the_damaged_file_and_not_the_plug_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damaged(kernel: str, target: str, *rest: Path) -> KernelEvidence | None:
        if kernel == KERNEL:
            raise PlanError(f"kernel evidence {kernel}.json of {target}", "a", "b", "c")
        return read_evidence(kernel, target, *rest)

    monkeypatch.setattr(triton_versions, "read_evidence", damaged)
    with pytest.raises(PlanError) as raised:
        plan("qwen3-30b-a3b", profile("rtx-pro-6000-blackwell-server"), 1)
    assert raised.value.who == f"kernel evidence {KERNEL}.json of {ARCH}"
