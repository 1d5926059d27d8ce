"""Loads of less than 16 bytes: each variant that has no wider one says why, and each reason is of a
variant that there is, and can be true of it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from fresh_draws import fresh_seeds
from hal.errors import SettingsError
from hal_kernels.aot.catalogue import CATALOGUE, find_kernel
from hal_kernels.aot.cli import kernels_document
from hal_kernels.aot.evidence import Evidence, stored_evidence
from hal_kernels.aot.evidence_tables import print_evidence
from hal_kernels.aot.narrow_loads import (
    WIDE_BYTES,
    NarrowLoad,
    explain_narrow_load,
    find_narrow_load,
    is_narrow,
    narrow_loads,
)
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.located_documents import read_document
from load_tiles import load_tiles, tiles_of

CELL = Evidence(
    target="gfx942", dtype="", config="h1024-plain", tier="native", num_warps=4,
    widest_load_bytes=8,
)  # fmt: skip


def narrow() -> list[tuple[str, Evidence]]:
    return [
        (stored.kernel, variant)
        for stored in stored_evidence()
        for variant in stored.variants
        if is_narrow(variant)
    ]


def test_every_variant_without_a_load_of_16_bytes_is_explained() -> None:
    unexplained = [
        f"{kernel} {found.dtype} {found.config} on {found.target}: {found.widest_load_bytes}"
        for kernel, found in narrow()
        if find_narrow_load(kernel, found) is None
    ]
    assert not unexplained, "mend the kernel, or say in aot/narrow_loads.json why:\n" + "\n".join(
        unexplained
    )


def test_every_reason_is_that_of_a_variant() -> None:
    used = [find_narrow_load(kernel, found) for kernel, found in narrow()]
    unused = [reason.text for reason in narrow_loads() if reason not in used]
    assert not unused, "remove what explains nothing any more"
    for reason in narrow_loads():
        covered = [cell for cell, first in zip(narrow(), used, strict=True) if first == reason]
        for kernel in reason.kernels:
            assert any(kernel == name for name, _ in covered), f"{kernel}: {reason.text}"
        for target in reason.targets:
            assert any(target == found.target for _, found in covered), f"{target}: {reason.text}"
        widths = {found.widest_load_bytes for _, found in covered}
        assert widths == set(reason.widths), reason.text


def test_a_tile_that_is_the_reason_is_smaller_than_16_bytes_a_thread() -> None:
    checked = 0
    for kernel, found in narrow():
        reason = find_narrow_load(kernel, found)
        if reason is None or reason.tile_bytes is None:
            continue
        threads = found.num_warps * find_target(found.target).warp_size
        told = f"{kernel} {found.config} on {found.target}: {threads} threads"
        assert reason.tile_bytes < WIDE_BYTES * threads, told
        checked += 1
    assert checked > 100


@pytest.mark.parametrize("seed", fresh_seeds(2, "narrow loads"))
def test_a_program_reads_no_more_at_once_than_its_reason_says(seed: int) -> None:
    """Of a reason and a variant that are drawn, by the compiler's intermediate code."""
    chooser = random.Random(seed)
    reason = chooser.choice([reason for reason in narrow_loads() if reason.tile_bytes])
    covered = [(k, v) for k, v in narrow() if find_narrow_load(k, v) == reason]
    kernel, found = chooser.choice(covered)
    where = f"{kernel} {found.config} on {found.target}"
    # Where weights alone are quantised, float16 is that of scales, which are read for each value.
    scales = "f16" if kernel.endswith("weight_only") else ""
    read = [size for size, kind in load_tiles(kernel, found.target, found.config) if kind != scales]
    assert read, where
    assert max(read) <= (reason.tile_bytes or 0), where


def test_tiles_are_read_from_intermediate_code() -> None:
    code = """
      %0 = tt.load %p, %m : tensor<16x64x!tt.ptr<bf16>, #blocked>
      %1 = ttg.async_copy_global_to_local %q, %b : tensor<64x32x!tt.ptr<f8E4M3FN>, #l> -> <64x32x>
      %2 = amdg.buffer_load %s[%o] stride = %n : !tt.ptr<f32> -> tensor<512xf32, #blocked>
      %3 = tt.load %t : !tt.ptr<i32>
      tt.store %u, %v : tensor<4096x!tt.ptr<bf16>, #blocked>
    """
    wanted = [(2048, "bf16"), (2048, "f8E4M3FN"), (2048, "f32"), (4, "i32")]
    assert tiles_of(code) == wanted


def test_it_is_shown_beside_the_machine_code(capsys: pytest.CaptureFixture[str]) -> None:
    kernel, target = find_kernel("kv_write.fp4"), find_target("gfx942")
    print_evidence([kernel], [target])
    shown = " ".join(capsys.readouterr().out.split())
    assert "loads of 4 bytes at most (tile): a row has 128 values of 16 bits" in shown
    for one in kernels_document(list(CATALOGUE.values()), list(TARGETS))["kernels"]:
        for found in one["evidence"]:
            is_wide = found["widest_load_bytes"] in (0, WIDE_BYTES)
            assert (found["narrow_load"] is None) == is_wide, one["name"]


def test_a_reason_covers_its_kernels_targets_configurations_and_widths_only() -> None:
    reason = NarrowLoad(
        kernels=["norm.*"], targets=["gfx942"], configs=["h1024-*"], widths=[8],
        cause="tile", tile_bytes=2048, text="x" * 20,
    )  # fmt: skip
    assert reason.covers("norm.rms", CELL)
    assert not reason.covers("layer_norm.rows", CELL)
    for change in ({"target": "sm_90"}, {"config": "h512-plain"}, {"widest_load_bytes": 4}):
        assert not reason.covers("norm.rms", dataclasses.replace(CELL, **change))


def test_what_nobody_explained_says_so() -> None:
    wide = dataclasses.replace(CELL, widest_load_bytes=16)
    odd = dataclasses.replace(CELL, config="odd", widest_load_bytes=2)
    assert explain_narrow_load("norm.rms", wide) is None
    assert explain_narrow_load("norm.rms", odd) == (
        "loads of 2 bytes at most: nobody has explained it"
    )
    told = explain_narrow_load("norm.rms", odd, reference=wide)
    assert told is not None
    assert "triton 3.9 loads 16 by the same source" in told
    refused = dataclasses.replace(odd, tier="error", error="no", widest_load_bytes=0)
    assert explain_narrow_load("norm.rms", refused) is None


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"cause": "bad luck"}, "cause"),
        ({"widths": [16]}, "widths"),
        ({"text": "no"}, "text"),
        ({"tile_bytes": None}, "the document: Value error, required tile_bytes"),
        ({"cause": "tail"}, "the document: Value error, required tile_bytes"),
    ],
)
def test_a_wrong_reason_is_an_error_at_its_place(
    change: dict[str, object], place: str, tmp_path: Path
) -> None:
    path = tmp_path / "load.json"
    first = next(reason for reason in narrow_loads() if reason.cause == "tile")
    path.write_text(json.dumps(first.model_dump() | change))
    with pytest.raises(SettingsError, match=rf"at {place}"):
        read_document(NarrowLoad, path)
