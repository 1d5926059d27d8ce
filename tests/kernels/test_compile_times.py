"""Compile times are kept beside the machine and not in the evidence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hal.errors import SettingsError
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.cli import kernels_document
from hal_kernels.aot.compile_times import (
    CompileTimes,
    compile_times_path,
    load_compile_times,
    save_compile_times,
    variant_name,
)
from hal_kernels.aot.evidence import Evidence, read_evidence
from hal_kernels.aot.evidence_tables import print_evidence
from hal_kernels.aot.explanations import explain
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.triton_versions import store_of

KERNEL, TARGET = "grouped_gemm.mxfp4", "gfx90a"


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def kept(**seconds: float) -> None:
    save_times(KERNEL, TARGET, "3.9.0", seconds)


def save_times(kernel: str, target: str, triton: str, seconds: dict[str, float]) -> None:
    stored = read_evidence(kernel, target, store_of(triton))
    assert stored is not None
    times = CompileTimes(source=stored.source_hash, triton=triton, seconds=seconds)
    save_compile_times(kernel, target, times)


def test_times_of_this_machine_are_shown_and_no_part_of_the_evidence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, target = find_kernel(KERNEL), find_target(TARGET)
    bare = kernels_document([kernel], [target])["kernels"][0]["evidence"]
    assert {variant["compile_s"] for variant in bare} == {None}
    kept(**{"fp8_e4m3fn small": 12.25})
    timed = kernels_document([kernel], [target])["kernels"][0]["evidence"]
    assert [v["compile_s"] for v in timed if v["config"] == "small"] == [12.25]
    assert "compile_s" not in {field.name for field in dataclasses.fields(Evidence)}
    monkeypatch.setenv("COLUMNS", "100")
    print_evidence([kernel], [target])
    out = capsys.readouterr().out
    assert "12.2" in out
    assert max(map(len, out.splitlines())) <= 100


def test_times_of_another_source_are_none() -> None:
    kept(a=1.0)
    assert load_compile_times(KERNEL, TARGET, source="0" * 16, triton="3.9.0") == {}
    assert load_compile_times(KERNEL, "sm_90", source="0" * 16, triton="3.9.0") == {}


def test_times_of_two_compilers_are_kept_apart() -> None:
    kernel, target = find_kernel("collective.all_gather"), find_target("sm_90")
    for version, seconds in (("3.9.0", 12.25), ("3.6.0", 7.5)):
        stored = read_evidence(kernel.name, target.arch, store_of(version))
        assert stored is not None
        first = stored.variants[0]
        name = variant_name(first.dtype, first.config)
        save_times(kernel.name, target.arch, version, {name: seconds})

    def shown(version: str) -> set[float | None]:
        document = kernels_document([kernel], [target], store_of(version))
        found = document["kernels"][0]["evidence"]
        return {v["compile_s"] for v in found} - {None}

    assert shown("3.9") == {12.25}
    assert shown("3.6") == {7.5}
    # A corrected release compiles as its minor version does, as evidence has it.
    assert compile_times_path(KERNEL, TARGET, "3.6.1") == compile_times_path(
        KERNEL, TARGET, "3.6.0"
    )


def test_a_damaged_file_is_named(cache_home: Path) -> None:
    kept(a=1.0)
    path = compile_times_path(KERNEL, TARGET, "3.9.0")
    for text in ("{", '{"source": 1}', path.read_text().replace("1.0", "-1.0")):
        path.write_text(text)
        with pytest.raises(SettingsError, match=KERNEL):
            load_compile_times(KERNEL, TARGET, source="0" * 16, triton="3.9.0")


def test_a_cell_that_is_not_native_is_explained_where_it_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernel, target = find_kernel(KERNEL), find_target(TARGET)
    found = kernels_document([kernel], [target])["kernels"][0]["evidence"]
    assert all("instruction set" in variant["explanation"] for variant in found)
    assert all(variant["occupancy"]["warps"] > 0 for variant in found)
    print_evidence([kernel], [target])
    assert "emulated (instruction set)" in " ".join(capsys.readouterr().out.split())
    strange = Evidence(target=TARGET, dtype="", config="a", tier="scalar")
    assert "nobody has explained it" in str(explain(KERNEL, strange))
    native = dataclasses.replace(strange, tier="native")
    assert explain(KERNEL, native) is None
