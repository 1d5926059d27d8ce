"""Facts about the machine that a result cannot be read without."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

PROBE_SECONDS = 0.5
_INTERESTING_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)


def machine_facts() -> dict[str, object]:
    """Processor, instruction sets, cores, memory, kernel. Linux; no name of the host."""
    cpu = _cpu_info()
    flags = set(cpu.get("flags", "").split())
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_ids": [cpu.get("cpu family"), cpu.get("model"), cpu.get("stepping")],
        "flags": [flag for flag in _INTERESTING_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory("MemTotal") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def load_average() -> float:
    """Of the last minute. Includes what the benchmark itself just did."""
    return os.getloadavg()[0]


def others_busy() -> float:
    """Share of all processor time that other programs take now; all contenders are stopped."""
    busy_before, all_before = _cpu_ticks()
    time.sleep(PROBE_SECONDS)
    busy_after, all_after = _cpu_ticks()
    return round((busy_after - busy_before) / max(all_after - all_before, 1), 3)


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all processors since boot."""
    fields = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def available_bytes() -> int:
    """Memory that a new process can take without swapping."""
    return _memory("MemAvailable")


def _memory(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo: required a line {name}, found none")


def _cpu_info() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, separator, value = line.partition(":")
        if separator:
            found.setdefault(name.strip(), value.strip())
    return found
