"""Draws a topology as SVG: a panel for each NUMA node, links as thick as they have lanes, and the
matrix of distances."""

from __future__ import annotations

from collections.abc import Sequence

from hal.topology.layout import (
    BridgeGroup,
    NodeGroup,
    all_findings,
    flat,
    layout_of,
    legend,
    pair_label,
    pair_mark,
    short_address,
)
from hal.topology.model import Accelerator, DevicePair, Topology
from hal.topology.pci_link import PciLink
from hal.topology.svg_canvas import SvgCanvas, fitted

_MARGIN = 28
_PANEL_GAP = 24
_HEADER = 44
_ROW = 50
_LINK = 128
_SWITCH = 92
_CARD = 272
_CELL = (52, 30)
_LANE_PX = 0.6
_MOST_EMPTY = 2


def draw_svg(topology: Topology) -> str:
    """The picture as the text of an SVG file."""
    canvas = SvgCanvas()
    groups = layout_of(topology)
    if len(groups) > _MOST_EMPTY:  # a socket may be cut into many NUMA nodes
        groups = [group for group in groups if group.items] or groups[:_MOST_EMPTY]
    count = len(topology.accelerators)
    title = f"{count} accelerator{'' if count == 1 else 's'}"
    title += f", {len(topology.numa_nodes)} NUMA node{'' if len(topology.numa_nodes) == 1 else 's'}"
    canvas.text(_MARGIN, _MARGIN + 14, title, "title")
    width, bottom = _panels(canvas, topology, groups, _MARGIN + 36)
    if count > 1:
        matrix_width, bottom = _matrix(canvas, topology, bottom + _PANEL_GAP)
        width = max(width, matrix_width)
    bottom = _findings(canvas, topology, bottom + 8)
    return canvas.to_svg(max(width, 480) + _MARGIN, bottom + _MARGIN, f"Topology: {title}")


def _panels(
    canvas: SvgCanvas, topology: Topology, groups: Sequence[NodeGroup], top: float
) -> tuple[float, float]:
    """The panels, two in a row; the right and the bottom edge."""
    depth = max((_depth(group.items) for group in groups), default=0)
    width = 2 * 18 + 18 + (_LINK + _SWITCH) * depth + _LINK + _CARD
    right = bottom = top
    for start in range(0, len(groups), 2):
        row = groups[start : start + 2]
        height = _HEADER + _ROW * max(1, *(len(flat(group.items)) for group in row)) + 14
        for column, group in enumerate(row):
            x = _MARGIN + column * (width + _PANEL_GAP)
            canvas.box(x, top, width, height, "panel", 10)
            _panel(canvas, topology, group, (x, top, width))
            right = max(right, x + width)
        bottom = top + height
        top = bottom + _PANEL_GAP
    return right, bottom


def _depth(items: Sequence[BridgeGroup | Accelerator]) -> int:
    return max(
        (1 + _depth(item.items) for item in items if isinstance(item, BridgeGroup)), default=0
    )


def _panel(
    canvas: SvgCanvas, topology: Topology, group: NodeGroup, place: tuple[float, float, float]
) -> None:
    x, y, width = place
    canvas.text(x + 18, y + 27, group.label, "head")
    node = group.node
    if node is not None:
        parts = [f"CPUs {node.cpus}"] if node.cpus else []
        parts += [f"{node.memory_bytes / 2**30:.0f} GiB"] if node.memory_bytes else []
        text = fitted("  ·  ".join(parts), width - 180, 12)
        canvas.text(x + width - 18, y + 27, text, "small quiet", "end")
    rows = len(flat(group.items))
    if not rows:
        canvas.text(x + 18, y + _HEADER + 24, "no accelerator", "small quiet")
        return
    canvas.box(x + 18, y + _HEADER, 18, rows * _ROW - 8, "node", 4)
    _items(canvas, topology, group.items, (x + 36, y + _HEADER), x + width - 18 - _CARD)


def _items(
    canvas: SvgCanvas,
    topology: Topology,
    items: Sequence[BridgeGroup | Accelerator],
    place: tuple[float, float],
    card_x: float,
) -> None:
    x, y = place
    for item in items:
        rows = 1 if isinstance(item, Accelerator) else len(item.accelerators())
        height = rows * _ROW - 8
        middle = y + height / 2
        if isinstance(item, Accelerator):
            _link(canvas, item.link, x, card_x, middle)
            _card(canvas, topology, item, card_x, y)
        else:
            link = item.function.link if item.function is not None else None
            _link(canvas, link, x, x + _LINK, middle, is_bridge=item.function is None)
            _bridge(canvas, topology, item, (x + _LINK, y, height))
            _items(canvas, topology, item.items, (x + _LINK + _SWITCH, y), card_x)
        y += rows * _ROW


def _link(
    canvas: SvgCanvas,
    link: PciLink | None,
    start: float,
    end: float,
    y: float,
    *,
    is_bridge: bool = False,
) -> None:
    """A line as thick as the link has lanes, over a pale one for the lanes that it could have."""
    if link is None:
        canvas.line(start, end, y, "unknown", 3)
        if not is_bridge:
            canvas.text((start + end) / 2, y - 7, "link not known", "small quiet", "middle")
        return
    lanes = link.width or link.best_width
    possible = max(lanes, link.max_width, link.port_max_width)
    if possible > lanes:
        canvas.line(start, end, y, "lost", max(2, possible * _LANE_PX))
    canvas.line(start, end, y, _link_style(link), max(2, lanes * _LANE_PX))
    canvas.hint("; ".join(link.findings()) or link.describe())
    text = link.describe()
    if link.bytes_per_s:
        text += f"  {link.bytes_per_s / 1e9:.1f} GB/s"
    canvas.text((start + end) / 2, y - possible * _LANE_PX / 2 - 4, text, "small", "middle")


def _link_style(link: PciLink) -> str:
    if link.is_narrow:
        return "bad"
    return "warning" if link.is_limited_by_port or link.is_slow else "ok"


def _bridge(
    canvas: SvgCanvas, topology: Topology, group: BridgeGroup, place: tuple[float, float, float]
) -> None:
    x, y, height = place
    kind, _, address = group.label.rpartition(" ")
    canvas.box(x, y, _SWITCH, height, "switch")
    canvas.hint(group.label)
    middle = y + height / 2
    canvas.text(x + _SWITCH / 2, middle - 3, kind, "small", "middle")
    shown = short_address(address, topology) if group.function is not None else address
    canvas.text(x + _SWITCH / 2, middle + 12, shown, "small quiet", "middle")


def _card(canvas: SvgCanvas, topology: Topology, item: Accelerator, x: float, y: float) -> None:
    is_sound = item.is_given and item.is_usable
    canvas.box(x, y, _CARD, _ROW - 8, "card" if item.is_given else "absent")
    canvas.hint("; ".join((item.name, item.device_id, *item.findings)))
    badge = "badge" if is_sound else "badge-warning" if item.is_given else "badge-bad"
    canvas.box(x + 8, y + 8, 30, _ROW - 24, badge, 5)
    canvas.text(x + 23, y + 26, str(item.number), "name light", "middle")
    canvas.text(x + 48, y + 18, fitted(item.name, _CARD - 56, 13), "name")
    notes = [short_address(item.address, topology)] if item.address else []
    notes += [item.backend] if item.backend else ["no plug-in"]
    canvas.text(x + 48, y + 33, "  ·  ".join(notes), "small quiet")
    if not is_sound:
        trouble = "not usable" if item.is_given else "not given"
        canvas.text(x + _CARD - 10, y + 33, trouble, "small bad-text", "end")


def _matrix(canvas: SvgCanvas, topology: Topology, top: float) -> tuple[float, float]:
    """The matrix with its legend beside it; the right and the bottom edge."""
    count = len(topology.accelerators)
    cells = {(pair.first, pair.second): pair for pair in topology.pairs}
    width, height = _CELL
    left = _MARGIN + 34
    for number in range(count):
        canvas.text(left + (number + 0.5) * width, top + 12, str(number), "small", "middle")
        y = top + 20 + number * height
        canvas.text(left - 10, y + 19, str(number), "small", "end")
        for column in range(count):
            pair = cells.get((min(number, column), max(number, column)))
            _cell(canvas, topology, pair, (left + column * width, y))
    right = left + count * width + 28
    y = top + 34
    for label, meaning in legend(topology):
        style = label if label in ("PIX", "PXB", "PHB", "NODE", "SYS") else "fabric"
        if label in ("*", "~"):
            canvas.text(right + 20, y + 4, label, "name", "middle")
        else:
            canvas.box(right, y - 10, 42, 18, style, 4)
            canvas.text(right + 21, y + 3, label, "cell light", "middle")
        canvas.text(right + 52, y + 3, meaning, "small")
        y += 26
    return right + 400, max(top + 20 + count * height, y)


def _cell(
    canvas: SvgCanvas, topology: Topology, pair: DevicePair | None, place: tuple[float, float]
) -> None:
    x, y = place
    width, height = _CELL
    if pair is None:
        canvas.box(x + 1, y + 1, width - 2, height - 2, "self", 4)
        return
    style = "fabric" if pair.fabric else pair.distance.value if pair.distance else "none"
    canvas.box(x + 1, y + 1, width - 2, height - 2, style, 4)
    canvas.hint(_pair_hint(topology, pair))
    text = pair_label(pair) + pair_mark(pair)
    canvas.text(x + width / 2, y + height / 2 + 4, text, "cell light", "middle")


def _pair_hint(topology: Topology, pair: DevicePair) -> str:
    names = (topology.accelerators[number].device_id for number in (pair.first, pair.second))
    parts = [" – ".join(names)]
    parts += [f"PCIe distance {pair.distance.value}"] if pair.distance is not None else []
    parts += [f"at most {pair.bytes_per_s / 1e9:.1f} GB/s over PCIe"] if pair.bytes_per_s else []
    parts += [f"{pair.fabric} x{pair.fabric_links or '?'}"] if pair.fabric else []
    parts += [f"peer access: {pair.p2p}"]
    return "; ".join(parts)


def _findings(canvas: SvgCanvas, topology: Topology, top: float) -> float:
    y = top
    for text, who in all_findings(topology):
        y += 20
        canvas.text(_MARGIN, y, f"{who}:  {text}", "small")
    return y
