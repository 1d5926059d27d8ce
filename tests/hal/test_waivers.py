"""Waivers: strict files, and errors for the expired, the unused and the over-broad."""

import datetime
from pathlib import Path

import pytest

from hal.device import DeviceSpec
from hal.errors import WaiverError
from hal.ops.activation import GatedActivationRequest
from hal.ops.request import OpRequest
from hal.ops.rope import RopeRequest
from hal.waivers import WaiverBook, load_waivers, parse_waivers, waiver_text

TODAY = datetime.date(2026, 6, 15)
DEVICE = DeviceSpec(
    device_id="cpu:0",
    vendor="acme",
    backend="cpu",
    name="Acme CPU",
    arch="x86_64_avx2",
    torch_device="cpu",
)
GOOD = {
    "op": '"rope"',
    "component": '"layers.*.rope"',
    "device": '"cpu:*"',
    "kind": '"tier"',
    "reason": '"measured, it does not matter"',
    "owner": '"serving team"',
    "expires": "2026-06-15",
    "max_call_share": "0.5",
}


def text(**changes: str | None) -> str:
    fields = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    return "[[waiver]]\n" + "\n".join(f"{key} = {value}" for key, value in fields.items()) + "\n"


def book(**changes: str | None) -> WaiverBook:
    return parse_waivers(text(**changes), "waivers.toml", today=TODAY)


@pytest.fixture
def rope() -> OpRequest:
    return RopeRequest(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, dtype="float32")


@pytest.fixture
def activation() -> OpRequest:
    return GatedActivationRequest(width=96, dtype="float32")


def test_matches_by_op_component_device_and_kind(rope: OpRequest, activation: OpRequest) -> None:
    waivers = book()
    waiver = waivers.match(rope, "layers.3.rope", DEVICE, "tier")
    assert waiver is not None
    assert "serving team" in waiver.describe()
    assert waivers.match(rope, "layers.*.rope", DEVICE, "tier") is waiver
    assert waivers.match(rope, "layers.3.rope", DEVICE, "semantic") is None
    assert waivers.match(rope, "head.rope", DEVICE, "tier") is None
    assert waivers.match(activation, "layers.3.rope", DEVICE, "tier") is None
    assert book(device='"cuda:*"').match(rope, "layers.3.rope", DEVICE, "tier") is None
    assert book(device='"x86_64*"').match(rope, "layers.3.rope", DEVICE, "tier") is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reson": '"x"'}, ["reson", "did you mean 'reason'"]),
        ({"owner": None}, ["owner", "as it has no default"]),
        ({"reason": '"  "'}, ["reason", "filled in"]),
        ({"owner": '"<who answers for it>"'}, ["owner", "filled in"]),
        ({"kind": '"slow"'}, ["kind", "'slow'"]),
        ({"max_call_share": "0"}, ["max_call_share"]),
        ({"max_call_share": "1.5"}, ["max_call_share"]),
        ({"max_call_share": "nan"}, ["max_call_share"]),
        ({"max_call_share": "true"}, ["max_call_share"]),
        ({"expires": '"2026-12-31"'}, ["expires"]),
        ({"expires": "2026-06-14"}, ["expired on 2026-06-14", "serving team"]),
        ({"op": '"*"', "component": '"*"'}, ["everything"]),
        ({"op": '"**"', "component": '"**"'}, ["everything"]),
        ({"op": '"?*"', "component": '"?*"'}, ["everything"]),
        ({"op": '"[!x]*"', "component": '"[!x]*"'}, ["everything"]),
        ({"op": '"roep"'}, ["'roep'", "did you mean 'rope'"]),
    ],
)
def test_bad_waiver(changes: dict[str, str | None], words: list[str]) -> None:
    with pytest.raises(WaiverError) as caught:
        book(**changes)
    for word in ["waivers.toml, waiver 1", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("[[wavier]]\nop = 'rope'", ["'wavier'", "did you mean 'waiver'"]),
        ("[waiver]\nop = 'rope'", ["double brackets"]),
        ("[[waiver", ["TOML"]),
    ],
)
def test_bad_file(document: str, words: list[str]) -> None:
    with pytest.raises(WaiverError) as caught:
        parse_waivers(document, "waivers.toml", today=TODAY)
    for word in words:
        assert word in str(caught.value)


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    with pytest.raises(WaiverError, match="readable"):
        load_waivers(path)
    path.write_text(text() + text(op='"activation.*"'))
    assert len(load_waivers(path, today=TODAY).waivers) == 2


def test_holds_on_its_last_day() -> None:
    assert book(expires=TODAY.isoformat()).waivers[0].expires == TODAY


def test_unused_waiver(rope: OpRequest) -> None:
    sites = [("layers.0.rope", rope), ("head.rope", rope)]
    waivers = book()
    assert waivers.match(rope, "head.rope", DEVICE, "tier") is None
    with pytest.raises(WaiverError, match="best tier without it"):
        waivers.check_after_planning(sites)
    waivers = book(component='"layer.*.rope"')
    assert waivers.match(rope, "layers.0.rope", DEVICE, "tier") is None
    with pytest.raises(WaiverError, match="no call site matches"):
        waivers.check_after_planning(sites)


def test_waiver_of_another_device_is_not_judged(rope: OpRequest) -> None:
    waivers = book(device='"cuda:*"')
    assert waivers.match(rope, "layers.0.rope", DEVICE, "tier") is None
    waivers.check_after_planning([("layers.0.rope", rope)])


def test_share_of_call_sites(rope: OpRequest, activation: OpRequest) -> None:
    sites = [(f"layers.{n}.rope", rope) for n in range(5)]
    others = [(f"layers.{n}.mlp.act", activation) for n in range(5)]
    waivers = book()
    assert waivers.match(rope, "layers.*.rope", DEVICE, "tier") is not None
    waivers.check_after_planning([*sites, *others])
    with pytest.raises(WaiverError, match="5 of 9 call sites"):
        waivers.check_after_planning([*sites, *others[1:]])


def test_rendered_waiver_must_be_filled_in_and_then_allows(rope: OpRequest) -> None:
    site = 'layers.*."odd"\\rope'
    rendered = waiver_text(rope, site, DEVICE, "semantic", today=TODAY)
    with pytest.raises(WaiverError, match="filled in"):
        parse_waivers(rendered, "waivers.toml", today=TODAY)
    rendered = waiver_text(rope, site, DEVICE, "semantic", reason="r", owner="o", today=TODAY)
    waivers = parse_waivers(rendered, "waivers.toml", today=TODAY)
    assert waivers.match(rope, site, DEVICE, "semantic") is waivers.waivers[0]
    assert waivers.match(rope, site, DEVICE, "tier") is None
