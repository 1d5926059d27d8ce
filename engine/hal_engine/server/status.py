"""`/v1/hal/status`: what the page shows, as one small document that may be asked for each second.

It is made at most twice a second and in at most a hundredth of the time, however many pages ask. It
reads counters and runs nothing on the engine's thread: `/ready` is what runs a forward pass.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hal_engine.api import EngineDeadError
from hal_engine.server.errors import encode_json
from hal_engine.server.latencies import WINDOW_S
from hal_engine.server.limits import GENERATING_PATHS
from hal_engine.server.op_totals import op_totals, totals_without_ranges
from hal_engine.server.state import ServerState, state_of

SCHEMA = "halstack.status/1"
_FRESH_S = 0.5
_MOST_SHARE = 0.01  # of a core; a model of a hundred layers has thousands of counters
_MAX_REASONS = 50
_STATM = Path("/proc/self/statm")
# The page polls: what a browser or a proxy kept would be the past.
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


async def status(request: Request) -> Response:
    """What the page at `/` shows: state, counters, latencies of the last minute, calls by
    implementation. Cheap: it may be polled each second"""
    state = state_of(request)
    last = state.status
    now_s = time.monotonic()
    if last.body is None or now_s >= last.fresh_until_s:
        last.body = encode_json(status_document(state, now_s))
        spent_s = time.monotonic() - now_s
        last.fresh_until_s = now_s + max(_FRESH_S, spent_s / _MOST_SHARE)
    return Response(last.body, headers=_HEADERS, media_type="application/json")


def status_document(state: ServerState, now_s: float) -> dict[str, Any]:
    """The document at the monotonic time `now_s`; docs/server.md says what each key means."""
    engine = state.engine
    reasons = [_text(reason) for reason in engine.degraded_reasons()]
    counters: dict[str, int] | None
    try:
        counters = asdict(engine.stats())
        calls = totals_without_ranges(op_totals(engine.op_calls()))
    except EngineDeadError:  # its cause is for the log
        counters, calls = None, {}
    word, why = _state(state, counters is not None, reasons)
    return {
        "schema": SCHEMA,
        "status": word,
        "reasons": why[:_MAX_REASONS],
        "waivers": {"count": len(reasons), "in_use": reasons[:_MAX_REASONS]},
        "at_s": round(now_s - state.started_s, 3),
        "model": {
            "id": _text(engine.model_id),
            "names": [_text(name) for name in state.model_names],
            "max_model_len": engine.max_model_len,
            "has_chat_template": engine.tokenizer.has_chat_template,
        },
        "plan": {"hash": state.plan_hash},
        "server": {
            "version": _version(),
            "started_unix_s": state.created,
            "default_temperature": state.config.default_temperature,
        },
        "process": {
            "resident_bytes": resident_bytes(),
            "cpu_time_s": round(time.process_time(), 3),
        },
        "requests": {"active": state.active_requests, "by_outcome": _outcomes(state)},
        "engine": counters,
        "latency": {
            "window_s": WINDOW_S,
            "time_to_first_token": state.metrics.recent_first_tokens.summary(now_s),
            "inter_token": state.metrics.recent_tokens.summary(now_s),
        },
        "calls": [
            dict(
                zip(("op", "phase", "implementation", "tier", "calls"), (*key, count), strict=True)
            )
            for key, count in calls.items()
        ],
    }


def _state(state: ServerState, is_alive: bool, degraded: list[str]) -> tuple[str, list[str]]:
    """One word, and why it is not "ready"."""
    if not is_alive:
        return "stopped", ["the engine has stopped; the server's log says why"]
    if state.is_draining:
        return "draining", ["the server ends: it finishes what runs and takes no new requests"]
    return ("degraded", degraded) if degraded else ("ready", [])


def _outcomes(state: ServerState) -> dict[str, int]:
    """Finished requests to generating endpoints, by outcome."""
    counts: dict[str, int] = {}
    for family in state.metrics.requests.collect():
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "hal_requests_total" and labels["endpoint"] in GENERATING_PATHS:
                counts[labels["outcome"]] = counts.get(labels["outcome"], 0) + int(sample.value)
    return counts


def _text(text: str) -> str:
    """`text` as UTF-8 can carry it: a folder may have a name that is none."""
    return text.encode("utf-8", "replace").decode("utf-8")


@cache
def _version() -> str:
    return version("halstack")


def resident_bytes() -> int:
    """Memory of this process that is in RAM, files it maps included."""
    pages = int(_STATM.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
