"""Detection over every recorded host: the right vendor and device, or an explicit refusal."""

from __future__ import annotations

import json
import random
import sys

import pytest

import host_catalogue
from accelerator_plugins import BACKENDS, Found, look_at
from hal.device import Confidence
from hal.host import RecordedHost, load_recorded_host
from host_catalogue import CATALOGUE, FOLDER, compose

NAMES = sorted(CATALOGUE)


@pytest.fixture(scope="module")
def looks() -> dict[str, Found]:
    """Each stored host looked at once."""
    return {}


def _look(looks: dict[str, Found], name: str) -> Found:
    if name not in looks:
        looks[name] = look_at(load_recorded_host(FOLDER / f"{name}.json"))
    return looks[name]


def test_stored_hosts_are_those_of_the_catalogue() -> None:
    stored = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    composed = {name: compose(name)[0].to_json() + "\n" for name in CATALOGUE}
    remedy = f"run `python {host_catalogue.__file__}`"
    assert stored.keys() == composed.keys(), remedy
    assert [name for name in NAMES if stored[name] != composed[name]] == [], remedy
    assert len(stored) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_host(looks: dict[str, Found], name: str) -> None:
    expected = compose(name)[1]
    found = _look(looks, name)
    assert found.products() == expected.devices
    assert found.refused.keys() == expected.refused.keys()
    for backend, words in expected.refused.items():
        text = found.refused[backend].one_line()
        for word in (*words, "required", "remedy"):
            assert word in text, (word, text)
    assert found.missing.keys() == expected.missing.keys()
    for backend, words in expected.missing.items():
        texts = [f"{m.hardware}: {m.software}: {m.remedy}" for m in found.missing[backend]]
        for word in words:
            assert any(word in text for text in texts), (word, texts)


@pytest.mark.parametrize("name", NAMES)
def test_no_device_has_two_owners_and_each_tells_its_evidence(
    looks: dict[str, Found], name: str
) -> None:
    found = _look(looks, name)
    ids = [device.device_id for devices in found.devices.values() for device in devices]
    assert len(ids) == len(set(ids))
    for devices in found.devices.values():
        for device in devices:
            assert device.evidence
            assert all(seen.source and seen.found for seen in device.evidence)
    for spec in found.specs.values():
        assert spec.evidence["detection.1"].confidence is Confidence.PROBED
        assert spec.attributes["pci_address"] == spec.device_id.split("#")[0]
        gates = [name for name, seen in spec.evidence.items() if name.startswith("features.")]
        for gate in gates:
            if spec.evidence[gate].confidence is Confidence.UNVERIFIED:
                assert gate.removeprefix("features.") not in spec.features


def test_an_unknown_device_asks_for_an_overlay(looks: dict[str, Found]) -> None:
    for name in NAMES:
        for error in _look(looks, name).undescribed.values():
            assert "overlay" in error.remedy
    assert _look(looks, "nvidia-unknown-architecture").undescribed


def test_one_hundred_orders_of_the_plugins_give_one_result() -> None:
    """Fresh host objects, so that nothing kept from one order answers in the next."""
    name = "mixed-nvidia-metax"
    text = (FOLDER / f"{name}.json").read_text()
    seed = random.randrange(2**32)
    shuffler = random.Random(seed)
    backends = list(BACKENDS)
    results = set()
    for _ in range(100):
        shuffler.shuffle(backends)
        found = look_at(RecordedHost.from_json(text), backends)
        documents = {
            "devices": {b: [repr(d) for d in found.devices[b]] for b in found.devices},
            "missing": {b: [repr(m) for m in found.missing[b]] for b in found.missing},
            "specs": {i: spec.to_dict() for i, spec in found.specs.items()},
        }
        results.add(json.dumps(documents, sort_keys=True))
    assert len(results) == 1, f"seed {seed}"
    assert set(json.loads(results.pop())["devices"]) == {"nvidia", "metax"}


def test_no_framework_of_a_vendor_is_imported(looks: dict[str, Found]) -> None:
    for name in NAMES:
        _look(looks, name)
    vendors = ("torch_npu", "torch_mlu", "torch_musa", "torch_gcu", "torch_xmlir", "pynvml")
    assert not [name for name in vendors if name in sys.modules]
