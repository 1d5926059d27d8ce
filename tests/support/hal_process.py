"""The command `hal` as a process, and a server that it started."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

START_DEADLINE_S = 240.0
SUPPORT = Path(__file__).parent
HAL = (sys.executable, "-c", "import sys; from hal.cli import main; sys.exit(main())")


def hal_without(*names: str) -> tuple[str, ...]:
    """The command `hal` of a CPU plug-in that lacks these candidates."""
    return (sys.executable, str(SUPPORT / "hal_without.py"), ",".join(names))


def run_hal(
    *args: object, command: Sequence[str] = HAL, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs to the end, without settings of the environment."""
    return subprocess.run(
        [*command, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        cwd=cwd,
        env=_environment(),
        check=False,
    )


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("HAL_")} | {"COLUMNS": "100"}


@dataclass
class ServerProcess:
    """A running `hal serve`."""

    process: subprocess.Popen[str]
    port: int
    ready_line: str
    output: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, timeout: float = 120) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, verify=False)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=280)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name with labels."""
        with self.http() as client:
            text = client.get("/metrics").raise_for_status().text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in ("#", ""))
        return {name: float(value) for name, value in samples}

    def stop(self, deadline_s: float = 60) -> int:
        """SIGTERM, then the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)


@contextlib.contextmanager
def serving(model: Path, *args: object, command: Sequence[str] = HAL) -> Iterator[ServerProcess]:
    """`hal serve` on a free port, from its ready line until the end of the block."""
    process = subprocess.Popen(
        [*command, "serve", str(model), "--port", "0", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    output: list[str] = []
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        """To the end: a server whose output nobody reads would block on a full pipe."""
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        line = _wait_for(lines, output)
        port = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert port is not None, line
        yield ServerProcess(process, int(port.group(1)), line, output)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_for(lines: queue.SimpleQueue[str], output: list[str]) -> str:
    """The line that says where the server is; fails the test with the output if there is none."""
    with contextlib.suppress(queue.Empty):
        deadline = time.monotonic() + START_DEADLINE_S
        while line := lines.get(timeout=max(0.01, deadline - time.monotonic())):
            if ": serving " in line:
                return line
    raise AssertionError("the server did not become ready:\n" + "".join(output[-40:]))
