"""Peer access is verified by writing and comparing, a process a pair, and kept for one host."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_peers import FakeRuntime, OldRuntime
from hal.device import Confidence, DeviceSpec
from hal.host import LocalHost, RecordedHost
from hal.host_recording import RecordingHost
from hal.peer_links import store
from hal.peer_links.exchange import verify_pair
from hal.peer_links.outcome import PairOutcome
from hal.peer_links.store import links_file, save_links, with_links
from hal.peer_links.verification import device_pairs, verify_pairs
from hal.plugins.listing import PluginEntry
from hal.topology import detect_topology
from recorded_hosts import HostBuilder

IDS = ("acme:0", "acme:1")


def test_what_arrives_bit_for_bit_is_verified_in_both_directions() -> None:
    outcome = verify_pair(IDS, FakeRuntime(), FakeRuntime())
    assert outcome.verdict == "verified"
    assert (outcome.first, outcome.second) == IDS
    assert outcome.bytes_per_s is not None
    assert outcome.bytes_per_s > 0


def _one_bit(words: torch.Tensor) -> None:
    words[-1] ^= 1 << 17


def _stale_end(words: torch.Tensor) -> None:
    if words.numel() > 4096:
        words[4096:] = 0


@pytest.mark.parametrize("damage", [_one_bit, _stale_end], ids=["a bit", "stale data in long ones"])
@pytest.mark.parametrize("direction", [0, 1])
def test_a_wrong_bit_in_either_direction_refutes(damage: Any, direction: int) -> None:
    ends = [FakeRuntime(), FakeRuntime()]
    ends[direction] = FakeRuntime(damage=damage)
    outcome = verify_pair(IDS, ends[0], ends[1])
    assert outcome.verdict == "wrong"
    assert outcome.is_trouble
    assert "→←"[direction] in outcome.detail


def test_no_claim_is_no_trouble_and_silence_is_not_a_no() -> None:
    def verdict(one: Any, other: Any) -> str:
        return verify_pair(IDS, one, other).verdict

    assert verdict(FakeRuntime(claim=False), FakeRuntime()) == "none"
    assert verdict(FakeRuntime(), FakeRuntime(claim=False)) == "none"
    assert verdict(FakeRuntime(claim=None), FakeRuntime()) == "unknown"
    assert verdict(OldRuntime(), FakeRuntime()) == "unknown"


def _spec(number: int, **changes: Any) -> DeviceSpec:
    spec = DeviceSpec(
        device_id=f"acme:{number}",
        vendor="Acme",
        backend="acme",
        name="One",
        arch="a1",
        torch_device="acme",
        attributes={"p2p": "claimed", "driver_version": "1.2"},
    )
    return dataclasses.replace(spec, **changes)


def test_pairs_are_of_usable_accelerators_of_one_plugin() -> None:
    cpu = _spec(9, torch_device="cpu", backend="cpu")
    other = _spec(2, backend="other")
    hidden = _spec(3, attributes={"hidden_by": "CUDA_VISIBLE_DEVICES=0"})
    found = device_pairs([_spec(0), _spec(1), cpu, other, hidden])
    assert [(one.device_id, two.device_id) for one, two in found] == [IDS]
    assert device_pairs([cpu]) == []


_PLUGIN = """
    import sys, time
    sys.path[:0] = {folders!r}
    from hal import hookimpl
    from hal.hookspecs import BackendInfo
    @hookimpl
    def hal_backend_info():
        return BackendInfo(name="acme", vendor="Acme", api_range=">=1.0,<2")

    @hookimpl
    def hal_create_runtime(device):
        fate = device.attributes["fate"]
        if fate == "hangs":
            time.sleep(1000)
        if fate == "crashes":
            import os
            os.abort()
        if fate == "raises":
            raise RuntimeError("no driver")
        from fake_peers import FakeRuntime
        return FakeRuntime()
"""


def test_each_pair_has_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(Path(__file__).parents[1] / "support")]
    (tmp_path / "acme_plugin.py").write_text(textwrap.dedent(_PLUGIN.format(folders=folders)))
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = PluginEntry(name="acme", value="acme_plugin", distribution="hal-acme", version="1.0")
    pairs = []
    for fate in ("hangs", "crashes", "raises", "fine"):
        ends = [_spec(n, attributes={"fate": f}) for n, f in enumerate((fate, "fine"))]
        pairs.append((ends[0], ends[1]))
    outcomes = list(verify_pairs(pairs[:1], lambda spec: entry, deadline_s=3))
    outcomes += verify_pairs(pairs[1:], lambda spec: entry)
    assert [outcome.verdict for outcome in outcomes] == ["failed", "failed", "failed", "verified"]
    assert "no end after 3 s" in outcomes[0].detail
    assert "SIGABRT" in outcomes[1].detail
    assert "no driver" in outcomes[2].detail


def _outcome(verdict: Any, first: int = 0, second: int = 1) -> PairOutcome:
    return PairOutcome(
        first=f"acme:{first}", second=f"acme:{second}", verdict=verdict, detail="as tested"
    )


def test_outcomes_become_evidence_on_this_host_only(tmp_path: Path) -> None:
    specs = [_spec(n) for n in range(3)]
    outcomes = [_outcome("verified"), _outcome("wrong", 0, 2), _outcome("failed", 1, 2)]
    host = LocalHost()
    assert save_links(outcomes, specs, host, tmp_path) == links_file(host, tmp_path)
    first, second, third = with_links(specs, RecordingHost(host), tmp_path)
    assert first.attributes["p2p_verified_peers"] == "acme:1"
    assert first.attributes["p2p_refuted_peers"] == "acme:2"
    seen = first.evidence["attributes.p2p_verified_peers"]
    assert seen.confidence is Confidence.MEASURED
    assert "acme:1" in seen.found
    assert "p2p_refuted_peers" not in second.attributes  # what failed is no answer
    assert third.attributes["p2p_refuted_peers"] == "acme:0"
    for other in (HostBuilder("another").build(), RecordingHost(HostBuilder("another").build())):
        assert links_file(other, tmp_path) is None
        assert with_links(specs, other, tmp_path) == specs
        assert save_links(outcomes, specs, other, tmp_path) is None
    assert isinstance(HostBuilder("another").build(), RecordedHost)


def test_outcomes_end_with_the_driver_the_kernel_and_a_new_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, host = [_spec(0), _spec(1)], LocalHost()
    save_links([_outcome("verified")], specs, host, tmp_path)
    newer = [specs[0], _spec(1, attributes={"p2p": "claimed", "driver_version": "1.3"})]
    assert with_links(newer, host, tmp_path) == newer
    assert with_links(specs[:1], host, tmp_path) == specs[:1]
    save_links([_outcome("wrong")], specs, host, tmp_path)
    assert with_links(specs, host, tmp_path)[0].attributes["p2p_refuted_peers"] == "acme:1"
    assert "p2p_verified_peers" not in with_links(specs, host, tmp_path)[0].attributes
    monkeypatch.setattr(store, "_KERNEL", ("/proc/version", "/proc/cmdline"))
    assert with_links(specs, host, tmp_path) == specs


@pytest.mark.parametrize("damage", ["", "[", "[]", "{}", '{"schema": "halstack.peer-links/1"}'])
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: str) -> None:
    specs, host = [_spec(0), _spec(1)], LocalHost()
    file = save_links([_outcome("verified")], specs, host, tmp_path)
    assert file is not None
    rows = json.loads(file.read_text())["pairs"]
    file.write_text(json.dumps({"schema": "halstack.peer-links/1", "pairs": [7, *rows]}))
    assert with_links(specs, host, tmp_path)[0].attributes["p2p_verified_peers"] == "acme:1"
    file.write_text(damage)
    assert with_links(specs, host, tmp_path) == specs


def test_the_picture_trusts_what_was_checked(tmp_path: Path) -> None:
    builder = HostBuilder("three")
    cards = builder.devices(3, "10de:2684")
    specs = [
        _spec(0, device_id=card, attributes={"p2p": "claimed", "driver_version": "1.2"})
        for card in cards
    ]
    outcomes = [
        PairOutcome(first=cards[a], second=cards[b], verdict=verdict, detail="as tested")
        for a, b, verdict in ((0, 1, "verified"), (0, 2, "wrong"))
    ]
    save_links(outcomes, specs, LocalHost(), tmp_path)
    topology = detect_topology(builder.build(), with_links(specs, LocalHost(), tmp_path))
    places = {item.device_id: item.number for item in topology.accelerators}
    numbers = [places[card] for card in cards]
    found = [topology.pair(numbers[a], numbers[b]).p2p for a, b in ((0, 1), (0, 2), (1, 2))]
    assert found == ["verified", "none", "claimed"]
