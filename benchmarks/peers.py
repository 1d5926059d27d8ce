"""Our engine beside other engines, in one run, on the same weights.

Each contender runs in its own process and its own virtual environment, with the same prompts, the
same number of threads and SmolLM2-135M-Instruct made from one GGUF (see contenders/weights.py).
One runs at a time, the others are stopped by the kernel; they take turns over the rounds
(A B C A B C …), and the report gives medians, spread, and ratios paired by round.

  python benchmarks/peers.py --setup all          environments and weights, one after the other
  python benchmarks/peers.py --check              only: does each load, and are its answers right?
  python benchmarks/peers.py                      the timed run, on a quiet machine
  python benchmarks/peers.py --rounds 2 --prefill-repeats 1 --new-tokens 32    the same, shorter
  python benchmarks/peers.py --only halstack-fp32 openvino-fp32 --rounds 5

Rows: prefill of 512 tokens; decode of 64 new tokens after 128-token prompts at batch 1, 8, 16.
Results: benchmarks/results/<date>-peers.json and .md. Exit status 1 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from contenders.catalogue import ARTIFACTS, ENTRIES, ENVIRONMENTS, REFERENCE, Entry
from contenders.checking import Checker
from contenders.environments import SetupError, create_artifact, create_environment
from contenders.machine import available_bytes, load_average, machine_facts, others_busy
from contenders.measurement import PromptSource, Workload, measure_turn, warm_up
from contenders.process import ContenderError, ContenderProcess, RunOptions, end_on_sigterm
from contenders.report import Document, compare, markdown, today, write
from contenders.shares import measure_rates, share_table
from contenders.weights import VOCAB_SIZE

RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT_CACHE = Path.home() / ".cache" / "halstack-peers"
DEFAULT_GGUF = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# A contender stays loaded between its turns while at least this much memory is left for others.
MEMORY_RESERVE_BYTES = 6 * 2**30
METHOD = (
    "Prefill: time to the first token. Decode: B(n-1)/(T(n)-T(1)). `nats`: mean negative "
    "log-likelihood of the contender's greedy continuations under the fp32 model."
)


def goals(workload: Workload) -> dict[str, dict[str, float]]:
    """Smallest ratio to the best peer that we want, per precision class and row."""
    prefill, *decode = workload.rows()
    quantised = {row: 0.8 if row.endswith("x1") else 1.3 for row in decode}
    return {"fp32": dict.fromkeys([prefill, *decode], 1.0), "quantised": quantised}


class Comparison:
    """The rounds: who is loaded, whose turn it is, and what was found."""

    def __init__(
        self, entries: list[Entry], options: RunOptions, workload: Workload, checker: Checker | None
    ) -> None:
        self._options = options
        self._workload = workload
        self._entries = entries
        self._loaded: dict[str, ContenderProcess] = {}
        self.others_busy: list[float] = []
        self.contenders: dict[str, Any] = {
            entry.name: {"precision_class": entry.precision_class, "note": entry.note, "rounds": []}
            for entry in entries
        }
        self._checker = checker

    def run(self, rounds: int) -> None:
        """rounds 0 only loads and checks. A contender that fails is out, with its reason."""
        try:
            for index in range(max(rounds, 1)):
                for entry in self._entries:
                    if "error" not in self.contenders[entry.name]:
                        self._turn(entry, index, is_timed=rounds > 0)
        finally:
            if self._checker is not None:
                self._checker.close()
            for process in self._loaded.values():
                process.kill()

    def _turn(self, entry: Entry, index: int, *, is_timed: bool) -> None:
        record = self.contenders[entry.name]
        # Random prompts, the same for every contender of a round.
        source = PromptSource(VOCAB_SIZE, f"round {index}")
        try:
            process = self._ready(entry, record)
            if is_timed:
                self.others_busy.append(others_busy())
                process.resume()
                record["rounds"].append(measure_turn(process, self._workload, source))
                process.pause()
        except (ContenderError, SetupError) as error:
            record["error"] = str(error)
            stopped = self._loaded.pop(entry.name, None)
            if stopped is not None:
                stopped.kill()
            say(f"  {entry.name}: FAILED: {error}")
            return
        say(f"  {index + 1}: {entry.name}: {_summary(record, is_timed)}")
        if not is_timed or available_bytes() < MEMORY_RESERVE_BYTES:
            self._loaded.pop(entry.name).close()

    def _ready(self, entry: Entry, record: dict[str, Any]) -> ContenderProcess:
        """A loaded, checked, warm and paused process."""
        if entry.name in self._loaded:
            return self._loaded[entry.name]
        process = self._loaded[entry.name] = ContenderProcess(entry, self._options)
        process.load()
        record["versions"] = process.versions
        record.setdefault("load_seconds", round(process.load_seconds, 2))
        if self._checker is not None and "check" not in record:
            record["check"] = self._checker.check(process).to_dict()
        warm_up(process, self._workload, PromptSource(VOCAB_SIZE, "warm-up"))
        process.pause()
        return process


def _summary(record: dict[str, Any], is_timed: bool) -> str:
    if is_timed:
        return ", ".join(f"{row} {rate:.1f}" for row, rate in record["rounds"][-1].items())
    check = record["check"]
    verdict = "right" if check["is_right"] else "WRONG"
    return (
        f"{verdict}: {check['identical']}/{check['prompts']} identical (leading "
        f"{check['leading']}), {check['nats']} nats against {check['reference_nats']}"
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def set_up(names: list[str], cache: Path, gguf: Path) -> int:
    """Environments by name (or all) and the weights that their contenders read."""
    chosen = list(ENVIRONMENTS) if "all" in names else names
    failures = 0
    for name in chosen:
        try:
            create_environment(name, cache, say)
            for path in sorted({e.artifact for e in ENTRIES.values() if e.environment == name}):
                create_artifact(path, cache, gguf, say)
            say(f"{name}: ready")
        except SetupError as error:
            failures += 1
            say(f"{name}: FAILED: {error}")
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--setup",
        nargs="+",
        metavar="NAME",
        choices=["all", *ENVIRONMENTS],
        help=f"make environments and weights, then end: all, {', '.join(ENVIRONMENTS)}",
    )
    parser.add_argument("--check", action="store_true", help="load and check only, no timing")
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not compare answers with transformers; needs no environment but this one",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contenders or engines, e.g. llamacpp vllm-fp32"
    )
    parser.add_argument("--list", action="store_true", help="name all contenders, then end")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--prefill-repeats", type=int, default=3, help="in a turn (default 3)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded (default 64)")
    parser.add_argument("--threads", type=int, default=2, help="of each contender (default 2)")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"default {DEFAULT_CACHE}"
    )
    parser.add_argument("--gguf", type=Path, default=DEFAULT_GGUF, help=f"default {DEFAULT_GGUF}")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    return parser.parse_args()


def selected(only: list[str] | None) -> list[Entry]:
    """Entries whose name or engine is asked for; all without a wish."""
    if not only:
        return list(ENTRIES.values())
    known = set(ENTRIES) | {name.rsplit("-", 1)[0] for name in ENTRIES}
    unknown = sorted(set(only) - known)
    if unknown:
        raise SystemExit(f"peers: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return [e for n, e in ENTRIES.items() if n in only or n.rsplit("-", 1)[0] in only]


def main() -> int:
    chosen = parse()
    end_on_sigterm()
    if chosen.list:
        print("\n".join(f"{e.name:22} {e.precision_class}" for e in ENTRIES.values()))
        return 0
    if not chosen.gguf.exists():
        raise SystemExit(f"peers: required {chosen.gguf}; `python -m hal_engine.fetch_smollm2`")
    if chosen.setup:
        return set_up(chosen.setup, chosen.cache, chosen.gguf)
    entries = selected(chosen.only)
    # A check runs every shape of batch, but on few tokens.
    if chosen.check:
        workload = Workload(prefill_tokens=64, prompt_tokens=16)
    else:
        workload = Workload(prefill_repeats=chosen.prefill_repeats, new_tokens=chosen.new_tokens)
    options = RunOptions(
        cache=chosen.cache,
        threads=chosen.threads,
        max_sequences=workload.max_sequences,
        max_length=workload.max_length,
    )
    try:
        for path in sorted({entry.artifact for entry in entries}):
            if ARTIFACTS[path].maker in ("copy", "gguf"):  # made in seconds; others by --setup
                create_artifact(path, chosen.cache, chosen.gguf, say)
        checker = None
        if not chosen.no_check:
            create_artifact(ENTRIES[REFERENCE].artifact, chosen.cache, chosen.gguf, say)
            checker = Checker(options)
    except (SetupError, ContenderError) as error:
        raise SystemExit(f"peers: {error}") from error
    comparison = Comparison(entries, options, workload, checker)
    started = time.monotonic()
    load_before = load_average()
    machine_rates = measure_rates()
    comparison.run(0 if chosen.check else chosen.rounds)
    if chosen.check:
        return 0 if all(c.get("check") for c in comparison.contenders.values()) else 1
    document: Document = {
        "schema": "halstack.peers/1",
        "title": "Engines side by side, SmolLM2-135M-Instruct",
        "date": today(),
        "method": METHOD,
        "machine": machine_facts(),
        "rates": machine_rates,
        "threads": chosen.threads,
        "workload": dataclasses.asdict(workload),
        "rounds": chosen.rounds,
        "seconds": round(time.monotonic() - started),
        "load_average": [load_before, load_average()],
        "others_busy": comparison.others_busy,
        "contenders": comparison.contenders,
        "left_out": sorted(ENTRIES.keys() - {entry.name for entry in entries}),
        "ratios": compare(comparison.contenders, workload.rows(), goals(workload)),
    }
    text = markdown(document, workload.rows(), "tokens/s")
    text += "\n".join(share_table(document, workload.rows())) + "\n"
    data, table = write(document, text, chosen.results, "peers")
    print(text)
    say(f"written: {data} and {table.name}")
    return 0 if any(c["rounds"] for c in comparison.contenders.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
