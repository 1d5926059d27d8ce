"""Starts the server process that probes plug-ins, and reads the outcome of each probe from it."""

import base64
import binascii
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hal.host import RecordedHost, TransferableHost
from hal.host_recording import RecordingHost
from hal.plugins.listing import PluginEntry
from hal.processes import ProcessEnd, ProcessOutcome, run_bounded

DEFAULT_DEADLINE_S = 20.0
DEFAULT_MEMORY_MB = 2048
MAX_RESULT_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 1 << 20
_MAX_PARALLEL = 8
# Starting and importing takes half a second; on a machine that is busy or cold, much longer.
_SERVER_START_S = 120.0
_WARDEN_GRACE_S = 15.0
# The outcomes of thousands of plug-ins, with what they recorded.
_MAX_SERVER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """What one probe may take: seconds, MiB of memory, bytes of output and of its answer."""

    deadline_s: float = DEFAULT_DEADLINE_S
    memory_mb: int = DEFAULT_MEMORY_MB
    output_bytes: int = MAX_OUTPUT_BYTES
    result_bytes: int = MAX_RESULT_BYTES

    def describe(self) -> str:
        """In words."""
        return (
            f"an answer within {self.deadline_s:g} s, {self.memory_mb} MiB of memory, "
            f"{self.result_bytes} bytes and {self.output_bytes} bytes of output"
        )


@dataclass(frozen=True, slots=True)
class ServedProbes:
    """The outcomes of probes by the index of their plug-in, and how the server itself ended."""

    server: ProcessOutcome
    outcomes: Mapping[int, ProcessOutcome] = field(default_factory=dict)

    def lone_outcome(self) -> ProcessOutcome:
        """The outcome for the only plug-in of a server that ended without one: how the server
        ended. Nothing that it wrote is a report."""
        return replace(self.server, end=ProcessEnd.LOST, exit_code=None, result=b"")


def serve_probes(
    entries: Sequence[PluginEntry], host: TransferableHost, limits: ProbeLimits
) -> ServedProbes:
    """Probe the plug-ins in children of one server process.

    An outcome is missing if the server ended before it had it.
    """
    parallel = max(2, min(_MAX_PARALLEL, os.cpu_count() or 1))
    looked_at = host.inner if isinstance(host, RecordingHost) else host
    request = {
        "entries": [asdict(entry) for entry in entries],
        "host": looked_at.to_json() if isinstance(looked_at, RecordedHost) else None,
        "is_recording": isinstance(host, RecordingHost),
        "sys_path": [str(folder) for folder in sys.path],
        "limits": asdict(limits),
        "max_parallel": parallel,
    }
    rounds = -(-len(entries) // parallel)
    server = run_bounded(
        [
            sys.executable,
            "-P",
            "-X",
            "faulthandler",
            "-m",
            "hal.plugins.probe_server",
            "{result_fd}",
        ],
        deadline_s=_SERVER_START_S + rounds * (limits.deadline_s + _WARDEN_GRACE_S),
        environment=_server_environment(os.environ),
        stdin=json.dumps(request).encode(),
        result_limit_bytes=_MAX_SERVER_BYTES,
        is_contained=True,
    )
    outcomes: dict[int, ProcessOutcome] = {}
    for line in server.result.splitlines():
        answer = _parsed(line)
        if answer is not None:
            outcomes[answer[0]] = answer[1]
    return ServedProbes(server, outcomes)


def _server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    # Vendor extensions of torch are loaded deliberately, never because torch was imported.
    return {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _parsed(line: bytes) -> tuple[int, ProcessOutcome] | None:
    """None for the last line of a server that was killed while it wrote it."""
    try:
        answer: dict[str, Any] = json.loads(line)
        if "end" not in answer:
            return answer["index"], _no_answer()
        return answer["index"], ProcessOutcome(
            end=ProcessEnd(answer["end"]),
            exit_code=answer["exit_code"],
            stdout=base64.b64decode(answer["stdout"]),
            stderr=base64.b64decode(answer["stderr"]),
            result=base64.b64decode(answer["result"]),
            elapsed_s=answer["elapsed_s"],
        )
    except (ValueError, KeyError, TypeError, binascii.Error):
        return None


def _no_answer() -> ProcessOutcome:
    """The outcome for a plug-in that killed or stopped the process that watched over it."""
    return ProcessOutcome(
        end=ProcessEnd.LOST, exit_code=None, stdout=b"", stderr=b"", result=b"", elapsed_s=0.0
    )
