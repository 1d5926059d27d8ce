"""What the routing of a call costs, beside other ways to route one, in the same run.

Each way calls the same do-nothing kernel with one tensor; printed are medians over repeats of the
time per call in µs, and what is above the direct call. `bound op` is what the engine calls
(`hal.binding`): for one token range, for two, and for three. The rest are the alternatives: a
dict look-up and a closure, a pluggy hook, operators of torch.library with and without a Python
kernel registered as custom_op, and `F.linear` on a 1x1 matrix, the least that a real torch
op costs.

  python benchmarks/routing_overhead.py                          the table
  python benchmarks/routing_overhead.py --model FILE_OR_FOLDER   also the share of a decode step

With --model, the engine decodes for real at batch 1, its own counters say how many bound calls a
step made, and the share is calls x overhead / step time. Goals: at most 0.3 µs a call (median)
and at most 1% of a decode step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy
import torch
from contenders.machine import load_average, machine_facts
from contenders.report import today

from hal.binding import BoundOps
from hal.candidates import KernelCandidate
from hal.ops.activation import GatedActivationRequest
from hal.ops.request import TokenRange
from hal.plan import OpSite, Plan, PlannedOp
from hal.selection import Decision
from hal.tiers import Tier

GOAL_US = 0.3
GOAL_SHARE = 0.01
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to route a call: a statement that is timed and the names that it uses."""

    statement: str
    names: dict[str, Any]


def kernel(x: torch.Tensor) -> torch.Tensor:
    """The do-nothing kernel that every way ends in."""
    return x


def bound_op(num_ranges: int) -> Way:
    """What a plan with this many token ranges gives the engine; the largest range is hit."""
    ranges = [TokenRange(16 * i + 1, 16 * (i + 1)) for i in range(num_ranges)]
    request = GatedActivationRequest(width=1, dtype="float32")
    site = OpSite(site="benchmark", request=request)
    ops = []
    for index, tokens in enumerate(ranges):
        choice = KernelCandidate(
            name=f"benchmark.activation.{index}",
            op=request.op,
            tier=Tier.NATIVE,
            summary="returns its argument",
            not_supported_reasons=lambda _: (),
            load=lambda: lambda _: kernel,
        )
        decision = Decision(
            request=request.with_tokens(tokens), choice=choice, estimate_us=None, rejected=()
        )
        ops.append(PlannedOp(site=site, tokens=tokens, decision=decision))
    plan = Plan(model={}, devices=(), settings={}, kv_bytes_per_token=0, ops=ops)
    op = BoundOps(plan).bind("benchmark")
    return Way("op(num_tokens, x)", {"op": op, "num_tokens": 16 * num_ranges})


def dict_and_closure() -> Way:
    table = {("gemm", "decode", "float32"): kernel}

    def look_up(key: tuple[str, str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            return table[key](x)

        return run

    return Way("run(x)", {"run": look_up(("gemm", "decode", "float32"))})


def pluggy_hook() -> Way:
    specification = pluggy.HookspecMarker("routing_overhead")
    implementation = pluggy.HookimplMarker("routing_overhead")

    class Hooks:
        @specification(firstresult=True)
        def run(self, x: torch.Tensor) -> Any: ...

    class Plugin:
        @implementation
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return kernel(x)

    manager = pluggy.PluginManager("routing_overhead")
    manager.add_hookspecs(Hooks)
    manager.register(Plugin())
    return Way("run(x=x)", {"run": manager.hook.run})


_LIBRARY = torch.library.Library("routing_overhead", "DEF")  # as long as the process lives


def library_op() -> Way:
    _LIBRARY.define("identity(Tensor(a) x) -> Tensor(a)")
    _LIBRARY.impl("identity", kernel, "CPU")
    return Way("run(x)", {"run": torch.ops.routing_overhead.identity.default})


def custom_op() -> Way:
    # A custom op may not return its input: an empty tensor is the least that it can make.
    def make(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    make.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    op = torch.library.custom_op("routing_overhead::make", make, mutates_args=())
    return Way("run(x)", {"run": op})


def ways() -> dict[str, Way]:
    """Name -> way, in the order of the table."""
    linear = {"run": torch.nn.functional.linear, "weight": torch.ones(1, 1)}
    return {
        "direct call": Way("run(x)", {"run": kernel}),
        "bound op, 1 range": bound_op(1),
        "bound op, 2 ranges": bound_op(2),
        "bound op, 3 ranges": bound_op(3),
        "dict look-up and closure": dict_and_closure(),
        "pluggy hook": pluggy_hook(),
        "torch.library op": library_op(),
        "torch custom_op": custom_op(),
        "F.linear on 1x1": Way("run(x, weight)", linear),
    }


def measure(chosen: dict[str, Way], repeats: int, number: int) -> dict[str, list[float]]:
    """µs of this thread per call, every repeat; the ways take turns, so a disturbance meets all."""
    x = torch.ones(1, 1)
    timers = {
        name: timeit.Timer(way.statement, timer=time.thread_time, globals=way.names | {"x": x})
        for name, way in chosen.items()
    }
    found: dict[str, list[float]] = {name: [] for name in timers}
    with torch.inference_mode():
        for timer in timers.values():
            timer.timeit(number // 10 + 1)
        for _ in range(repeats):
            for name, timer in timers.items():
                found[name].append(timer.timeit(number) / number * 1e6)
    return found


def decode_step(model: str, precision: str) -> dict[str, Any]:
    """A real engine at batch 1: median seconds of a decode step and the bound calls in one.

    The time is (T(n) - T(1)) / (n - 1) of whole generations, the calls the difference of the
    engine's own counters over the same steps.
    """
    import asyncio

    from hal_engine.api import GenerationRequest, SamplingParams
    from hal_engine.offline import generate_sync
    from hal_engine.serving import open_engine

    engine = open_engine(model, precision=precision, max_model_len=512, prefix_reuse=False)

    def run(name: str, new_tokens: int) -> tuple[float, int]:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(range(1000, 1128)),
            sampling=SamplingParams(max_tokens=new_tokens, ignore_eos=True),
        )
        calls = sum(row.calls for row in engine.op_calls())
        started = time.perf_counter()
        generate_sync(engine, [request])
        return time.perf_counter() - started, sum(r.calls for r in engine.op_calls()) - calls

    steps = 32
    run("warm-up", steps + 1)
    seconds, calls = [], []
    for index in range(5):
        short_s, short_calls = run(f"{index} short", 1)
        long_s, long_calls = run(f"{index} long", steps + 1)
        seconds.append((long_s - short_s) / steps)
        calls.append((long_calls - short_calls) / steps)
    asyncio.run(engine.close())
    return {
        "model": Path(model).name,
        "precision": precision,
        "step_ms": round(statistics.median(seconds) * 1e3, 4),
        "bound_calls": statistics.median(calls),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=31, help="medians of so many (default 31)")
    parser.add_argument("--number", type=int, default=20_000, help="calls each (default 20000)")
    parser.add_argument("--model", help="model for the share of a decode step")
    parser.add_argument(
        "--precision",
        nargs="+",
        default=["auto", "w8a8"],
        help="of that model; the share is worst where a step is shortest (default auto w8a8)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    return parser.parse_args()


def main() -> int:
    chosen = parse()
    torch.set_num_threads(2)
    load_before = load_average()
    found = measure(ways(), chosen.repeats, chosen.number)
    medians = {name: statistics.median(values) for name, values in found.items()}
    direct = medians["direct call"]
    print(f"{'way':28} {'µs a call':>10} {'above direct':>13}   spread")
    for name, values in found.items():
        spread = f"{min(values):.3f}–{max(values):.3f}"
        print(f"{name:28} {medians[name]:10.3f} {medians[name] - direct:13.3f}   {spread}")
    bound = [name for name in medians if name.startswith("bound op")]
    overhead = max(medians[name] - direct for name in bound)
    is_met = overhead <= GOAL_US
    print(f"routing adds {overhead:.3f} µs a call, goal {GOAL_US}: {'met' if is_met else 'MISSED'}")
    steps = [decode_step(chosen.model, name) for name in chosen.precision] if chosen.model else []
    for step in steps:
        step["share"] = step["bound_calls"] * overhead / (step["step_ms"] * 1e3)
        is_met = is_met and step["share"] <= GOAL_SHARE
        print(
            f"decode step, {step['precision']}: {step['step_ms']:.2f} ms, "
            f"{step['bound_calls']:.0f} bound calls, share {step['share']:.2%} (goal 1%)"
        )
    document = {
        "schema": "halstack.routing-overhead/1",
        "date": today(),
        "machine": machine_facts(),
        "torch": torch.__version__,
        "load_average": [load_before, load_average()],
        "median_us": {name: round(value, 4) for name, value in medians.items()},
        "spread_us": {n: [round(min(v), 4), round(max(v), 4)] for n, v in found.items()},
        "overhead_us": round(overhead, 4),
        "decode_steps": steps,
        "is_met": is_met,
    }
    chosen.results.mkdir(parents=True, exist_ok=True)
    target = chosen.results / f"{today()}-routing-overhead.json"
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
