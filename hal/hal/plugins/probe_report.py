"""What a probe found: read from what its process wrote on the result channel and how it ended."""

import json
from dataclasses import dataclass, field
from typing import Any

from hal.device import DetectedDevice, MissingDependency
from hal.errors import HostReadError, PluginError, PluginRejectedError, ProbeLimitError
from hal.hookspecs import BackendInfo
from hal.host import RecordedHost
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import report_or_disable
from hal.plugins.probe_serving import ProbeLimits
from hal.plugins.validation import checked_devices, checked_info, from_document
from hal.processes import ProcessEnd, ProcessOutcome

_SHOWN_OUTPUT_BYTES = 2000
_ERRORS = {kind.__name__: kind for kind in (PluginError, PluginRejectedError, ProbeLimitError)}


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What one probe found. Exactly one of `info` and `error` may be missing; with an error
    there are no devices, for a plug-in that failed half-way is not used in part.

    Attributes:
        recorded: what the plug-in asked the host, if that was to be recorded and came through.
    """

    entry: PluginEntry
    info: BackendInfo | None = None
    devices: tuple[DetectedDevice, ...] = ()
    missing: tuple[MissingDependency, ...] = ()
    error: PluginError | None = None
    detail: str = ""
    recorded: RecordedHost | None = field(default=None, repr=False, compare=False)


def read_report(entry: PluginEntry, outcome: ProcessOutcome, limits: ProbeLimits) -> ProbeReport:
    """The report that follows from the outcome of a probe, with an error for whatever is wrong."""
    stage, document, problem = _parse_channel(outcome.result)
    detail = _shown_output(outcome)
    is_over_limit = outcome.end in (ProcessEnd.OUTPUT_LIMIT, ProcessEnd.DEADLINE)
    if is_over_limit:
        problem = _over_limit(outcome, limits)
    elif outcome.exit_code != 0:
        problem = outcome.describe()
    if problem or document is None:
        error_type = ProbeLimitError if is_over_limit else PluginError
        error = error_type(
            f"{entry}, {stage}",
            limits.describe(),
            problem or f"no answer, {outcome.describe()}",
            report_or_disable(entry),
        )
        return ProbeReport(entry, error=error, detail=detail)
    try:
        return _read_document(entry, document, detail)
    except (KeyError, TypeError, ValueError, HostReadError) as malformed:
        error = PluginError(
            f"{entry}, {stage}",
            "a well-formed answer on the result channel",
            f"{type(malformed).__name__}: {str(malformed)[:300]}",
            report_or_disable(entry),
        )
        return ProbeReport(entry, error=error, detail=detail)


def _over_limit(outcome: ProcessOutcome, limits: ProbeLimits) -> str:
    if len(outcome.result) >= limits.result_bytes:
        return f"an answer larger than {limits.result_bytes} bytes"
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


def _read_document(entry: PluginEntry, document: dict[str, Any], detail: str) -> ProbeReport:
    info_document = document["info"]
    info = None
    if info_document is not None:
        info = checked_info(from_document(BackendInfo, info_document))
    recording = document.get("recorded")
    recorded = RecordedHost.from_json(recording) if recording else None
    if document["error"] is not None:
        failure = document["error"]
        who, required, found, remedy = (str(part)[:2000] for part in failure["message"])
        return ProbeReport(
            entry,
            info=info,
            missing=_read_missing(document),
            error=_ERRORS[failure["kind"]](who, required, found, remedy),
            detail=str(failure["detail"]),
            recorded=recorded,
        )
    if info is None:
        raise ValueError("a report without an error must have `info`")
    devices = checked_devices(from_document(DetectedDevice, item) for item in document["devices"])
    return ProbeReport(
        entry, info, devices, _read_missing(document), detail=detail, recorded=recorded
    )


def _read_missing(document: dict[str, Any]) -> tuple[MissingDependency, ...]:
    return tuple(from_document(MissingDependency, item) for item in document["missing"])


def _shown_output(outcome: ProcessOutcome) -> str:
    tail = (outcome.stderr or outcome.stdout)[-_SHOWN_OUTPUT_BYTES:]
    return tail.decode(errors="replace").strip()
