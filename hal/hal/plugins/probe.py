"""Probe plug-ins in child processes, so that none of them can harm this one or hide another."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from hal.device import DetectedDevice, MissingDependency
from hal.errors import PluginError, PluginRejectedError
from hal.hookspecs import BackendInfo
from hal.host import LocalHost, TransferableHost
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import report_or_disable
from hal.plugins.validation import checked_devices, checked_info, from_document
from hal.processes import ProcessEnd, ProcessOutcome, run_bounded

DEFAULT_DEADLINE_S = 20.0
MAX_RESULT_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 1 << 20
_MAX_PARALLEL = 2
_SHOWN_OUTPUT_BYTES = 2000


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What one probe found. Exactly one of `info` and `error` may be missing; with an error
    there are no devices, for a plug-in that failed half-way is not used in part."""

    entry: PluginEntry
    info: BackendInfo | None = None
    devices: tuple[DetectedDevice, ...] = ()
    missing: tuple[MissingDependency, ...] = ()
    error: PluginError | None = None
    detail: str = ""


Probe = Callable[[PluginEntry], ProbeReport]


def probe_plugins(
    entries: Sequence[PluginEntry],
    host: TransferableHost,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> tuple[ProbeReport, ...]:
    """Probe each plug-in in a child process of its own, at most two at a time.

    The reports come in the order of `entries`; none depends on another.
    """

    def probe(entry: PluginEntry) -> ProbeReport:
        return probe_plugin(entry, host, deadline_s=deadline_s)

    with ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="hal-probe") as pool:
        return tuple(pool.map(probe, entries))


def probe_plugin(
    entry: PluginEntry, host: TransferableHost, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> ProbeReport:
    """Probe one plug-in. Never raises for what the plug-in does: that is in the report."""
    recording = None if isinstance(host, LocalHost) else host.to_json()
    request = {
        "entry": asdict(entry),
        "host": recording,
        "sys_path": [str(folder) for folder in sys.path],
    }
    outcome = run_bounded(
        [
            sys.executable,
            "-P",
            "-X",
            "faulthandler",
            "-m",
            "hal.plugins.probe_child",
            "{result_fd}",
        ],
        deadline_s=deadline_s,
        environment=_child_environment(os.environ),
        stdin=json.dumps(request).encode(),
        output_limit_bytes=MAX_OUTPUT_BYTES,
        result_limit_bytes=MAX_RESULT_BYTES,
        is_contained=True,
    )
    return _read_outcome(entry, outcome, deadline_s)


def _child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    # Vendor extensions of torch are loaded deliberately, never because torch was imported.
    return {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _read_outcome(entry: PluginEntry, outcome: ProcessOutcome, deadline_s: float) -> ProbeReport:
    stage, document, problem = _parse_channel(outcome.result)
    detail = _shown_output(outcome)
    if outcome.end is ProcessEnd.OUTPUT_LIMIT:
        problem = _over_limit(outcome)
    elif outcome.end is ProcessEnd.DEADLINE or outcome.exit_code != 0:
        problem = outcome.describe()
    if problem or document is None:
        error = PluginError(
            f"{entry}, {stage}",
            f"an answer within {deadline_s:g} s, {MAX_RESULT_BYTES} bytes "
            f"and {MAX_OUTPUT_BYTES} bytes of output",
            problem or f"no answer, {outcome.describe()}",
            report_or_disable(entry),
        )
        return ProbeReport(entry, error=error, detail=detail)
    try:
        return _read_report(entry, document, detail)
    except (KeyError, TypeError, ValueError) as malformed:
        error = PluginError(
            f"{entry}, {stage}",
            "a well-formed answer on the result channel",
            f"{type(malformed).__name__}: {str(malformed)[:300]}",
            report_or_disable(entry),
        )
        return ProbeReport(entry, error=error, detail=detail)


def _over_limit(outcome: ProcessOutcome) -> str:
    if len(outcome.result) >= MAX_RESULT_BYTES:
        return f"an answer larger than {MAX_RESULT_BYTES} bytes"
    return outcome.describe()


def _parse_channel(data: bytes) -> tuple[str, dict[str, Any] | None, str]:
    """The last stage reached, the report if there is exactly one and it is last, the problem."""
    stage = "start of the probe"
    reports: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            return stage, None, f"bytes on the result channel that are not JSON: {line[:80]!r}"
        if not isinstance(document, dict) or reports:
            return stage, None, f"more on the result channel than one report: {line[:80]!r}"
        if isinstance(document.get("report"), dict):
            reports.append(document["report"])
        else:
            stage = str(document.get("stage", stage))[:200]
    return stage, reports[0] if reports else None, ""


def _read_report(entry: PluginEntry, document: dict[str, Any], detail: str) -> ProbeReport:
    info_document = document["info"]
    info = None
    if info_document is not None:
        info = checked_info(from_document(BackendInfo, info_document))
    if document["error"] is not None:
        failure = document["error"]
        who, required, found, remedy = (str(part)[:2000] for part in failure["message"])
        error_type = PluginRejectedError if failure["is_rejection"] else PluginError
        return ProbeReport(
            entry,
            info=info,
            missing=_read_missing(document),
            error=error_type(who, required, found, remedy),
            detail=str(failure["detail"]),
        )
    if info is None:
        raise ValueError("a report without an error must have `info`")
    devices = checked_devices(from_document(DetectedDevice, item) for item in document["devices"])
    return ProbeReport(entry, info, devices, _read_missing(document), detail=detail)


def _read_missing(document: dict[str, Any]) -> tuple[MissingDependency, ...]:
    return tuple(from_document(MissingDependency, item) for item in document["missing"])


def _shown_output(outcome: ProcessOutcome) -> str:
    tail = (outcome.stderr or outcome.stdout)[-_SHOWN_OUTPUT_BYTES:]
    return tail.decode(errors="replace").strip()
