"""A server in its own process group on a free port; stopped while others are measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from contenders.environments import python_of
from contenders.process import ContenderError, RunOptions, child_environment
from contenders.servers import ServerEntry
from contenders.streaming_client import HOST, get_status

START_DEADLINE_S = 900.0  # vLLM compiles on its first start
STOP_DEADLINE_S = 10.0


class ServerProcess:
    """Raises ContenderError if the server ends or is not ready in time."""

    def __init__(self, entry: ServerEntry, options: RunOptions) -> None:
        self.entry = entry
        self.port = _free_port()
        self.model = entry.model(options.models)
        command = entry.command(
            options.cache,
            model=self.model,
            port=self.port,
            threads=options.threads,
            clients=options.max_sequences,
        )
        logs = options.cache / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log_path = logs / f"server-{entry.name}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(options.threads)
                | entry.environment_variables(options.threads),
                cwd=Path(__file__).resolve().parent.parent,
                start_new_session=True,
            )

    def wait_until_ready(self) -> float:
        """Seconds from now until `/v1/models` is answered."""
        started = time.monotonic()
        while time.monotonic() - started < START_DEADLINE_S:
            if self._process.poll() is not None:
                lines = self._log_path.read_text(errors="replace").strip().splitlines()
                last = " | ".join(line.strip() for line in lines[-3:])
                raise ContenderError(f"server {self.entry.name}: it ended: {last[-600:]}")
            if asyncio.run(get_status(self.port, "/v1/models")) == 200:
                return time.monotonic() - started
            time.sleep(0.5)
        raise ContenderError(f"server {self.entry.name}: not ready in {START_DEADLINE_S:.0f} s")

    def versions(self, options: RunOptions) -> dict[str, str]:
        """Versions of the packages that serve, asked of the server's environment."""
        code = (
            "import importlib.metadata as m, sys\n"
            "for name in sys.argv[1:]: print(name, m.version(name))"
        )
        python = str(python_of(self.entry.environment, options.cache))
        command = [python, "-c", code, *self.entry.packages]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return dict(line.split(" ", 1) for line in output.splitlines())

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """SIGTERM, then the end of its whole process group."""
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            self.resume()
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                self._process.wait(STOP_DEADLINE_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
