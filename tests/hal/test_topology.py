"""Topology on composed hosts: distances against NCCL's rule, links, nodes, fabric, peers."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.device import Confidence, DeviceSpec, Evidence
from hal.device_group import group_link_of
from hal.errors import HostReadError
from hal.host import RecordedHost, RecordingHost
from hal.topology import Distance, Obstacle, PciKind, PciLink, detect_topology
from hal.topology.building import unclaimed_accelerators
from hal.topology.group import link_on_host
from hal.topology.numa import count_cpus
from hal.topology.pci_link import lane_bytes_per_s, parse_speed, parse_width
from recorded_hosts import HostBuilder, Port


def spec(address: str, backend: str = "acme", **attributes: str | int) -> DeviceSpec:
    return DeviceSpec(
        device_id=address,
        vendor="Acme",
        backend=backend,
        name="Acme One",
        arch="acme1",
        torch_device="acme",
        attributes=attributes,
    )


def distance_by_nccl(first: str, second: str, numa: tuple[int, int]) -> Distance:
    """The rule of NCCL 2.3 to 2.5 (`pciDistance`, Apache-2.0 and BSD): how many folders two paths
    of sysfs share, out of how many."""
    depth = score = 0
    is_same = True
    for index, char in enumerate(first):
        is_same = is_same and index < len(second) and char == second[index]
        if char == "/":
            depth += 1
            score += is_same
    if score <= 3:
        return Distance.NODE if numa[0] == numa[1] else Distance.SYS
    if score == 4:
        return Distance.PHB
    return Distance.PIX if score == depth - 1 else Distance.PXB


def _random_host(seed: int) -> tuple[HostBuilder, list[str]]:
    """Sockets with host bridges, nested switches, and cards anywhere."""
    draw = random.Random(seed)
    builder = HostBuilder(f"seed {seed}")
    sockets = draw.randint(1, 4)
    builder.sockets(sockets, cpus_each=2, memory_gib_each=4)
    cards = []
    for _ in range(draw.randint(1, 4)):
        bridge = builder.host_bridge(draw.randrange(sockets))
        places: list[Port | None] = [None]
        for _ in range(draw.randint(0, 4)):
            places.append(builder.switch(behind=draw.choice(places) or bridge))
        for _ in range(draw.randint(1, 3)):
            cards.append(builder.device("1234:0001", behind=draw.choice(places) or bridge))
    return builder, cards


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_distances_are_those_of_nccl(seed: int) -> None:
    builder, cards = _random_host(seed)
    host = builder.build()
    topology = detect_topology(host, [spec(card) for card in cards])
    assert {item.address for item in topology.accelerators} == set(cards)
    for pair in topology.pairs:
        ends = [topology.accelerators[number] for number in (pair.first, pair.second)]
        paths = [builder.path_of(item.address) for item in ends]
        wanted = [
            distance_by_nccl(a, b, (ends[0].numa_node, ends[1].numa_node))
            for a, b in (paths, paths[::-1])
        ]
        # NCCL's rule looks from one side; the farther of both is what lies between.
        assert pair.distance is max(wanted, key=lambda level: level.rank), (paths, wanted)
        assert not pair.is_distance_assumed
        assert topology.pair(pair.second, pair.first) is pair


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_a_recording_has_the_same_topology(seed: int) -> None:
    builder, cards = _random_host(seed)
    recorder = RecordingHost(builder.build())
    topology = detect_topology(recorder, [spec(card) for card in cards])
    recorded = RecordedHost.from_json(recorder.recorded().to_json())
    assert detect_topology(recorded, [spec(card) for card in cards]) == topology
    document = json.loads(json.dumps(topology.to_dict()))
    assert document["schema"] == "halstack.topology/1"
    assert [item["address"] for item in document["accelerators"]] == [
        item.address for item in topology.accelerators
    ]


def test_eight_cards_on_two_sockets() -> None:
    builder = HostBuilder("eight cards")
    builder.sockets(2, cpus_each=32, memory_gib_each=512)
    cards = [builder.device("10de:2bb5", numa=n // 4, link="5.0 x16") for n in range(8)]
    topology = detect_topology(builder.build(), [spec(card) for card in reversed(cards)])
    assert [item.address for item in topology.accelerators] == cards
    assert [item.numa_node for item in topology.accelerators] == [0] * 4 + [1] * 4
    levels = {(p.first // 4 == p.second // 4): p.distance for p in topology.pairs}
    assert levels == {True: Distance.NODE, False: Distance.SYS}
    assert len(topology.pairs) == 28
    nodes = topology.numa_nodes
    assert [(node.number, node.cpus, node.num_cpus) for node in nodes] == [
        (0, "0-31", 32),
        (1, "32-63", 32),
    ]
    assert [node.memory_bytes for node in nodes] == [512 << 30] * 2
    assert nodes[0].distances == (10, 32)
    assert topology.pairs[0].bytes_per_s == pytest.approx(63.0e9, rel=1e-3)
    assert not topology.findings
    findings = {item.findings for item in topology.accelerators}
    assert findings == {("no kernel driver is bound to it",)}


def test_unknown_numa_nodes_count_as_far_only_where_there_are_several() -> None:
    for sockets, wanted in ((1, Distance.NODE), (2, Distance.SYS)):
        builder = HostBuilder("virtual machine")
        builder.sockets(sockets)
        cards = [builder.device("10de:2bb5", has_numa_node=False) for _ in range(2)]
        topology = detect_topology(builder.build(), [spec(card) for card in cards])
        assert topology.pairs[0].distance is wanted
        assert topology.pairs[0].is_distance_assumed == (sockets > 1)
        assert bool(topology.findings) == (sockets > 1)


@pytest.mark.parametrize(
    ("trained", "card", "port", "words", "rate"),
    [
        ("5.0 x16", "5.0 x16", "5.0 x16", [], 63.0e9),
        ("5.0 x8", "5.0 x16", "5.0 x16", ["trained to x8, both ends can do x16"], 31.5e9),
        ("4.0 x16", "5.0 x16", "5.0 x16", ["at 16 GT/s now", "can do 32 GT/s"], 63.0e9),
        ("1.0 x16", "4.0 x16", "4.0 x16", ["at 2.5 GT/s", "without work"], 31.5e9),
        ("4.0 x8", "4.0 x16", "4.0 x8", ["port above has x8", "card could do x16"], 15.75e9),
        ("4.0 x16", "5.0 x16", "4.0 x16", ["port above does 16 GT/s", "do 32 GT/s"], 31.5e9),
        ("3.0 x4", "5.0 x16", "4.0 x8", ["trained to x4, both ends can do x8", "x8"], 7.88e9),
        ("6.0 x16", "6.0 x16", "6.0 x16", [], 118e9),
        ("1.0 x1", "1.0 x1", "1.0 x1", [], 0.25e9),
    ],
)
def test_links_below_their_capability(
    trained: str, card: str, port: str, words: list[str], rate: float
) -> None:
    builder = HostBuilder("one card")
    address = builder.device("1234:1", link=trained, max_link=card, port_max_link=port, driver="x")
    topology = detect_topology(builder.build(), [spec(address)])
    item = topology.accelerators[0]
    assert item.link is not None
    text = "; ".join(item.findings)
    assert all(word in text for word in words), text
    assert bool(text) == bool(words)
    assert item.link.bytes_per_s == pytest.approx(rate, rel=0.01)


def test_a_card_with_its_own_switch_has_the_link_of_its_slot() -> None:
    """As Radeon and Arc cards: the device itself always shows x16 behind the switch on the card."""
    builder = HostBuilder("one card with a switch on it")
    for _ in range(2):
        slot = builder.root_port(link="4.0 x8", max_link="4.0 x16")
        on_card = builder.switch(behind=slot, link="4.0 x8", ids="1002:1478")
        builder.device("1002:744c", behind=on_card, link="4.0 x16")
    addresses = builder.build().list_dir("/sys/bus/pci/devices") or ()
    cards = [a for a in addresses if builder.files[f"{builder.path_of(a)}/device"] == "0x744c\n"]
    topology = detect_topology(builder.build(), [spec(card) for card in cards])
    for item in topology.accelerators:
        assert item.link is not None
        assert item.link.width == 8
        assert item.shared == ()
    assert topology.pairs[0].bytes_per_s == pytest.approx(15.75e9, rel=0.01)


def test_shared_uplink() -> None:
    builder = HostBuilder("two cards behind one switch with a poor uplink")
    slot = builder.root_port(link="4.0 x8", max_link="4.0 x16")
    switch = builder.switch(behind=slot, link="4.0 x8")
    builder.files[f"{builder.path_of(switch.address)}/max_link_width"] = "16\n"
    cards = builder.devices(2, "10de:26b9", behind=switch, link="4.0 x16", driver="nvidia")
    topology = detect_topology(builder.build(), [spec(card) for card in cards])
    assert topology.pairs[0].distance is Distance.PIX
    assert topology.pairs[0].bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert switch.address in topology.accelerators[0].shared
    assert topology.functions[switch.address].kind is PciKind.SWITCH
    assert f"{switch.address}, shared by several: trained to x8" in topology.findings[0]
    assert all(item.findings == () for item in topology.accelerators)


def test_devices_that_this_container_was_not_given() -> None:
    builder = HostBuilder("container")
    given, hidden, by_plugin, claimed_wrong = builder.devices(4, "1002:74a1", driver="amdgpu")
    builder.device_node(given, "/dev/dri/renderD128", subsystem="drm")
    builder.device_node(given, "/dev/dri/card1", subsystem="drm", is_given=False)  # not needed
    builder.device_node(hidden, "/dev/dri/renderD129", subsystem="drm", is_given=False)
    builder.device_node(by_plugin, "/dev/dri/renderD130", subsystem="drm", is_given=False)
    builder.node("/dev/acme2")
    specs = [spec(given), spec(hidden), spec(by_plugin, device_nodes="/dev/acme2")]
    specs += [spec(claimed_wrong, device_nodes="/dev/acme3 /dev/acmectl")]
    items = detect_topology(builder.build(), specs).accelerators
    assert [item.is_given for item in items] == [True, False, True, False]
    assert items[0].nodes == ("/dev/dri/renderD128",)
    assert items[1].missing_nodes == ("/dev/dri/renderD129",)
    assert items[3].missing_nodes == ("/dev/acme3", "/dev/acmectl")
    assert "not given to this container or user: /dev/acme3" in items[3].findings[0]


def test_unclaimed_and_unusable_accelerators() -> None:
    builder = HostBuilder("a card nobody knows, one without a driver, a display")
    unknown = builder.device("abcd:0001", pci_class="0x120000")
    broken = builder.device("10de:26b9")
    builder.device("1a03:2000", pci_class="0x030000", link="")  # a board controller's display
    builder.device("19e5:1711", pci_class="0x030000", link="1.0 x1")  # one with a link
    builder.device("8086:1572", pci_class="0x020000")  # a network card
    host = builder.build()
    assert [f.address for f in unclaimed_accelerators(host, {broken})] == [unknown]
    obstacles = {broken: Obstacle(backend="nvidia", text="the driver is missing: install it")}
    topology = detect_topology(host, [], obstacles)
    assert [(i.address, i.backend, i.is_usable) for i in topology.accelerators] == [
        (unknown, "", False),
        (broken, "nvidia", False),
    ]
    assert topology.accelerators[0].findings[0] == "no plug-in claims it"
    assert topology.accelerators[1].findings[0] == "the driver is missing: install it"
    assert topology.accelerators[0].name == "PCI abcd:0001"


def test_fabric_and_peer_access_between_pairs() -> None:
    builder = HostBuilder("four linked in pairs")
    cards = builder.devices(4, "10de:2330", driver="nvidia")
    peers = [cards[1], cards[0], cards[3], cards[2]]
    specs = [
        spec(card, fabric="nvlink", fabric_peers=f"{peer}*12", p2p="claimed")
        for card, peer in zip(cards, peers, strict=True)
    ]
    topology = detect_topology(builder.build(), specs)
    fabric = {(p.first, p.second): (p.fabric, p.fabric_links) for p in topology.pairs}
    assert fabric[0, 1] == fabric[2, 3] == ("nvlink", 12)
    assert fabric[0, 2] == fabric[1, 3] == ("", 0)
    assert {p.p2p for p in topology.pairs} == {"claimed"}


def test_fabric_of_a_full_mesh_and_who_says_so() -> None:
    builder = HostBuilder("mesh")
    cards = builder.devices(3, "10de:2330", driver="nvidia")
    seen = Evidence(source="nvidia-smi", found="18 links", confidence=Confidence.PROBED)
    probed = [
        DeviceSpec(
            **{
                **{f: getattr(spec(card), f) for f in ("device_id", "vendor", "backend", "name")},
                "arch": "x",
                "torch_device": "cuda",
                "attributes": {"fabric": "nvlink", "p2p": "verified"},
                "evidence": {"attributes.fabric": seen},
            }
        )
        for card in cards[:2]
    ]
    other = spec(cards[2], backend="other", fabric="nvlink", p2p="verified")
    pairs = detect_topology(builder.build(), [*probed, other]).pairs
    assert [p.fabric for p in pairs] == ["nvlink", "", ""]
    assert [p.p2p for p in pairs] == ["verified", "none", "none"]
    assert pairs[0].is_fabric_probed
    partial = [spec(card, fabric="xgmi", fabric_is_full_mesh=0) for card in cards]
    assert {p.fabric for p in detect_topology(builder.build(), partial).pairs} == {""}


def test_peer_access_of_a_pair_is_that_of_its_weaker_side() -> None:
    builder = HostBuilder("peers")
    cards = builder.devices(3, "10de:26b9", driver="nvidia")
    specs = [
        spec(cards[0], p2p="verified", p2p_verified_peers=cards[1]),
        spec(cards[1], p2p="claimed"),
        spec(cards[2]),
    ]
    pairs = detect_topology(builder.build(), specs).pairs
    assert [p.p2p for p in pairs] == ["verified", "none", "none"]


def test_link_of_a_group_is_that_of_its_worst_pair() -> None:
    builder = HostBuilder("two sockets, one poor slot")
    builder.sockets(2)
    near = builder.devices(2, "10de:26b9", driver="nvidia", link="4.0 x16")
    far = builder.device("10de:26b9", driver="nvidia", link="4.0 x8", max_link="4.0 x16", numa=1)
    specs = [spec(card, p2p="claimed", host_link_bytes_per_s=31_500_000_000) for card in near]
    specs.append(spec(far, host_link_bytes_per_s=31_500_000_000))
    topology = detect_topology(builder.build(), specs)
    promised = group_link_of(specs[0], 3)
    two = link_on_host(promised, topology, near)
    assert (two.distance, two.p2p, two.kind, two.is_full_mesh) == ("NODE", "claimed", "pcie", True)
    assert two.bandwidth_bytes_per_s == promised.bandwidth_bytes_per_s
    three = link_on_host(promised, topology, [*near, far])
    assert (three.distance, three.p2p, three.is_full_mesh) == ("SYS", "none", False)
    assert three.bandwidth_bytes_per_s == pytest.approx(15.75e9, rel=0.01)
    assert three.evidence.source == "/sys/bus/pci/devices"
    measured = Evidence(source="x", found="y", confidence=Confidence.MEASURED)
    known = replace(promised, evidence=measured)
    assert link_on_host(known, topology, [*near, far]).bandwidth_bytes_per_s == 31.5e9
    for ids in ([near[0]], [*near, "0000:99:00.0"], []):
        assert link_on_host(promised, topology, ids) is promised


def test_link_of_a_group_with_a_fabric() -> None:
    builder = HostBuilder("linked in pairs")
    cards = builder.devices(4, "10de:2330", link="4.0 x16", driver="nvidia")
    peers = [cards[1], cards[0], cards[3], cards[2]]
    specs = [
        spec(card, fabric="nvlink", fabric_peers=peer, p2p="verified", fabric_bytes_per_s=9e11)
        for card, peer in zip(cards, peers, strict=True)
    ]
    topology = detect_topology(builder.build(), specs)
    promised = group_link_of(specs[0], 4)
    assert promised.is_full_mesh
    pair = link_on_host(promised, topology, cards[:2])
    assert (pair.kind, pair.is_full_mesh, pair.bandwidth_bytes_per_s) == ("nvlink", True, 9e11)
    four = link_on_host(promised, topology, cards)
    assert (four.kind, four.is_full_mesh, four.p2p) == ("nvlink", False, "verified")
    # Two islands: what goes from one to the other crosses PCIe. A chain of links does not.
    assert four.bandwidth_bytes_per_s is not None
    assert four.bandwidth_bytes_per_s < 4e10
    chain = [cards[1], f"{cards[0]} {cards[2]}", f"{cards[1]} {cards[3]}", cards[2]]
    specs = [
        spec(card, fabric="nvlink", fabric_peers=peer, p2p="verified", fabric_bytes_per_s=9e11)
        for card, peer in zip(cards, chain, strict=True)
    ]
    linked = link_on_host(promised, detect_topology(builder.build(), specs), cards)
    assert (linked.is_full_mesh, linked.bandwidth_bytes_per_s) == (False, 9e11)
    apart = link_on_host(promised, topology, [cards[0], cards[2]])
    assert apart.kind == "pcie"


def test_devices_off_the_bus_and_the_cpu() -> None:
    builder = HostBuilder("a phone and a CPU")
    cpu = DeviceSpec(
        device_id="cpu:0", vendor="x", backend="cpu", name="CPU", arch="x", torch_device="cpu"
    )
    card = builder.device("10de:26b9", driver="nvidia")
    by_attribute = spec("acme/0", pci_address=card.upper())
    lost = spec("0000:ff:00.0")
    topology = detect_topology(builder.build(), [cpu, by_attribute, spec("usb:1"), lost])
    assert [item.device_id for item in topology.accelerators] == ["acme/0", "usb:1", "0000:ff:00.0"]
    assert topology.accelerators[0].address == card
    assert {p.distance for p in topology.pairs} == {None}
    assert "sysfs does not show" in topology.accelerators[2].findings[0]
    empty = detect_topology(RecordedHost(), [cpu])
    assert empty.accelerators == empty.pairs == empty.numa_nodes == ()


def test_unreadable_files_are_findings() -> None:
    builder = HostBuilder("a card that fell off the bus")
    card = builder.device("10de:26b9", driver="nvidia")
    builder.unreadable(f"{builder.path_of(card)}/current_link_width")
    topology = detect_topology(builder.build(), [spec(card)])
    assert "current_link_width cannot be read" in topology.accelerators[0].findings[0]
    builder = HostBuilder("no list of devices")
    builder.unreadable("/sys/bus/pci/devices")
    with pytest.raises(HostReadError, match="/sys/bus/pci/devices"):
        detect_topology(builder.build())


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_anything_in_sysfs_gives_a_topology_or_a_located_error(data: st.DataObject) -> None:
    builder, cards = _random_host(data.draw(st.integers(0, 99)))
    host = builder.build()
    text = st.none() | st.text(max_size=12) | st.sampled_from(["-1", "255", "Unknown", "9" * 30])
    files = dict(host.files)
    for path in data.draw(st.lists(st.sampled_from(sorted(files)), max_size=8)):
        files[path] = data.draw(text)
    links = dict(host.links)
    for path in data.draw(st.lists(st.sampled_from(sorted(links)), max_size=3)):
        links[path] = data.draw(st.sampled_from(["/", "/sys", "/x/0000:01:00.0", links[path]]))
    try:
        broken = RecordedHost(files=files, links=links)
        topology = detect_topology(broken, [spec(card) for card in cards])
    except HostReadError as error:
        problem = error.who
    else:
        problem = ""
        json.dumps(topology.to_dict())
    assert not problem or "host: /" in problem


@pytest.mark.parametrize(
    ("text", "speed"),
    [("32.0 GT/s PCIe", 32.0), ("2.5 GT/s", 2.5), ("Unknown", 0.0), (None, 0.0), ("9" * 99, 0.0)],
)
def test_speed(text: str | None, speed: float) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize(
    ("text", "width"),
    [("16\n", 16), ("0", 0), ("255", 0), ("63", 0), ("x", 0), (None, 0), ("-4", 0)],
)
def test_width(text: str | None, width: int) -> None:
    assert parse_width(text) == width


@pytest.mark.parametrize(
    ("text", "count"),
    [("0-15,32-47", 32), ("0", 1), ("", 0), ("3-1", 0), ("x,2", 1), ("0-99999999", 0)],
)
def test_cpus(text: str, count: int) -> None:
    assert count_cpus(text) == count


def test_lanes_carry_what_the_specification_says() -> None:
    """Per lane and direction, in MB/s, as PCI-SIG states them (rounded)."""
    stated = {2.5: 250, 5.0: 500, 8.0: 985, 16.0: 1969, 32.0: 3938, 64.0: 7563}
    for speed, megabytes in stated.items():
        assert lane_bytes_per_s(speed) == pytest.approx(megabytes * 1e6, rel=0.03)
    assert PciLink().bytes_per_s == 0
