"""Run a vendor's management tool under a deadline, read what it printed. Evidence number four."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hal.host import CommandOutput, HostProbe
from hal_backends.detecting.pci import normalised_address
from hal_backends.detecting.rules import Tool, ToolDevice

# A driver without persistence takes seconds to wake eight cards; a probe has 20 s in all.
TOOL_DEADLINE_S = 12.0
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B\b", re.IGNORECASE)
_PAIR = re.compile(
    r"\d+(?:\.\d+)?\s*(?:[KMGT]i?B)?\s*/\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B\b", re.IGNORECASE
)
_NOT_GIVEN = frozenset({"", "n/a", "[n/a]", "[not supported]", "not supported", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """What came of asking the tool. command: "" if none of the family's tools is installed.

    problem: the tool failed, in its own words where it has some: the driver does not work. note: it
    did not fail, and what it says is not understood; a newer tool may draw its table otherwise.
    """

    command: str = ""
    devices: tuple[ToolDevice, ...] = ()
    problem: str = ""
    note: str = ""

    def device_at(self, address: str) -> list[ToolDevice]:
        """The devices at a PCI address, in the tool's order: several on cards of two chips."""
        return [device for device in self.devices if device.address == address]


def run_tools(host: HostProbe, tools: Sequence[Tool]) -> ToolReport:
    """Ask the first tool that is installed and gives an answer.

    Raises:
        HostReadError: a tool did not come to an end: a hung tool most often means a hung device.
    """
    report = ToolReport()
    for tool in tools:
        output = host.run_command(tool.argv, TOOL_DEADLINE_S)
        if output is not None:
            report = _report(tool, output)
            if report.devices:
                return report
    return report


def _report(tool: Tool, output: CommandOutput) -> ToolReport:
    command = " ".join(tool.argv)
    if output.exit_code != 0:
        said = one_line(output.stderr) or one_line(output.stdout) or "nothing"
        failure = f"exit code {output.exit_code}: {said}"
        if tool.is_proof:
            return ToolReport(command=command, problem=failure)
        return ToolReport(command=command, note=failure)
    devices = tool.parse(output.stdout)
    if not devices:
        said = one_line(output.stdout) or one_line(output.stderr) or "nothing"
        return ToolReport(command=command, note=f"no device in its answer: {said}")
    return ToolReport(command=command, devices=tuple(devices))


def one_line(text: str, limit: int = 200) -> str:
    """The text as one line, cut to `limit` characters."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else f"{joined[: limit - 1]}…"


def csv_parser(*columns: str) -> Callable[[str], list[ToolDevice]]:
    """A parser of `--format=csv,noheader,nounits` answers with these columns, in this order.

    "index", "name", "address" and "memory" (MiB) fill the fields of a device; the other columns
    become details. A line of another shape is left out.
    """

    def parse(text: str) -> list[ToolDevice]:
        devices = []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != len(columns):
                continue
            row = dict(zip(columns, cells, strict=True))
            if not row.get("index", "").isascii() or not row.get("index", "").isdigit():
                continue
            devices.append(
                ToolDevice(
                    index=int(row["index"]),
                    name=row.get("name", ""),
                    address=normalised_address(row.get("address", "")),
                    memory_bytes=_mebibytes(row.get("memory", "")),
                    details={
                        key: value
                        for key, value in row.items()
                        if key not in ("index", "name", "address", "memory")
                        and value.lower() not in _NOT_GIVEN
                    },
                )
            )
        return devices

    return parse


def table_parser(
    name_pattern: str, *, driver_pattern: str = "", index_pattern: str = r"\|?\s*(\d+)\s"
) -> Callable[[str], list[ToolDevice]]:
    """A parser of the boxes that most tools draw: a row with name and bus id starts a device, the
    memory stands in that row or the next ones, as "used / total" or as "used(total)".

    name_pattern: what a model's name looks like. driver_pattern: one group, the driver's version.
    """
    name_of = re.compile(name_pattern)
    index_of = re.compile(index_pattern)

    def parse(text: str) -> list[ToolDevice]:
        driver = re.search(driver_pattern, text) if driver_pattern else None
        details = {"driver": driver.group(1)} if driver else {}
        devices: list[ToolDevice] = []
        for line in text.splitlines():
            name, index = name_of.search(line), index_of.match(line)
            address = normalised_address(line)
            if name and index and address:
                devices.append(
                    ToolDevice(
                        index=int(index.group(1)),
                        name=name.group().strip(),
                        address=address,
                        memory_bytes=_table_memory(line),
                        details=details,
                    )
                )
            elif devices and devices[-1].memory_bytes == 0:
                devices[-1] = _with_memory(devices[-1], _table_memory(line))
        return devices

    return parse


def _with_memory(device: ToolDevice, memory_bytes: int) -> ToolDevice:
    return ToolDevice(
        index=device.index,
        name=device.name,
        address=device.address,
        memory_bytes=memory_bytes,
        details=device.details,
    )


def _table_memory(line: str) -> int:
    """Total bytes from "64MiB / 32768MiB", "858/65536 MiB", "0MiB(49152MiB)" or "49120MiB"."""
    pair = _PAIR.search(line)
    if pair:
        return int(float(pair.group(1)) * _UNITS[pair.group(2).lower()])
    found = _MEMORY.findall(line)
    return int(float(found[-1][0]) * _UNITS[found[-1][1].lower()]) if found else 0


def _mebibytes(cell: str) -> int:
    found = re.match(r"(\d+(?:\.\d+)?)\s*(?:MiB|MB)?$", cell)
    return int(float(found.group(1)) * (1 << 20)) if found else 0
