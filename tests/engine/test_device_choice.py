"""Groups, counts and software as a user writes them."""

from __future__ import annotations

import pytest

from hal.errors import SettingsError
from hal_engine.device_choice import parse_count, parse_group, parse_software


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
    for bad in (["flash-attn"], ["=1"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(SettingsError, match="NAME=VERSION"):
            parse_software(bad)
