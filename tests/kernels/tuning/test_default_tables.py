"""The table of default configurations: read as it is meant, and refused where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hal_kernels.gemm
from hal.errors import SettingsError
from hal_kernels.tuning.default_tables import load_default_tables

TABLE = Path(str(hal_kernels.gemm.__file__)).with_name("triton_configs.json")


def test_the_table_of_products_is_sound_and_whole() -> None:
    tables = load_default_tables(TABLE)
    assert tables == json.loads(TABLE.read_text())
    for kernel, found in tables.items():
        assert {"cuda", "hip"} <= found.keys(), kernel
        # Wide tiles are for those whose registers hold them: others have none.
        assert kernel == "gemm" or not any("wide" in names for names in found.values())
        names = {frozenset(names) - {"wide"} for names in found.values()}
        assert len(names) == 1, f"{kernel}: an architecture lacks a configuration of another"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("many", r"gemm\.cuda\.large\.num_warps"),
        (3, "power of two of warps"),
        (None, r"gemm\.cuda\.large"),
        (-1, r"gemm\.cuda\.large"),
    ],
)
def test_a_wrong_value_is_an_error_at_its_place(value: Any, place: str, tmp_path: Path) -> None:
    document = json.loads(TABLE.read_text())
    document["gemm"]["cuda"]["large"]["num_warps"] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SettingsError, match=place) as raised:
        load_default_tables(path)
    assert str(path) in str(raised.value)


def test_a_table_of_an_unknown_architecture_or_with_commas_behind_is_refused(
    tmp_path: Path,
) -> None:
    document = json.loads(TABLE.read_text())
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document | {"gemm": document["gemm"] | {"volta": {}}}))
    with pytest.raises(SettingsError, match="volta"):
        load_default_tables(path)
    path.write_text(TABLE.read_text().replace("}", ",}", 1))
    with pytest.raises(SettingsError, match="JSONDecodeError"):
        load_default_tables(path)
