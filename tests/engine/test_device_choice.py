"""Groups, counts and software as a user writes them; which device is meant by none."""

from __future__ import annotations

from typing import Any

import pytest

from hal.device import DeviceSpec
from hal.errors import DeviceNotFoundError, SettingsError
from hal_engine.device_choice import (
    parse_count,
    parse_group,
    parse_software,
    present_device,
    present_group,
)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("mi300x", ("mi300x", None)),
        ("mi300x x8", ("mi300x", 8)),
        ("mi300x:x8", ("mi300x", 8)),
        ("0000:41:00.0", ("0000:41:00.0", None)),
        ("0000:41:00.0 x2", ("0000:41:00.0", 2)),
        (" rtx-4090  x1 ", ("rtx-4090", 1)),
        ("cpu:0", ("cpu:0", None)),
        ("", ("", None)),
    ],
)
def test_a_group_is_a_name_and_a_number(text: str, group: tuple[str, int | None]) -> None:
    assert parse_group(text) == group


@pytest.mark.parametrize("text", ["8", "x", "x0", "x65", "x-1", "x8x", "X8", "x 8", "x٣"])
def test_an_unfit_number_of_devices_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="x1 to x64"):
        parse_count(text)


def test_an_unfit_number_in_a_group_is_refused() -> None:
    with pytest.raises(SettingsError, match="x1 to x64"):
        parse_group("mi300x x900")


def test_software_is_named_with_its_version() -> None:
    assert parse_software(["flash-attn=2.8.3", "aiter = 0.1"]) == {
        "flash-attn": "2.8.3",
        "aiter": "0.1",
    }
    assert parse_software(["Flash_Attn=2.8.3+cu128"]) == {"flash-attn": "2.8.3+cu128"}
    twice = (["a=1", "a=2"], ["flash-attn=1", "flash_attn=2"])
    for bad in (["flash-attn"], ["=1"], ["a="], ["a=nonsense!!"], ["a==2"], *twice):
        with pytest.raises(SettingsError, match="NAME=VERSION"):
            parse_software(bad)


class _Registry:
    """A registry that knows specs only."""

    def __init__(self, *specs: DeviceSpec) -> None:
        self._specs = {spec.device_id: spec for spec in specs}
        self.devices = specs

    def describe(self, device_id: str) -> DeviceSpec:
        return self._specs[device_id]


def _spec(device_id: str, torch_device: str = "cpu", **attributes: str) -> DeviceSpec:
    backend = device_id.partition(":")[0]
    return DeviceSpec(
        device_id=device_id,
        vendor=backend,
        backend=backend,
        name=device_id,
        arch="",
        torch_device=torch_device,
        attributes=attributes,
    )


def test_a_second_way_to_the_same_silicon_is_used_only_where_it_is_named() -> None:
    registry: Any = _Registry(_spec("cpu:0"), _spec("opencl:0", same_silicon_as="cpu:0"))
    assert present_device(registry, "").device_id == "cpu:0"
    assert present_device(registry, "opencl:0").device_id == "opencl:0"
    spec, count = present_group(registry)
    assert (spec.device_id, count) == ("cpu:0", 1)


def test_the_only_way_to_a_silicon_is_used() -> None:
    registry: Any = _Registry(_spec("opencl:0", same_silicon_as="cpu:0"))
    assert present_device(registry, "").device_id == "opencl:0"


def test_devices_of_their_own_silicon_are_not_told_apart() -> None:
    registry: Any = _Registry(_spec("cpu:0"), _spec("opencl:0"))
    with pytest.raises(DeviceNotFoundError, match="cpu:0, opencl:0"):
        present_device(registry, "")


def test_a_way_to_an_accelerator_does_not_hide_it() -> None:
    registry: Any = _Registry(
        _spec("cpu:0"),
        _spec("cuda:0", torch_device="cuda:0"),
        _spec("opencl:0", same_silicon_as="cuda:0"),
    )
    assert present_device(registry, "").device_id == "cuda:0"


def test_hidden_devices_are_no_choice_and_no_part_of_a_group() -> None:
    registry: Any = _Registry(
        _spec("cpu:0"),
        _spec("0000:01:00.0", torch_device="cuda", hidden_by="CUDA_VISIBLE_DEVICES=1"),
        _spec("0000:02:00.0", torch_device="cuda:0"),
    )
    assert present_device(registry, "").device_id == "0000:02:00.0"
    spec, count = present_group(registry)
    assert (spec.device_id, count) == ("0000:02:00.0", 1)
    nothing: Any = _Registry(
        _spec("cpu:0"),
        _spec("0000:01:00.0", torch_device="cuda", hidden_by="CUDA_VISIBLE_DEVICES="),
    )
    assert present_device(nothing, "").device_id == "cpu:0"
