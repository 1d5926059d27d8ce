"""The README's requests, sent as printed to a server that serves the README's model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from document_blocks import ROOT, all_blocks, commands_of
from shown_output import check_shown

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
START_DEADLINE_S = 600  # the first start on a machine compiles the kernels
README_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Started:
    """Where the server is, and all that it printed until it was ready."""

    url: str
    printed: str


@pytest.fixture(scope="module")
def started(command_environment: dict[str, str], smollm2_gguf: Path) -> Iterator[Started]:
    """The command that `make serve` ends with, on a port that is free."""
    command = ["hal", "serve", str(smollm2_gguf.relative_to(ROOT)), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--precision", "auto"],
        cwd=ROOT,
        env=command_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    guard = threading.Timer(START_DEADLINE_S, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            ready = re.match(r"ready: serving \S+ at (http://\S+)$", line)
            if ready:
                break
        else:
            pytest.fail(f"the server ended before it was ready:\n{''.join(lines)}")
        # What it logs later must be read too, or the pipe would fill.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Started(ready[1], "".join(lines))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        guard.cancel()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(started: Started) -> str:
    return started.url


def test_make_serve(started: Started) -> None:
    """The first command of the README, but for what `make` itself does before it."""
    commands = [c for b in all_blocks() if b.document == "README.md" for c in commands_of(b)]
    (command,) = [c for c in commands if c.line == "make serve"]
    echoed = next(line for line in command.shown if line.startswith(".venv/bin/hal serve "))
    made = subprocess.run(
        ["make", "-n", "serve"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert echoed in made.stdout.splitlines()
    shown = command.shown[command.shown.index(echoed) + 1 :]
    assert len(shown) > 10
    check_shown(tuple(line.replace(README_URL, started.url) for line in shown), started.printed)


def _environment(environment: dict[str, str]) -> dict[str, str]:
    return environment | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def test_curl(url: str, command_environment: dict[str, str]) -> None:
    commands = [c for b in all_blocks() if b.document == "README.md" for c in commands_of(b)]
    (command,) = [c for c in commands if c.line.startswith("curl ")]
    assert README_URL in command.line
    done = subprocess.run(
        ["bash", "-ec", command.line.replace(README_URL, url)],
        env=_environment(command_environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    shown = next(line for line in command.shown if '"content"' in line)
    content = json.dumps(answer["choices"][0]["message"]["content"], ensure_ascii=False)
    assert content in shown


def test_openai_client(url: str, command_environment: dict[str, str]) -> None:
    (block,) = [b for b in all_blocks() if "openai" in b.directive]
    assert README_URL in block.text
    done = subprocess.run(
        [sys.executable, "-c", block.text.replace(README_URL, url)],
        env=_environment(command_environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 5
