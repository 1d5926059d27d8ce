"""A user's own devices: added, changed, taken from the setting, and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from database_files import CARD, HEAD, SOURCES, write
from hal.errors import SettingsError
from hal_capability_db import DatabaseError, load_database
from hal_capability_db.cli.export import Format, render
from hal_capability_db.export import differences, document_of
from hal_capability_db.facts import database_facts
from hal_capability_db.loader import draft_database

CHANGE = """\
devices:
  - id: rtx-4090
    overrides: true
    peak:
      - {values: {fp8: 340.5}, unit: TFLOPS, source: [lab], confidence: measured}
    memory_bandwidth: {value: 950, unit: GB/s, source: [lab], confidence: measured}
"""


def test_an_added_device(tmp_path: Path) -> None:
    folder = write(tmp_path, HEAD + SOURCES + CARD).parent
    database = load_database((folder,))
    card = database.device("my-card")
    assert card.origin == str(folder)
    assert database.by_pci("0x10de", "0x1234") == (card,)
    assert card.peak["fp8"].value == 200e12
    assert card.matrix_dtypes == database.architecture("sm_120").matrix_dtypes
    assert database.device("l40s").origin == "built-in"
    assert "my-card" not in load_database(()).devices


def test_a_changed_device_keeps_the_rest(tmp_path: Path) -> None:
    before = load_database(())
    after = load_database((write(tmp_path, HEAD + SOURCES + CHANGE),))
    old, new = before.device("rtx-4090"), after.device("rtx-4090")
    assert new.peak["fp8"].value == 340.5e12
    assert new.peak["fp8"].confidence == "measured"
    assert {key: new.peak[key] for key in old.peak if key != "fp8"} == {
        key: fact for key, fact in old.peak.items() if key != "fp8"
    }
    names = {difference.name for difference in differences(before, after)}
    assert names == {
        "devices.rtx-4090.peak.fp8",
        "devices.rtx-4090.memory_bandwidth",
        "sources.lab",
    }


def test_later_overlays_win(tmp_path: Path) -> None:
    first = write(tmp_path, HEAD + SOURCES + CHANGE, "first.yaml")
    second = write(tmp_path, HEAD + SOURCES + CHANGE.replace("340.5", "320.5"), "second.yaml")
    assert load_database((first, second)).device("rtx-4090").peak["fp8"].value == 320.5e12
    assert load_database((second, first)).device("rtx-4090").peak["fp8"].value == 340.5e12


def test_overriding_nothing_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + SOURCES + CHANGE.replace("rtx-4090", "rtx-4900"))
    with pytest.raises(DatabaseError, match="overrides") as caught:
        load_database((path,))
    assert "rtx-4090" in caught.value.remedy


def test_a_new_family_with_its_architecture(tmp_path: Path) -> None:
    text = """\
sources: {lab: our own measurements}
families:
  - id: our-asic
    vendor: Us
    name: Our ASIC
    pci_vendor: "0xabcd"
    torch_device: privateuseone
    detection: {is_available: "True", source: [lab], confidence: measured}
    collectives: {library: none, torch_backend: null, source: [lab], confidence: measured}
    triton: {works: false, target: null, source: [lab], confidence: measured}
    serving: {source: [lab], confidence: measured}
architectures:
  - id: asic1
    family: our-asic
    name: ASIC 1
    matrix_dtypes: {value: [bfloat16, mxfp4], source: [lab], confidence: measured}
    warp_size: {value: 1, source: [lab], confidence: measured}
devices:
  - id: asic-card
    family: our-asic
    name: ASIC card
    arch: asic1
    identity: {pci_devices: [{id: "0x0001"}], source: [lab], confidence: measured}
"""
    database = load_database((write(tmp_path, HEAD + text),))
    (card,) = database.by_pci("abcd", "1")
    assert card.id == "asic-card"
    assert card.warp_size.value == 1
    assert database.architecture("asic1").mx.value == {"mxfp4"}
    assert not database.architecture("asic1").fp8_kind.is_known
    assert not card.memory_bytes.is_known


@pytest.mark.parametrize("rule", ["subsystem", "told_apart_by"])
def test_devices_of_one_pci_id_told_apart(tmp_path: Path, rule: str) -> None:
    extra = {"subsystem": 'subsystem: "0x10de:0x0042"', "told_apart_by": "told_apart_by: memory"}
    text = HEAD + SOURCES + CARD.replace('"0x1234"', f'"0x2bb5", {extra[rule]}')
    database = load_database((write(tmp_path, text),))
    both = ("my-card", "rtx-pro-6000-blackwell-server")
    assert tuple(found.id for found in database.by_pci("0x10de", "0x2bb5")) == both
    exact = tuple(found.id for found in database.by_pci("0x10de", "0x2bb5", "10de:0042"))
    assert exact == (("my-card",) if rule == "subsystem" else both)
    other = tuple(found.id for found in database.by_pci("0x10de", "0x2bb5", "10de:0043"))
    assert other == (both[1:] if rule == "subsystem" else both)


def test_the_setting_is_what_everybody_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, HEAD + SOURCES + CARD)
    monkeypatch.setenv("HAL_DATABASE_OVERLAYS", str(path))
    assert "my-card" in load_database().devices
    monkeypatch.delenv("HAL_DATABASE_OVERLAYS")
    assert "my-card" not in load_database().devices
    config = tmp_path / "hal.toml"
    config.write_text(f"[database]\noverlays = [{json.dumps(str(tmp_path))}]\n")
    monkeypatch.setenv("HAL_CONFIG", str(config))
    assert "my-card" in load_database().devices
    config.write_text("[database]\noverlay = 'x'\n")
    with pytest.raises(SettingsError, match="overlays"):
        load_database()


@pytest.mark.parametrize("form", Format)
def test_an_export_is_the_same_database(tmp_path: Path, form: Format) -> None:
    overlay = write(tmp_path, HEAD + SOURCES + CARD + CHANGE.removeprefix("devices:\n"))
    effective = load_database((overlay,))
    text = render(document_of(draft_database((overlay,))), form)
    exported = write(tmp_path, text, f"all.{form.value}")
    again = load_database((exported,))
    assert differences(effective, again) == []
    assert database_facts(effective) == database_facts(again)


def test_a_part_is_exported_with_what_it_needs(tmp_path: Path) -> None:
    document = document_of(draft_database(()), ["hygon-z100"])
    assert [entry["id"] for entry in document["devices"]] == ["hygon-z100"]
    assert [entry["id"] for entry in document["architectures"]] == ["gfx906"]
    assert {entry["id"] for entry in document["families"]} == {"amd", "hygon"}
    path = write(tmp_path, json.dumps(document), "part.json")
    part, whole = load_database((path,)), load_database(())
    assert part.device("hygon-z100").peak == whole.device("hygon-z100").peak
    assert len(part.sources) < len(whole.sources)
