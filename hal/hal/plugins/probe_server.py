"""The process that probes plug-ins: `python -m hal.plugins.probe_server RESULT_FD`.

It imports what probing needs once and forks from there, which takes milliseconds where a new
interpreter takes half a second. Each plug-in gets a warden, forked from here, and in the warden's
care the process it is probed in: the warden watches its deadline and its output, and leaves nothing
alive that came from it. No code of a plug-in runs in this process or in a warden.

Reads one JSON request from its standard input, and writes one line of JSON for each plug-in.
"""

import base64
import contextlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hal.device import DetectedDevice, MissingDependency
from hal.forked import adopt_orphans, end_descendants, end_with_parent, run_forked
from hal.hookspecs import BackendInfo
from hal.host import LocalHost, RecordedHost
from hal.host_probe import HostProbe
from hal.host_recording import RecordingHost
from hal.plugins.listing import PluginEntry
from hal.plugins.probe_child import MAX_RECORDED_BYTES, probe_in_this_process
from hal.plugins.validation import prepare_checks
from hal.processes import ProcessOutcome

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.5
# What a warden may take beyond the deadline of its plug-in, to clear up.
_GRACE_S = 5.0


def main() -> None:
    """Probe the plug-ins of the request."""
    parent = os.getppid()
    end_with_parent(parent)
    adopt_orphans()
    channel = int(sys.argv[1])
    request = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    entries = [PluginEntry(**entry) for entry in request["entries"]]
    prepare_checks(BackendInfo, DetectedDevice, MissingDependency)
    probe = partial(_probe, host=_host(request), limits=request["limits"])
    wardens = _Wardens(channel, probe, request["limits"]["deadline_s"])
    for index, answer in wardens.answers(entries, request["max_parallel"]):
        _write(channel, json.dumps({"index": index, **answer}).encode() + b"\n")
    end_descendants()
    # Not the interpreter's own end, which would take longer than a probe.
    os._exit(0)


def _host(request: Mapping[str, Any]) -> HostProbe:
    host: HostProbe = LocalHost()
    if request["host"] is not None:
        host = RecordedHost.from_json(request["host"])
    return RecordingHost(host) if request["is_recording"] else host


def _probe(entry: PluginEntry, *, host: HostProbe, limits: Mapping[str, Any]) -> ProcessOutcome:
    result_limit = limits["result_bytes"]
    if isinstance(host, RecordingHost):
        result_limit += 2 * MAX_RECORDED_BYTES  # JSON in JSON is escaped
    return run_forked(
        partial(probe_in_this_process, entry, host, limits["memory_mb"]),
        deadline_s=limits["deadline_s"],
        output_limit_bytes=limits["output_bytes"],
        result_limit_bytes=result_limit,
    )


@dataclass(slots=True)
class _Warden:
    """A running warden, what it has answered so far, and when it has to be at its end."""

    index: int
    pid: int
    deadline: float
    answer: bytearray


class _Wardens:
    """Forks one warden for each plug-in and collects what they answer."""

    def __init__(
        self, channel: int, probe: Callable[[PluginEntry], ProcessOutcome], deadline_s: float
    ) -> None:
        self._channel = channel
        self._probe = probe
        self._deadline_s = deadline_s + _GRACE_S

    def answers(
        self, entries: Sequence[PluginEntry], max_parallel: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index of the entry, outcome) for each, as they come. A warden that ends without an
        answer, or does not end, gives an empty one."""
        waiting = list(enumerate(entries))
        with selectors.DefaultSelector() as selector:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < max_parallel:
                    index, entry = waiting.pop(0)
                    pid, reader = self._start(entry)
                    deadline = time.monotonic() + self._deadline_s
                    warden = _Warden(index, pid, deadline, bytearray())
                    selector.register(reader, selectors.EVENT_READ, warden)
                for descriptor, warden in _ended(selector):
                    selector.unregister(descriptor)
                    os.close(descriptor)
                    _reap(warden.pid)
                    yield warden.index, _parsed(warden.answer)

    def _start(self, entry: PluginEntry) -> tuple[int, int]:
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(writer)
            return pid, reader
        try:
            end_with_parent(parent)
            adopt_orphans()
            os.close(reader)
            os.close(self._channel)
            _write(writer, json.dumps(_outcome_document(self._probe(entry))).encode())
        except BaseException:  # noqa: BLE001 - whatever it is, this must not go on as the server
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def _ended(selector: selectors.BaseSelector) -> list[tuple[int, _Warden]]:
    """Read what the wardens have answered, for at most a moment; those at their end."""
    ended = []
    for key, _ in selector.select(_POLL_S):
        chunk = os.read(key.fd, _CHUNK_BYTES)
        key.data.answer += chunk
        if not chunk:
            ended.append((key.fd, key.data))
    finished = {descriptor for descriptor, _ in ended}
    for key in selector.get_map().values():
        if key.fd not in finished and time.monotonic() > key.data.deadline:
            key.data.answer.clear()
            ended.append((key.fd, key.data))
    return ended


def _outcome_document(outcome: ProcessOutcome) -> dict[str, Any]:
    return {
        "end": outcome.end.value,
        "exit_code": outcome.exit_code,
        "elapsed_s": outcome.elapsed_s,
        "stdout": _encoded(outcome.stdout[-4096:]),
        "stderr": _encoded(outcome.stderr[-4096:]),
        "result": _encoded(outcome.result),
    }


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parsed(data: bytearray) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:  # the warden was killed before or while it answered
        return {}
    return answer if isinstance(answer, dict) else {}


def _reap(pid: int) -> None:
    # A warden that closed its pipe is at its end; one that was stopped is not.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
