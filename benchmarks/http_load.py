"""Servers side by side under load, through OpenAI's streaming API, on this machine only.

At 1, 8 and 16 clients, each of which sends one request after the other (128-token prompts, 64 new
tokens, greedy): throughput (generated tokens / wall time) and the time to the first token (TTFT,
median and p95). One server runs at a time, the others are stopped by the kernel; they take turns
over the rounds. Requests are bounded in number and time; the client talks to 127.0.0.1 only and
shares the processors with the server, for every server alike.

  python benchmarks/peers.py --setup all          environments and weights
  python benchmarks/http_load.py                  all servers
  python benchmarks/http_load.py --only halstack-fp32 vllm-fp32 --clients 8 16

Results: benchmarks/results/<date>-http-load.json and .md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders.environments import SetupError
from contenders.machine import available_bytes, load_average, machine_facts, others_busy
from contenders.process import ContenderError, RunOptions, end_on_sigterm
from contenders.report import Document, compare, markdown, today, write
from contenders.server_process import ServerProcess
from contenders.servers import MAX_LENGTH, SERVERS
from contenders.streaming_client import StreamError, StreamResult, complete
from contenders.weights import HUGGING_FACE_FOLDER
from peers import DEFAULT_CACHE, MEMORY_RESERVE_BYTES, RESULTS, say

PROMPT_TOKENS = 128
NEW_TOKENS = 64
REQUESTS_PER_CLIENT = {1: 3, 8: 2, 16: 2}
CHECK_PROMPT = "The three primary colours are red, yellow and"
METHOD = (
    "tok/s: generated tokens / wall time at so many clients; TTFT in seconds over all requests of "
    "all rounds. Ratios of TTFT are to the peer with the least; smaller is better."
)


class PromptWriter:
    """Texts of exactly so many tokens: words that are one token each, drawn at random."""

    def __init__(self, models: Path, seed: str) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(models / HUGGING_FACE_FOLDER / "tokenizer.json"))
        self._draw = random.Random(seed)
        candidates = sorted(
            name[1:]
            for name in tokenizer.get_vocab()
            if name.startswith("Ġ")
            and name[1:].isascii()
            and name[1:].isalpha()
            and name[1:].islower()
        )
        self._words = [w for w in candidates if len(tokenizer.encode(f" {w}").ids) == 1]
        if len(tokenizer.encode(self.write(PROMPT_TOKENS)).ids) != PROMPT_TOKENS:
            raise RuntimeError(f"http_load: required prompts of {PROMPT_TOKENS} tokens")

    def write(self, length: int) -> str:
        return "".join(f" {self._draw.choice(self._words)}" for _ in range(length))


async def run_level(
    server: ServerProcess, clients: int, prompts: Sequence[str]
) -> tuple[list[StreamResult], float]:
    """All prompts, dealt to the clients beforehand; (results, wall seconds)."""

    async def client(own: Sequence[str]) -> list[StreamResult]:
        return [await complete(server.port, request(server, prompt, NEW_TOKENS)) for prompt in own]

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(prompts[index::clients])) for index in range(clients)]
    seconds = time.perf_counter() - started
    return [result for task in tasks for result in task.result()], seconds


def request(server: ServerProcess, prompt: str, new_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model_name(server), "prompt": prompt, "stream": True}
    body |= {"max_tokens": new_tokens, "temperature": 0.0}
    if server.entry.asks_usage:
        body["stream_options"] = {"include_usage": True}
    return body | dict(server.entry.body)


def model_name(server: ServerProcess) -> str:
    """Ours goes by the file's name, the others by the path that they were started with."""
    is_own = server.entry.name.startswith("halstack-")
    return server.model.stem if is_own else str(server.model)


class Comparison:
    """The rounds: who is up, whose turn it is, and what was found."""

    def __init__(self, names: Sequence[str], options: RunOptions, clients: Sequence[int]) -> None:
        self._names = names
        self._options = options
        self._clients = clients
        self._up: dict[str, ServerProcess] = {}
        self.others_busy: list[float] = []
        self.servers: dict[str, Any] = {
            name: {"precision_class": SERVERS[name].precision_class, "rounds": [], "ttft_s": {}}
            for name in names
        }

    def run(self, rounds: int) -> None:
        try:
            for index in range(rounds):
                for name in self._names:
                    if "error" not in self.servers[name]:
                        self._turn(name, index)
        finally:
            for server in self._up.values():
                server.close()

    def _turn(self, name: str, index: int) -> None:
        record = self.servers[name]
        writer = PromptWriter(self._options.models, f"round {index}")
        try:
            server = self._started(name, record)
            self.others_busy.append(others_busy())
            server.resume()
            record["rounds"].append(self._measure(server, record, writer))
            server.pause()
        except (ContenderError, SetupError, StreamError, ExceptionGroup, TimeoutError) as error:
            record["error"] = _first_cause(error)
            say(f"  {name}: FAILED: {record['error']}")
            if name in self._up:
                self._up.pop(name).close()
            return
        found = ", ".join(f"{row} {value:.3g}" for row, value in record["rounds"][-1].items())
        say(f"  {index + 1}: {name}: {found}")
        if available_bytes() < MEMORY_RESERVE_BYTES:
            self._up.pop(name).close()

    def _started(self, name: str, record: dict[str, Any]) -> ServerProcess:
        if name in self._up:
            return self._up[name]
        server = self._up[name] = ServerProcess(SERVERS[name], self._options)
        record["start_seconds"] = round(server.wait_until_ready(), 1)
        record["versions"] = server.versions(self._options)
        answer = asyncio.run(complete(server.port, request(server, CHECK_PROMPT, 16)))
        record["answer"] = answer.text
        writer = PromptWriter(self._options.models, "warm-up")
        for clients in self._clients:  # compilation and packing happen here
            asyncio.run(
                run_level(server, clients, [writer.write(PROMPT_TOKENS) for _ in range(clients)])
            )
        server.pause()
        return server

    def _measure(
        self, server: ServerProcess, record: dict[str, Any], writer: PromptWriter
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for clients in self._clients:
            count = clients * REQUESTS_PER_CLIENT.get(clients, 2)
            prompts = [writer.write(PROMPT_TOKENS) for _ in range(count)]
            results, seconds = asyncio.run(run_level(server, clients, prompts))
            first = sorted(result.first_token_s for result in results)
            record["ttft_s"].setdefault(str(clients), []).extend(round(v, 4) for v in first)
            found[f"tok/s x{clients}"] = sum(result.tokens for result in results) / seconds
            found[f"TTFT p50 x{clients}"] = statistics.median(first)
            found[f"TTFT p95 x{clients}"] = p95(first)
            record["tokens_per_request"] = statistics.mean(r.tokens for r in results)
        return found


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95% of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * 95 // 100) - 1)]


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def check_answers(servers: dict[str, Any]) -> None:
    """fp32 servers must continue the check prompt alike; what most of them say is right.

    Quantised ones may differ; whether they are right is checked by `peers.py`.
    """
    answers = [s.get("answer") for s in servers.values() if s["precision_class"] == "fp32"]
    given = [answer for answer in answers if answer is not None]
    for server in servers.values():
        if "answer" in server and given:
            is_equal = server["answer"] == statistics.mode(given)
            server["check"] = {
                "is_right": is_equal or server["precision_class"] != "fp32",
                "text": "same answer as fp32" if is_equal else "another answer than fp32",
            }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(SERVERS), help="servers; default all")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="of each server (default 2)")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help=f"default {DEFAULT_CACHE}"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    return parser.parse_args()


def main() -> int:
    chosen = parse()
    end_on_sigterm()
    if not all(1 <= clients <= 64 for clients in chosen.clients):
        raise SystemExit("http_load: required 1 to 64 clients")
    options = RunOptions(
        cache=chosen.cache,
        threads=chosen.threads,
        max_sequences=max(chosen.clients),
        max_length=MAX_LENGTH,
    )
    names = [name for name in SERVERS if not chosen.only or name in chosen.only]
    comparison = Comparison(names, options, chosen.clients)
    started, load_before = time.monotonic(), load_average()
    comparison.run(chosen.rounds)
    check_answers(comparison.servers)
    rates = [f"tok/s x{clients}" for clients in chosen.clients]
    waits = [f"TTFT {q} x{clients}" for clients in chosen.clients for q in ("p50", "p95")]
    goals = {c: {r: 1.3 for r in rates if not r.endswith("x1")} for c in ("fp32", "quantised")}
    late = [f"TTFT p95 x{clients}" for clients in chosen.clients]
    late_goals = {c: {r: 0.7 for r in late if not r.endswith("x1")} for c in goals}
    document: Document = {
        "schema": "halstack.http-load/1",
        "title": "Servers side by side, SmolLM2-135M-Instruct",
        "date": today(),
        "method": METHOD,
        "machine": machine_facts(),
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "seconds": round(time.monotonic() - started),
        "load_average": [load_before, load_average()],
        "others_busy": comparison.others_busy,
        "contenders": comparison.servers,
        "left_out": sorted(SERVERS.keys() - set(names)),
        "ratios": compare(comparison.servers, rates, goals)
        + compare(comparison.servers, late, late_goals, smallest=True),
    }
    text = markdown(document, rates + waits, "tokens/s and seconds")
    data, table = write(document, text, chosen.results, "http-load")
    print(text)
    say(f"written: {data} and {table.name}")
    return 0 if any(s["rounds"] for s in comparison.servers.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
