"""What operators ask: alive, ready, metrics, the plan, the models."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from hal_engine.api import EngineDeadError
from hal_engine.server.endpoint import json_response
from hal_engine.server.errors import ApiError, encode_json
from hal_engine.server.state import ServerState, check_model, state_of

_GRACE_S = 0.5  # for an engine that keeps its deadline a little late


async def health(request: Request) -> Response:
    """200 while the process answers."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 `ready` or `degraded` with reasons; 503 `not ready` with reasons.

    Runs a dummy forward, at most one at a time and one per `ready_cache_s`.
    """
    state = state_of(request)
    if state.is_draining:
        return _readiness(state, 503, "not ready", ["the server is draining"])
    failure = await _check(state)
    if failure is not None:
        return _readiness(state, 503, "not ready", [failure])
    reasons = list(state.engine.degraded_reasons())
    return _readiness(state, 200, "degraded" if reasons else "ready", reasons)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    state = state_of(request)
    return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def plan(request: Request) -> Response:
    """The plan in use."""
    state = state_of(request)
    if state.plan_body is None:  # megabytes for a large model, and it never changes
        state.plan_body = encode_json(state.engine.plan_json())
    return Response(state.plan_body, media_type="application/json")


async def list_models(request: Request) -> Response:
    """OpenAI's list of models."""
    state = state_of(request)
    names = state.model_names
    return json_response({"object": "list", "data": [_model(state, name) for name in names]})


async def retrieve_model(request: Request) -> Response:
    """One model; ApiError 404 for an unknown one."""
    state = state_of(request)
    name = request.path_params["model"]
    check_model(name, state)
    return json_response(_model(state, name))


def not_found(status: int, headers: dict[str, str]) -> ApiError:
    """404 and 405 in the shape of every other error."""
    if status == 405:
        allowed = headers.get("allow", "another")
        return ApiError(405, f"Use {allowed} here.", code="method_not_allowed", headers=headers)
    return ApiError(status, "There is no such endpoint.", code="not_found", headers=headers)


async def _check(state: ServerState) -> str | None:
    """Why the dummy forward failed, or None."""
    async with state.ready_lock:
        now = asyncio.get_running_loop().time()
        last = state.readiness
        if now - last.checked_at_s < state.config.ready_cache_s:
            return last.failure
        failure = None
        deadline_s = state.config.ready_deadline_s
        try:
            async with asyncio.timeout(deadline_s + _GRACE_S):
                await state.engine.check_ready(deadline_s)
        except TimeoutError:
            failure = f"a forward pass did not finish within {deadline_s:g} s"
        except EngineDeadError:
            failure = "the engine has stopped"
        last.failure = failure
        last.checked_at_s = asyncio.get_running_loop().time()
        return failure


def _readiness(state: ServerState, status: int, word: str, reasons: list[str]) -> Response:
    document: dict[str, Any] = {
        "status": word,
        "reasons": reasons,
        "model": state.engine.model_id,
        "plan": state.plan_hash,
    }
    headers = {"retry-after": "1"} if status == 503 else {}
    return Response(encode_json(document), status, headers, media_type="application/json")


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "halstack",
        "max_model_len": state.engine.max_model_len,
    }
