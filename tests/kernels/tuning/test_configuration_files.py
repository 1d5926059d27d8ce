"""Files of configurations that no kernel can be launched with are refused, with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hal.errors import SettingsError
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.store import PACKAGED, configuration_path, load_configurations

DEVICE, KERNEL = "rtx-pro-6000-blackwell-ws", "grouped_gemm.mxfp4"
PACKAGED_FILE = PACKAGED / DEVICE / f"{KERNEL}.json"


def trial() -> dict[str, Any]:
    document = json.loads(PACKAGED_FILE.read_text())
    found: dict[str, Any] = document["entries"][0]["trials"][0]
    return found


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BLOCK_N", 0, "BLOCK_N of 1 to"),
        ("BLOCK_N", 3, "power of two of BLOCK_N"),
        ("BLOCK_N", 1 << 20, "BLOCK_N of 1 to"),
        ("GROUP_M", 0, "GROUP_M of 1 to"),
        ("num_stages", 0, "num_stages of 1 to"),
        ("num_stages", 64, "num_stages"),
        ("num_warps", 3, "power of two of warps"),
        ("block", 16, "capitals"),
    ],
)
def test_constants_that_no_launch_takes(name: str, value: int, said: str, tmp_path: Path) -> None:
    document = json.loads(PACKAGED_FILE.read_text())
    document["entries"][0]["trials"][0]["configuration"][name] = value
    path = configuration_path(tmp_path, DEVICE, KERNEL)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    with pytest.raises(SettingsError, match=said) as raised:
        load_configurations(path)
    assert str(path) in raised.value.who


def test_what_contradicts_itself() -> None:
    good = trial()
    assert Trial.model_validate(good).tier == "native"
    with pytest.raises(ValueError, match="no spills of a native trial, found 5"):
        Trial.model_validate(good | {"spills": 5})
    with pytest.raises(ValueError, match="no time of what does not compile"):
        Trial.model_validate(good | {"tier": "error", "us": 3.0})
