"""The child process of a probe: `python -m hal.plugins.probe_child RESULT_FD`.

Reads one JSON request from its standard input, writes lines of JSON to the result channel:
`{"stage": …}` before each step, so that a crash can be placed, and one `{"report": …}` last.
Whatever a plug-in prints goes to stdout and stderr, which are kept apart from the channel.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1
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


def _confine() -> None:
    """No core dumps, and no life after the parent's death."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _probe(request: dict[str, Any], channel: _ResultChannel) -> dict[str, Any]:
    from hal.errors import PluginError, PluginRejectedError
    from hal.host import LocalHost, RecordedHost
    from hal.plugins.calls import Plugin
    from hal.plugins.listing import PluginEntry
    from hal.plugins.loading import import_plugin, register_plugin
    from hal.plugins.validation import to_document

    entry = PluginEntry(**request["entry"])
    recording = request["host"]
    host = LocalHost() if recording is None else RecordedHost.from_json(recording)
    report: dict[str, Any] = {"info": None, "devices": [], "missing": [], "error": None}
    try:
        channel.write({"stage": f"import of {entry.value}"})
        implementation = import_plugin(entry)
        channel.write({"stage": "hook hal_backend_info"})
        plugin = Plugin(register_plugin(entry, implementation))
        report["info"] = to_document(plugin.info)
        channel.write({"stage": "hook hal_missing_dependencies"})
        report["missing"] = [to_document(item) for item in plugin.missing_dependencies(host)]
        channel.write({"stage": "hook hal_detect_devices"})
        report["devices"] = [to_document(item) for item in plugin.detect_devices(host)]
    except PluginError as error:
        report["error"] = {
            "is_rejection": isinstance(error, PluginRejectedError),
            "message": [error.who, error.required, error.found, error.remedy],
            "detail": "".join(traceback.format_exception(error))[-_MAX_DETAIL:],
        }
    return report


def main() -> None:
    """Probe the plug-in of the request; always ends the process."""
    channel = _ResultChannel(int(sys.argv[1]))
    _confine()
    request = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    report = _probe(request, channel)
    channel.write({"report": report})
    # Not sys.exit: a plug-in's threads and exit handlers get no say in how this ends.
    os._exit(0)


if __name__ == "__main__":
    main()
