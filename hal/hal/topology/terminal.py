"""Draws a topology for the terminal: a tree with the lanes of every link, and the distances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from rich.text import Text

from hal.topology.layout import (
    BridgeGroup,
    NodeGroup,
    all_findings,
    layout_of,
    legend,
    pair_label,
    pair_mark,
    printable,
    short_address,
)
from hal.topology.model import Accelerator, DevicePair, Distance, Topology
from hal.topology.pci_link import PciLink

_BAR_CHARACTERS = 8
_FULL_WIDTH = 16
_PAIR_STYLES = {
    Distance.PIX: "bright_green",
    Distance.PXB: "green",
    Distance.PHB: "cyan",
    Distance.NODE: "yellow",
    Distance.SYS: "red",
}
_FABRIC_STYLE = "bold bright_green"
_OK, _WARNING, _BAD, _QUIET = "green", "yellow", "red", "dim"


def draw_topology(topology: Topology, width: int) -> list[Text]:
    """The lines of the picture, each at most `width` columns."""
    lines = [*_tree(topology, width)]
    if len(topology.accelerators) > 1:
        lines += [Text(), *_matrix(topology, width), *_legend(topology, width)]
    findings = list(_findings(topology, width))
    if findings:
        lines += [Text(), *findings]
    return lines


def _tree(topology: Topology, width: int) -> Iterator[Text]:
    groups = layout_of(topology)
    margin = max((_depth(group.items) for group in groups), default=0) * 3
    for group in groups:
        yield _node_line(group, width)
        yield from _branch(group.items, "", topology, width, margin)


def _depth(items: list[BridgeGroup | Accelerator]) -> int:
    inner = [_depth(item.items) for item in items if isinstance(item, BridgeGroup)]
    return 1 + max(inner, default=0)


def _node_line(group: NodeGroup, width: int) -> Text:
    line = Text(group.label, style="bold")
    node = group.node
    if node is not None:
        parts = [f"CPUs {_shortened(node.cpus, 28)}"] if node.cpus else []
        parts += [f"{node.memory_bytes / 2**30:.1f} GiB"] if node.memory_bytes else []
        line.append("".join(f"  {part}" for part in parts), style="not bold")
    if not group.items:
        line.append("  no accelerator", style=f"not bold {_QUIET}")
    line.truncate(width, overflow="ellipsis")
    return line


def _branch(
    items: list[BridgeGroup | Accelerator],
    indent: str,
    topology: Topology,
    width: int,
    margin: int,
) -> Iterator[Text]:
    for position, item in enumerate(items):
        is_last = position == len(items) - 1
        prefix = indent + ("└─ " if is_last else "├─ ")
        below = indent + ("   " if is_last else "│  ")
        if isinstance(item, BridgeGroup):
            yield _bridge_line(item, prefix, topology, width)
            yield from _branch(item.items, below, topology, width, margin)
        else:
            yield _accelerator_line(item, prefix.rstrip().ljust(margin - 1, "─"), topology, width)


def _bridge_line(group: BridgeGroup, prefix: str, topology: Topology, width: int) -> Text:
    line = Text(prefix, style=_QUIET)
    name = group.label
    if group.function is not None:
        name = f"switch {short_address(group.function.address, topology)}"
    line.append(name, style="not dim bold")
    link = group.function.link if group.function is not None else None
    if link is not None:
        line.append("  ")
        _append_link(line, link)
        line.append(f"  shared by {len(group.accelerators())}", style="not dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _accelerator_line(item: Accelerator, prefix: str, topology: Topology, width: int) -> Text:
    line = Text(prefix, style=_QUIET)
    style = _accelerator_style(item)
    line.append(f" {'■' if item.is_given and item.is_usable else '□'} ", style=f"not dim {style}")
    digits = len(str(len(topology.accelerators) - 1))
    line.append(f"{item.number:>{digits}}  ", style="not dim bold")
    if item.address:
        line.append(f"{short_address(item.address, topology)}  ", style="not dim")
        _append_link(line, item.link)
        line.append("  ")
    line.append(printable(item.name), style=f"not dim {'' if item.is_usable else _WARNING}")
    if not item.is_given:
        line.append("  not given", style=f"not dim {_BAD}")
    elif not item.is_usable:
        line.append("  not usable" if item.backend else "  unclaimed", style=f"not dim {_WARNING}")
    line.truncate(width, overflow="ellipsis")
    return line


def _accelerator_style(item: Accelerator) -> str:
    if not item.is_given:
        return _BAD
    return _OK if item.is_usable else _WARNING


def _append_link(line: Text, link: PciLink | None) -> None:
    """The lanes as a bar, then generation, width and rate: `━━━━╌╌╌╌ gen4 x8   15.8 GB/s`."""
    if link is None:
        line.append(f"{'link not known':<{_BAR_CHARACTERS + 21}}", style=_QUIET)
        return
    style = _link_style(link)
    lanes = link.width or link.best_width
    possible = max(lanes, link.max_width, link.port_max_width)
    scale = _BAR_CHARACTERS / max(_FULL_WIDTH, possible)
    used = max(1, round(lanes * scale)) if lanes else 0
    lost = max(0, min(_BAR_CHARACTERS, round(possible * scale)) - used)
    line.append("━" * used, style=f"not dim {style}")
    line.append("╌" * lost, style=f"not dim {_BAD}")
    line.append(" " * (_BAR_CHARACTERS - used - lost))
    line.append(f" {link.describe():<9}", style=f"not dim {style}")
    rate = f"{link.bytes_per_s / 1e9:.1f} GB/s" if link.bytes_per_s else ""
    line.append(f" {rate:>10}", style="not dim")


def _link_style(link: PciLink) -> str:
    if link.is_narrow:
        return _BAD
    if link.is_limited_by_port or link.is_slow:
        return _WARNING
    return _OK


def _matrix(topology: Topology, width: int) -> Iterator[Text]:
    """Rows and columns by number, with lines between NUMA nodes; in blocks if it is wide."""
    count = len(topology.accelerators)
    cells = {(pair.first, pair.second): pair for pair in topology.pairs}
    texts = [pair_label(pair) + pair_mark(pair) for pair in topology.pairs]
    cell_width = max(len(str(count - 1)), *(len(text) for text in texts)) + 2
    label_width = len(str(count - 1)) + 3
    borders = _borders(topology)
    per_block = max(1, (width - label_width - 2 * len(borders)) // cell_width)
    for start in range(0, count, per_block):
        columns = range(start, min(count, start + per_block))
        if start:
            yield Text()
        header = Text(" " * label_width, style="bold")
        for column in columns:
            _append_cell(header, str(column), "", cell_width, is_border=column in borders)
        yield header
        for row in range(count):
            if row in borders:
                yield _border_line(columns, borders, label_width, cell_width)
            line = Text(f" {row:>{label_width - 3}}  ", style="bold")
            for column in columns:
                pair = cells.get((min(row, column), max(row, column)))
                text = "·" if pair is None else pair_label(pair) + pair_mark(pair)
                style = _QUIET if pair is None else _pair_style(pair)
                _append_cell(line, text, style, cell_width, is_border=column in borders)
            yield line


def _borders(topology: Topology) -> frozenset[int]:
    """The numbers of the accelerators that begin another NUMA node than the one before."""
    items = topology.accelerators
    return frozenset(
        after.number for before, after in pairwise(items) if before.numa_node != after.numa_node
    )


def _border_line(
    columns: Iterable[int], borders: frozenset[int], label_width: int, cell_width: int
) -> Text:
    cells = "".join(("─┼" if n in borders else "") + "─" * cell_width for n in columns)
    return Text(" " * label_width + cells, style=_QUIET)


def _append_cell(line: Text, text: str, style: str, width: int, *, is_border: bool) -> None:
    if is_border:
        line.append(" │", style=f"not bold {_QUIET}")
    line.append(f"{text:>{width}}", style=f"not bold {style}" if style else "")


def _pair_style(pair: DevicePair) -> str:
    if pair.fabric:
        return _FABRIC_STYLE
    return _PAIR_STYLES[pair.distance] if pair.distance is not None else _QUIET


def _legend(topology: Topology, width: int) -> Iterator[Text]:
    line = Text(style=_QUIET)
    for label, meaning in legend(topology):
        part = f"{label} {meaning}"
        if line.cell_len and line.cell_len + len(part) + 3 > width:
            yield line
            line = Text(style=_QUIET)
        line.append(f"   {part}" if line.cell_len else f" {part}")
    if line.cell_len:
        yield line


def _findings(topology: Topology, width: int) -> Iterator[Text]:
    """What is wrong, one line for each thing, with the numbers of those that have it."""
    for text, who in all_findings(topology):
        line = Text(f" ! {who}: ", style=_WARNING)
        line.append(printable(text), style="default")
        yield from _wrapped(line, width)


def _wrapped(line: Text, width: int) -> Iterator[Text]:
    words = line.plain.split(" ")
    start, used = 0, 0
    position = 0
    for word in words:
        if used and used + len(word) + 1 > width:
            yield line[start : position - 1]
            start, used = position, 0
        used += len(word) + 1
        position += len(word) + 1
    yield line[start:]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
