"""The process in which one plug-in is probed: limits, stages, the report on the result channel.

Writes lines of JSON: `{"stage": …}` before each step, so that a crash can be placed, and one
`{"report": …}` last. Whatever a plug-in prints goes to stdout and stderr, which are kept apart
from the channel.
"""

import json
import os
import resource
import sys
import traceback
from typing import Any

from hal.errors import HalError, PluginError, PluginRejectedError, ProbeLimitError
from hal.host_probe import HostProbe
from hal.host_recording import RecordingHost
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import import_plugin, register_plugin
from hal.plugins.validation import to_document

MAX_RECORDED_BYTES = 16 << 20
_MAX_DETAIL = 4000


class _ResultChannel:
    """The pipe to the parent. Only the probed process writes to it, not one forked from it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    def write(self, document: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        data = memoryview(json.dumps(document, allow_nan=False).encode() + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]


def probe_in_this_process(
    entry: PluginEntry, host: HostProbe, memory_limit_mb: int, descriptor: int
) -> None:
    """Probe a plug-in and write the report to the descriptor. To be run in a forked child."""
    channel = _ResultChannel(descriptor)
    # Plug-ins can see where the channel is, as they could find it in /proc/self/fd anyway.
    sys.argv = [sys.argv[0], str(descriptor)]
    limit_memory(memory_limit_mb)
    report = _Probe(entry, host, memory_limit_mb, channel).run()
    if isinstance(host, RecordingHost):
        report["recorded"] = _recorded(host)
    channel.write({"report": report})


def limit_memory(megabytes: int) -> None:
    """No core dumps, and at most so much memory for this process's own data.

    RLIMIT_DATA counts what is written to; RLIMIT_AS would also count the address space that
    drivers reserve, often more than there is memory. Only the soft limit is set, so that a report
    about the limit can still be made.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = megabytes << 20
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _lift_memory_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


class _Probe:
    """One probe, step by step."""

    def __init__(
        self, entry: PluginEntry, host: HostProbe, memory_limit_mb: int, channel: _ResultChannel
    ) -> None:
        self._entry = entry
        self._host = host
        self._memory_limit_mb = memory_limit_mb
        self._channel = channel
        self._stage = "start of the probe"
        self._report: dict[str, Any] = {"info": None, "devices": [], "missing": [], "error": None}

    def run(self) -> dict[str, Any]:
        """The report, with the error if there was one."""
        try:
            self._steps()
        except PluginError as error:
            error = self._limit_error(error) if _is_out_of_memory(error) else error
            self._report["error"] = _document(error)
        except MemoryError as error:  # where even the message of another error had no room
            self._report["error"] = _document(self._limit_error(error))
        return self._report

    def _steps(self) -> None:
        self._enter(f"import of {self._entry.value}")
        implementation = import_plugin(self._entry)
        self._enter("hook hal_backend_info")
        plugin = Plugin(register_plugin(self._entry, implementation))
        self._report["info"] = to_document(plugin.info)
        self._enter("hook hal_missing_dependencies")
        missing = plugin.missing_dependencies(self._host)
        self._report["missing"] = [to_document(item) for item in missing]
        self._enter("hook hal_detect_devices")
        devices = plugin.detect_devices(self._host)
        self._report["devices"] = [to_document(item) for item in devices]

    def _enter(self, stage: str) -> None:
        self._stage = stage
        self._channel.write({"stage": stage})

    def _limit_error(self, cause: BaseException) -> ProbeLimitError:
        _lift_memory_limit()
        error = ProbeLimitError(
            f"{self._entry}, {self._stage}",
            f"at most {self._memory_limit_mb} MiB of memory",
            "more: a MemoryError",
            f"report it to the authors of {self._entry.distribution}; to allow more, set "
            f"plugins.probe_memory_mb; to go on without it, set "
            f'plugins.disable = ["{self._entry.key}"]',
        )
        error.__cause__ = cause
        return error


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False


def _document(error: HalError) -> dict[str, Any]:
    kind = next(
        kind
        for kind in (PluginRejectedError, ProbeLimitError, PluginError, HalError)
        if isinstance(error, kind)
    )
    return {
        "kind": kind.__name__,
        "message": [error.who, error.required, error.found, error.remedy],
        "detail": "".join(traceback.format_exception(error))[-_MAX_DETAIL:],
    }


def _recorded(host: RecordingHost) -> str:
    """What the host was asked, as JSON; empty if it is more than the channel takes."""
    text = host.recorded().to_json()
    return text if len(text) <= MAX_RECORDED_BYTES else ""
