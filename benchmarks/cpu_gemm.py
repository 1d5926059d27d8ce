"""Times every CPU GEMM candidate side by side, by weight shape and number of rows.

    python benchmarks/cpu_gemm.py                       # SmolLM2-135M's weights, wall clock
    python benchmarks/cpu_gemm.py --shapes 1536x576 --rows 1,8,16 --formats int4_g32
    python benchmarks/cpu_gemm.py --json gemm.json      # the measurements, for the selection

Calls go round over copies of a weight, so that it comes from memory as in a decode step and not
from the cache. On a machine that others use too, `--clock thread` counts the CPU time of one thread
instead of the wall time of all: slower than a quiet machine, but comparable between candidates.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hal.ops.formats import FORMATS, QuantizedWeight
from hal_kernels.gemm import (
    cpu_dense,
    cpu_generated,
    cpu_generated_int8,
    cpu_w8a8,
    cpu_weight_only,
)
from hal_kernels.gemm.gguf_formats import quantize_int8_channel
from hal_kernels.gemm.isa import cpu_flags, jit_requirements

# qkv, o, gate_up, down and lm_head of SmolLM2-135M.
SHAPES = "960x576,576x576,3072x576,576x1536,49152x576"
ROWS = "1,2,4,8,16,32,64,128,256,512"
PROFILE_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avxvnni", "avx512bf16",
                 "amx-bf16", "amx-int8")  # fmt: skip

Kernel = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation for one weight format; ``requirements`` empty means that it can run."""

    name: str
    weight_format: str
    dtype: str
    bind: Callable[[Any], Kernel]
    requirements: list[tuple[str, str, str]]


def candidates() -> list[Candidate]:
    """Every implementation, by the backend's names, whether it can run here or not."""
    onednn = cpu_dense.onednn_requirements()
    linear, packed = cpu_dense.bind_linear, cpu_dense.bind_onednn
    bfloat16 = cpu_dense.bfloat16_requirements()
    result = [
        Candidate("linear_fp32", "float32", "float32", linear, []),
        Candidate("onednn_fp32", "float32", "float32", packed, onednn),
        Candidate("linear_bf16", "bfloat16", "bfloat16", linear, bfloat16),
        Candidate("onednn_bf16", "bfloat16", "bfloat16", packed, bfloat16 + onednn),
    ]
    int8pack, int4pack = cpu_weight_only.bind_int8pack, cpu_weight_only.bind_int4pack
    missing = cpu_weight_only.int8pack_requirements()
    result.append(Candidate("int8pack", "int8_channel", "float32", int8pack, missing))
    missing = cpu_weight_only.int4pack_requirements()
    for name in cpu_weight_only.INT4PACK_FORMATS:
        result.append(Candidate("int4pack", name, "float32", int4pack, missing))
    for bits in (8, 7):
        bind = functools.partial(cpu_w8a8.bind_fbgemm, bits=bits)
        missing = cpu_w8a8.fbgemm_requirements(bits)
        result.append(Candidate(f"fbgemm_int{bits}", "int8_channel_a8", "float32", bind, missing))
    missing = cpu_w8a8.onednn_requirements()
    bind_int8 = cpu_w8a8.bind_onednn_int8
    result.append(Candidate("onednn_int8", "int8_channel_a8", "float32", bind_int8, missing))
    jit = jit_requirements()
    for name in ("float32", "bfloat16", "float16", *cpu_generated.FORMATS):
        result.append(Candidate("jit", name, "float32", cpu_generated.bind_generated, jit))
    for name in cpu_generated_int8.FORMATS:
        bind = cpu_generated_int8.bind_generated_int8
        result.append(Candidate("jit_int8", name, "float32", bind, jit))
    return result


def random_weight(name: str, n: int, k: int) -> torch.Tensor | QuantizedWeight:
    """A weight [n, k] of the format with random values."""
    weight_format = FORMATS[name]
    if weight_format.is_dense:
        return torch.randn(n, k).to(getattr(torch, name))
    if not weight_format.group_size:
        return quantize_int8_channel(torch.randn(n, k), format_name=name)
    shape = (n, k // weight_format.group_size)
    scale = (torch.rand(shape) * 0.05 + 0.001).half()
    if weight_format.bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    else:
        data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    minimum = None if weight_format.is_symmetric else -8 * scale
    return QuantizedWeight(format=weight_format, data=data, scale=scale, minimum=minimum)


def measure(
    kernels: list[Kernel], x: torch.Tensor, clock: Callable[[], float], budget_s: float
) -> float:
    """Microseconds of a call: the best round over the kernels within the budget."""
    for kernel in kernels[:2]:
        kernel(x)
    start = clock()
    kernels[-1](x)
    once = max(clock() - start, 1e-6)
    count = min(len(kernels), max(2, math.ceil(budget_s / 4 / once)))
    rounds = max(1, min(5, math.ceil(budget_s / (count * once))))
    best = math.inf
    for _ in range(rounds):
        start = clock()
        for kernel in kernels[:count]:
            kernel(x)
        best = min(best, (clock() - start) / count)
    return best * 1e6


def measure_candidate(
    candidate: Candidate, n: int, k: int, rows: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One record for each number of rows."""
    size = FORMATS[candidate.weight_format].weight_bytes(n, k)
    copies = max(1, min(options.max_copies, math.ceil(options.rotate_mib * 2**20 / size)))
    weight = random_weight(candidate.weight_format, n, k)
    kernels = [candidate.bind(_copy(weight)) for _ in range(copies)]
    clock = time.thread_time if options.clock == "thread" else time.perf_counter
    records = []
    for count in rows:
        x = torch.randn(count, k).to(getattr(torch, candidate.dtype))
        records.append(
            {
                "candidate": f"cpu.gemm.{candidate.name}/{candidate.weight_format}",
                "n": n,
                "k": k,
                "rows": count,
                "us": round(measure(kernels, x, clock, options.budget_ms / 1e3), 1),
            }
        )
    return records


def _copy(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor | QuantizedWeight:
    """Other memory, so that a candidate that packs nothing still reads a weight of its own."""
    if isinstance(weight, torch.Tensor):
        return weight.clone()
    return dataclasses.replace(weight, data=weight.data.clone())


def print_table(records: list[dict[str, Any]], rows: list[int]) -> None:
    """µs by rows, one line a candidate."""
    by_line: dict[str, dict[int, float]] = {}
    for record in records:
        by_line.setdefault(record["candidate"], {})[record["rows"]] = record["us"]
    for line, times in by_line.items():
        cells = "".join(f"{times[count]:9.0f}" for count in rows)
        print(f"  {line:42}{cells}", flush=True)


def profile_header(options: argparse.Namespace) -> dict[str, Any]:
    """What the measurements hold for."""
    return {
        "schema": 1,
        "cpu_flags": [flag for flag in PROFILE_FLAGS if flag in cpu_flags()],
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "torch": str(torch.__version__),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _json(document: dict[str, Any]) -> str:
    """JSON with one measurement a line."""
    head = json.dumps({k: v for k, v in document.items() if k != "rows"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(record)}" for record in document["rows"])
    return head.rstrip("}").rstrip() + f',\n "rows": [\n{lines}\n ]\n}}\n'


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU GEMM candidates, microseconds a call.")
    parser.add_argument("--shapes", default=SHAPES, help="NxK,NxK,...")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--formats", default="", help="weight formats, default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "thread"], default="wall")
    parser.add_argument(
        "--rotate-mib", type=float, default=400, help="bytes of weights in rotation"
    )
    parser.add_argument("--max-copies", type=int, default=120)
    parser.add_argument("--budget-ms", type=float, default=400, help="time for one number")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1 if options.clock == "thread" else options.threads)
    rows = [int(count) for count in options.rows.split(",")]
    wanted = set(options.formats.split(",")) if options.formats else set(FORMATS)
    header = profile_header(options)
    print(" ".join(f"{name}={value}" for name, value in header.items()))
    records: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        print(f"{shape}: µs at rows".ljust(44) + "".join(f"{count:9d}" for count in rows))
        for candidate in candidates():
            if candidate.weight_format not in wanted:
                continue
            if candidate.requirements:
                reasons = "; ".join(f"{w}: {r}, found {f}" for w, r, f in candidate.requirements)
                print(f"  {candidate.name}/{candidate.weight_format}: not here ({reasons})")
                continue
            with torch.inference_mode():
                measured = measure_candidate(candidate, n, k, rows, options)
            print_table(measured, rows)
            records += measured
        if options.json:
            options.json.write_text(_json({**header, "rows": records}))


if __name__ == "__main__":
    main()
