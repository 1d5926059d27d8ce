"""The pictures of a topology: nothing missing, nothing too wide, well-formed whatever the names."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hal.device import DeviceSpec
from hal.topology import Topology, detect_topology
from hal.topology.layout import all_findings, flat, layout_of, legend
from hal.topology.svg import draw_svg
from hal.topology.terminal import draw_topology
from recorded_hosts import HostBuilder

SVG = "{http://www.w3.org/2000/svg}"


def _specs(cards: list[str], name: str, **attributes: str) -> list[DeviceSpec]:
    return [
        DeviceSpec(
            device_id=card,
            vendor="Acme",
            backend="acme",
            name=name,
            arch="acme1",
            torch_device="acme",
            attributes=attributes,
        )
        for card in cards
    ]


def eight_on_two_sockets(name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition") -> Topology:
    builder = HostBuilder("eight")
    builder.sockets(2, cpus_each=64, memory_gib_each=768)
    cards = [
        builder.device(
            "10de:2bb5",
            numa=n // 4,
            link="5.0 x8" if n == 5 else "5.0 x16",
            max_link="5.0 x16",
            driver="nvidia",
        )
        for n in range(8)
    ]
    return detect_topology(builder.build(), _specs(cards, name, p2p="claimed"))


def behind_a_switch() -> Topology:
    builder = HostBuilder("switch")
    builder.sockets(2)
    bridge = builder.host_bridge(0)
    switch = builder.switch(behind=bridge, link="4.0 x16")
    cards = builder.devices(3, "10de:26b9", behind=switch, link="4.0 x16", driver="nvidia")
    cards.append(builder.device("10de:26b9", behind=bridge, link="4.0 x16", driver="nvidia"))
    builder.device_node(cards[2], "/dev/dri/renderD128", subsystem="drm", is_given=False)
    builder.device("1d22:3685", numa=1, link="4.0 x8", max_link="4.0 x16")
    return detect_topology(builder.build(), _specs(cards, "NVIDIA L40S", p2p="verified"))


def sixteen_linked() -> Topology:
    builder = HostBuilder("sixteen")
    builder.sockets(4)
    cards = []
    for node in range(4):
        outer = builder.switch(numa=node, link="5.0 x16")
        for _ in range(2):
            inner = builder.switch(behind=outer, link="5.0 x16")
            cards += builder.devices(2, "19e5:d803", behind=inner, driver="devdrv")
    return detect_topology(builder.build(), _specs(cards, "Ascend 910C", fabric="hccs"))


def one() -> Topology:
    builder = HostBuilder("one")
    return detect_topology(builder.build(), _specs([builder.device("1:1", link="")], "One"))


def none() -> Topology:
    return detect_topology(HostBuilder("none").build())


TOPOLOGIES = [eight_on_two_sockets, behind_a_switch, sixteen_linked, one, none]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", TOPOLOGIES)
def test_terminal_picture_fits_and_shows_everything(make: object, width: int) -> None:
    assert callable(make)
    topology: Topology = make()
    lines = draw_topology(topology, width)
    assert all(line.cell_len <= width for line in lines), max(lines, key=lambda li: li.cell_len)
    text = "\n".join(line.plain for line in lines)
    for node in topology.numa_nodes:
        assert f"NUMA node {node.number}  CPUs {node.cpus}" in text
    for item in topology.accelerators:
        assert re.search(rf"[■□] +{item.number}  {item.address.removeprefix('0000:')}", text)
    for label, meaning in legend(topology):
        assert f"{label} {meaning}" in text
    joined = " ".join(text.split())
    for finding, who in all_findings(topology):
        assert " ".join(f"! {who}: {finding}".split()) in joined
    if len(topology.accelerators) > 1:
        rows = [line.plain for line in lines if re.match(r" +\d+  +\S", line.plain)]
        rows = [row for row in rows if not re.fullmatch(r"[\d │]+", row)]  # not the numbers
        cells = [cell for row in rows for cell in row.split()[1:] if cell != "│"]
        assert cells.count("·") == len(topology.accelerators)
        assert len(cells) - cells.count("·") == 2 * len(topology.pairs)


def test_terminal_picture_line_by_line() -> None:
    lines = [line.plain.rstrip() for line in draw_topology(behind_a_switch(), 80)]
    assert lines == [
        "NUMA node 0  CPUs 0-15  64.0 GiB",
        "└─ host bridge 0000:00",
        "   ├─ switch 01:00.0  ━━━━━━━━ gen4 x16   31.5 GB/s  shared by 3",
        "   │  ├─ ■ 0  03:00.0  ━━━━━━━━ gen4 x16   31.5 GB/s  NVIDIA L40S",
        "   │  ├─ ■ 1  04:00.0  ━━━━━━━━ gen4 x16   31.5 GB/s  NVIDIA L40S",
        "   │  └─ □ 2  05:00.0  ━━━━━━━━ gen4 x16   31.5 GB/s  NVIDIA L40S  not given",
        "   └──── ■ 3  06:00.0  ━━━━━━━━ gen4 x16   31.5 GB/s  NVIDIA L40S",
        "NUMA node 1  CPUs 16-31  64.0 GiB",
        "└─────── □ 4  08:00.0  ━━━━╌╌╌╌ gen4 x8    15.8 GB/s  PCI 1d22:3685  unclaimed",
        "",
        "         0     1     2     3 │     4",
        " 0       ·  PIX*  PIX*  PHB* │   SYS",
        " 1    PIX*     ·  PIX*  PHB* │   SYS",
        " 2    PIX*  PIX*     ·  PHB* │   SYS",
        " 3    PHB*  PHB*  PHB*     · │   SYS",
        "    ─────────────────────────┼──────",
        " 4     SYS   SYS   SYS   SYS │     ·",
        " PIX at most one PCIe switch between   PHB a host bridge of the CPU",
        " SYS the link between NUMA nodes   * peer access verified",
        "",
        " ! 2: not given to this container or user: /dev/dri/renderD128 missing",
        " ! 4: no plug-in claims it",
        " ! 4: no kernel driver is bound to it",
        " ! 4: trained to x8, both ends can do x16",
    ]


def test_colours_tell_a_degraded_link() -> None:
    lines = draw_topology(eight_on_two_sockets(), 100)
    styles = {}
    for line in lines[:10]:
        number = re.search(r"■ (\d)", line.plain)
        if number:
            styles[int(number.group(1))] = {str(span.style) for span in line.spans}
    assert any("red" in style for style in styles[5])
    assert not any("red" in style for style in styles[4])
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line)


@pytest.mark.parametrize("make", TOPOLOGIES)
def test_svg_is_well_formed_and_shows_everything(make: object) -> None:
    assert callable(make)
    topology: Topology = make()
    root = ElementTree.fromstring(draw_svg(topology))
    assert root.tag == f"{SVG}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    hints = [element.text or "" for element in root.iter(f"{SVG}title")]
    for item in topology.accelerators:
        assert str(item.number) in texts
        assert any(item.device_id in hint for hint in hints)
    assert sum("peer access:" in hint for hint in hints) == 2 * len(topology.pairs)
    for finding, who in all_findings(topology):
        assert f"{who}:  {finding}" in texts
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert 0 <= x <= x + float(box.attrib["width"]) <= width
        assert 0 <= y <= y + float(box.attrib["height"]) <= height
    for line in root.iter(f"{SVG}line"):
        assert 0 <= float(line.attrib["x1"]) < float(line.attrib["x2"]) <= width


@given(st.text(max_size=80), st.integers(40, 140))
@settings(deadline=None, max_examples=30)
def test_any_name_can_be_drawn(name: str, width: int) -> None:
    topology = eight_on_two_sockets(name)
    ElementTree.fromstring(draw_svg(topology))
    lines = draw_topology(topology, width)
    assert all(line.plain.isprintable() for line in lines)


def test_layout_leaves_nothing_out() -> None:
    topology = sixteen_linked()
    groups = layout_of(topology)
    assert [len(flat(group.items)) for group in groups] == [4] * 4
    found = [item.number for group in groups for item in flat(group.items)]
    assert found == list(range(16))
