"""What share of the machine a figure is: of its memory bandwidth and of its GEMM rate, as measured.

From below: only weights count as bytes and only products with weights as operations; keys, values,
scales and activations do not. A share says how far a contender is from what this machine can do,
whatever its peers do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders.report import Document, rates

# SmolLM2-135M: the embedding is also the output matrix, which a decode step multiplies whole and
# prefill multiplies for its last token alone.
_PARAMETERS = 134_515_008
_EMBEDDING_PARAMETERS = 49_152 * 576
# Bits of a stored weight, block scales included where the format has them inside.
_WEIGHT_BITS = {
    "fp32": 32.0,
    "f32": 32.0,
    "int8": 8.0,
    "w8a8": 8.0,
    "q8_0": 8.5,
    "int4": 4.0,
    "w4a8": 4.0,
    "q4_0": 4.5,
    "q4_1": 5.0,
}
_MEASURE_SECONDS = 120
NOTE = (
    "Shares of this machine's measured rates, from below (weights only; no keys, values, scales or "
    "activations): bandwidth / GEMM rate of the precision class."
)


def measure_rates() -> dict[str, float]:
    """{"memory_bandwidth": bytes/s, "float32": FLOP/s, "int8": operations/s}, measured now.

    Raises RuntimeError if the measurement failed.
    """
    command = [str(Path(sys.executable).with_name("hal")), "devices", "--measure", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_MEASURE_SECONDS, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"measurement of the machine: {done.stderr.strip()[-400:]}")
    devices = json.loads(done.stdout)
    cpu = next(device for device in devices if device["torch_device"] == "cpu")
    return {
        "memory_bandwidth": cpu["memory_bandwidth"],
        **{name: cpu["peak_flops"][name] for name in ("float32", "int8")},
    }


def shares(
    name: str, precision_class: str, row: str, rate: float, machine: Mapping[str, float]
) -> tuple[float | None, float]:
    """(share of the bandwidth, share of the GEMM rate) of a figure in tokens/s.

    row: "prefill N" or "decode xN". The first is None in prefill, which reads weights once for
    many tokens, and where the format of the weights has no one width.
    """
    unit = machine["float32" if precision_class == "fp32" else "int8"]
    if row.startswith("prefill"):
        return None, rate * 2 * (_PARAMETERS - _EMBEDDING_PARAMETERS) / unit
    bits = _WEIGHT_BITS.get(name.rsplit("-", 1)[1])
    batch = int(row.rsplit("x", 1)[1])
    read = None if bits is None else rate / batch * _PARAMETERS * bits / 8
    memory = None if read is None else read / machine["memory_bandwidth"]
    return memory, rate * 2 * _PARAMETERS / unit


def share_table(document: Document, rows: Sequence[str]) -> list[str]:
    """The shares of every contender's medians as a Markdown table."""
    machine = document["rates"]
    lines = [
        "",
        f"{NOTE} Measured before the rounds: {machine['memory_bandwidth'] / 1e9:.1f} GB/s, "
        f"fp32 {machine['float32'] / 1e9:.0f} GFLOP/s, int8 {machine['int8'] / 1e9:.0f} GOP/s.",
        "",
        "| contender | " + " | ".join(rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for name, contender in document["contenders"].items():
        cells = [_cell(name, contender, row, machine) for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(name: str, contender: Mapping[str, Any], row: str, machine: Mapping[str, float]) -> str:
    found = rates(contender, row)
    if not found:
        return ""
    precision_class = contender["precision_class"]
    memory, compute = shares(name, precision_class, row, statistics.median(found), machine)
    return f"{'–' if memory is None else f'{memory:.0%}'} / {compute:.0%}"
