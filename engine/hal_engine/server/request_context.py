"""The outermost layer: request id, plan header, every error's answer, metrics and access log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hal_engine.server.errors import ClientDisconnected
from hal_engine.server.generation import to_api_error
from hal_engine.server.limits import GENERATING_PATHS
from hal_engine.server.metrics import outcome_of
from hal_engine.server.state import ServerState

access_logger = logging.getLogger("hal_engine.server.access")

REQUEST_ID_HEADER = b"x-request-id"
PLAN_HEADER = b"x-hal-plan"
_CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_POLLED_PATH = "/v1/hal/status"
_NAMED_PATHS = GENERATING_PATHS | {
    *("/", "/health", "/ready", "/metrics", "/v1/hal/plan", _POLLED_PATH),
}


class RequestContextMiddleware:
    """Puts `request_id`, `generation_id`, `arrived_s` and `outcome` into the scope's state.

    `request_id` is the client's own `x-request-id`, if it sent a harmless one; it is for answers
    and logs. The engine's ids must be unique, so they come from `generation_id`.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = scope.setdefault("state", {})
        context["generation_id"] = uuid.uuid4().hex
        context["request_id"] = _client_request_id(scope) or context["generation_id"]
        context["arrived_s"] = asyncio.get_running_loop().time()
        answer = _Answer(self._state, scope, send)
        try:
            await self._app(scope, receive, answer.send)
        except ClientDisconnected:
            context["outcome"] = "disconnected"
        except asyncio.CancelledError:
            context["outcome"] = "error"  # the server's end came before the answer's
            raise
        except Exception as error:
            if answer.status is not None:
                context["outcome"] = "error"
                raise
            response = to_api_error(error, self._state, context["request_id"]).response()
            await response(scope, receive, answer.send)
        finally:
            self._finish(scope, answer.status)

    def _finish(self, scope: Scope, status: int | None) -> None:
        context = scope["state"]
        duration_s = asyncio.get_running_loop().time() - context["arrived_s"]
        endpoint = _endpoint(scope["path"])
        outcome = context.get("outcome") or outcome_of(status)
        metrics = self._state.metrics
        metrics.requests.labels(endpoint=endpoint, outcome=outcome).inc()
        if endpoint in GENERATING_PATHS:
            metrics.request_duration.labels(endpoint=endpoint).observe(duration_s)
        client = scope.get("client")
        # The page asks for its status each second, which would bury all the rest.
        is_poll = endpoint == _POLLED_PATH and status == 200
        access_logger.log(
            logging.DEBUG if is_poll else logging.INFO,
            "%s",
            json.dumps(
                {
                    "request_id": context["request_id"],
                    "client": client[0] if client else None,
                    "method": scope["method"],
                    "path": endpoint,  # no query and no unknown path: both may hold secrets
                    "status": status,
                    "outcome": outcome,
                    "duration_s": round(duration_s, 4),
                }
            ),
        )


class _Answer:
    """Adds the headers to the response's start and remembers its status."""

    def __init__(self, state: ServerState, scope: Scope, send: Send) -> None:
        self._state = state
        self._scope = scope
        self._send = send
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._headers()]}
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        request_id = str(self._scope["state"]["request_id"]).encode("ascii")
        plan = self._state.plan_hash.encode("ascii")
        return [(REQUEST_ID_HEADER, request_id), (PLAN_HEADER, plan)]


def _client_request_id(scope: Scope) -> str | None:
    sent: bytes = dict(scope["headers"]).get(REQUEST_ID_HEADER, b"")
    return sent.decode("ascii") if _CLIENT_REQUEST_ID.fullmatch(sent) else None


def _endpoint(path: str) -> str:
    """A bounded set of names for metrics and logs."""
    if path in _NAMED_PATHS:
        return path
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return "/v1/models"
    return "/static" if path.startswith("/static/") else "other"
