"""A contender in its own process and environment, driven from here; stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from contenders.catalogue import Entry
from contenders.environments import python_of

LOAD_DEADLINE_S = 900.0  # vLLM compiles on its first start
CALL_DEADLINE_S = 600.0
_BENCHMARKS = Path(__file__).resolve().parent.parent


class ContenderError(RuntimeError):
    """A contender could not be started, died or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is the same for every contender of a run. cache: environments, weights and logs."""

    cache: Path
    threads: int
    max_sequences: int
    max_length: int

    @property
    def models(self) -> Path:
        return self.cache / "models"


def child_environment(threads: int) -> dict[str, str]:
    """Same number of threads for every runtime; nothing is fetched or reported anywhere."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return (
        dict(os.environ)
        | {name: str(threads) for name in names}
        | {
            "PYTHONPATH": str(_BENCHMARKS),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
    )


def end_on_sigterm() -> None:
    """SIGTERM unwinds the program, so that no stopped process is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class ContenderProcess:
    """Between `resume()` and `pause()` it is the only one that may run.

    A paused process is stopped by the kernel (SIGSTOP to its process group), so that threads which
    spin while they wait for work take nothing from the others.
    """

    def __init__(self, entry: Entry, options: RunOptions) -> None:
        self.entry = entry
        self.versions: dict[str, str] = {}
        self.load_seconds = 0.0
        logs = options.cache / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log_path = logs / f"{entry.name}.log"
        command = [str(python_of(entry.environment, options.cache)), "-m", "contenders.child"]
        command += [entry.name, "--models", str(options.models)]
        command += ["--threads", str(options.threads)]
        command += ["--max-sequences", str(options.max_sequences)]
        command += ["--max-length", str(options.max_length)]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(options.threads),
                cwd=_BENCHMARKS,
                start_new_session=True,
            )
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def load(self) -> None:
        """Loads the weights. Raises ContenderError with the end of the log if that fails."""
        answer = self._ask({"do": "load"}, LOAD_DEADLINE_S)
        self.versions = answer["versions"]
        self.load_seconds = answer["seconds"]

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[float, list[list[int]]]:
        """(seconds, continuations). Raises ContenderError also when a continuation is short."""
        request = {"do": "generate", "prompts": [list(p) for p in prompts]}
        answer = self._ask(request | {"new_tokens": new_tokens}, CALL_DEADLINE_S)
        lengths = sorted({len(tokens) for tokens in answer["tokens"]})
        if len(answer["tokens"]) != len(prompts) or lengths != [new_tokens]:
            raise ContenderError(
                f"{self.entry.name}: required {len(prompts)} continuations of {new_tokens} tokens, "
                f"found {len(answer['tokens'])} of {lengths}"
            )
        return float(answer["seconds"]), answer["tokens"]

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> float:
        """Mean nats per token of a continuation; only transformers answers this."""
        request = {"do": "score", "prompt": list(prompt), "continuation": list(continuation)}
        return float(self._ask(request, CALL_DEADLINE_S)["nats"])

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Asks it to end, then ends it."""
        # Whatever happens here, it is killed, and nothing more is measured on it.
        with contextlib.suppress(ContenderError, subprocess.TimeoutExpired):
            self.resume()
            self._ask({"do": "close"}, 20.0)
            self._process.wait(20.0)
        self.kill()

    def kill(self) -> None:
        """Ends the process and everything it started; harmless on an ended one."""
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # what is left has no reader
                    stream.close()

    def _ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise ContenderError(f"{self.entry.name}: it is closed")
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise self._died(request["do"]) from error
        line = self._read_line(request["do"], time.monotonic() + deadline_s)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read_line(self, what: str, deadline: float) -> bytes:
        stdout = self._process.stdout
        if stdout is None:
            raise ContenderError(f"{self.entry.name}: it has no output")
        while b"\n" not in self._pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([stdout], [], [], remaining)[0]:
                raise ContenderError(f"{self.entry.name}: no answer to `{what}` in time")
            chunk = os.read(stdout.fileno(), 1 << 20)
            if not chunk:
                raise self._died(what)
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _died(self, what: str) -> ContenderError:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        last = " | ".join(line.strip() for line in lines[-3:])
        return ContenderError(f"{self.entry.name}: it ended during `{what}`: {last[-600:]}")
