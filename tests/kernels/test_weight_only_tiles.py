"""Tiles of products with integer weights: which entry of the table a form takes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import hal_kernels.gemm.weight_only_variants as variants
from hal_kernels.aot.evidence import stored_evidence
from hal_kernels.aot.targets import TARGETS, Target
from hal_kernels.gemm.weight_only_variants import WEIGHT_FORMS, weight_only_tiles

FORMS = {name: form for name, form in WEIGHT_FORMS.items() if form.kind > 2}
SIZES = ("large", "small")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_every_form_has_tiles_whose_steps_and_groups_divide(target: Target) -> None:
    for name, size, is_gated in itertools.product(FORMS, SIZES, (False, True)):
        tiles = weight_only_tiles(target, name, size, is_gated=is_gated)
        group, depth = FORMS[name].group, tiles["BLOCK_K"]
        assert (tiles["BLOCK_M"] == 16) == (size == "small")
        assert not group or depth % group == 0 or group % depth == 0


def test_no_entry_of_the_table_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(variants.__file__).with_name("weight_only_configs.json")
    table = json.loads(path.read_text())["gemm_weight_only_integers"]
    marked = {
        arch: {name: {**entry, "MARK": (arch, name)} for name, entry in entries.items()}
        for arch, entries in table.items()
    }
    monkeypatch.setattr(variants, "_INTEGER_TILES", {"gemm_weight_only_integers": marked})
    used: set[object] = {
        weight_only_tiles(target, name, size, is_gated=is_gated)["MARK"]
        for target in TARGETS
        for name, size, is_gated in itertools.product(FORMS, SIZES, (False, True))
    }
    assert used == {(arch, name) for arch, entries in table.items() for name in entries}


def test_what_is_compiled_is_native_and_loads_16_bytes() -> None:
    """The tiles were chosen for it; a compiler that makes less of them is to be noticed."""
    for found in stored_evidence():
        if found.kernel == "gemm.weight_only":
            for one in found.variants:
                assert one.tier == "native", (found.target, one.config)
                assert one.widest_load_bytes == 16, (found.target, one.config)
