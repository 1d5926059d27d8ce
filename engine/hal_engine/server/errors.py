"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from hal_engine.api import EngineDeadError, QueueFullError, RequestRefusedError

MAX_MESSAGE_LENGTH = 1000

# One for all: json.dumps would make an encoder for every chunk of every stream.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ApiError(Exception):
    """An answer other than success. `message` is shown to the client: no internals in it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        error_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.error_type = error_type or _type_of_status(status)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON document of this error."""
        message = self.message
        if len(message) > MAX_MESSAGE_LENGTH:
            message = message[: MAX_MESSAGE_LENGTH - 1] + "…"
        return {
            "error": {
                "message": message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The HTTP response of this error."""
        return Response(
            encode_json(self.body()), self.status, self.headers, media_type="application/json"
        )


class ClientDisconnected(Exception):
    """The client has gone; nobody reads an answer."""


def encode_json(document: Any) -> bytes:
    """Compact UTF-8 JSON. Raises ValueError for NaN and infinities, which JSON cannot carry."""
    return _ENCODER.encode(document).encode("utf-8")


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field of OpenAI's API that this server does not serve."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def draining(retry_after_s: float) -> ApiError:
    """503: the server is ending and takes no new requests."""
    return ApiError(
        503,
        "The server is shutting down and takes no new requests.",
        code="server_draining",
        headers=retry_headers(retry_after_s),
    )


def deadline_exceeded(deadline_s: float) -> ApiError:
    """504: the request ran into its deadline. Clients are told not to retry by themselves."""
    return ApiError(
        504,
        f"The request did not finish within its deadline of {deadline_s:g} s.",
        code="deadline_exceeded",
        error_type="timeout_error",
        headers={"x-should-retry": "false"},
    )


def internal_error() -> ApiError:
    """500 that says nothing about the cause, which belongs in the server's log."""
    return ApiError(
        500,
        "The server had an internal error; its log holds the details under the request id.",
        code="internal_error",
    )


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least one."""
    seconds = math.ceil(retry_after_s) if math.isfinite(retry_after_s) else 60
    return {"retry-after": str(min(max(seconds, 1), 3600))}


def from_engine_error(error: Exception, *, is_draining: bool) -> ApiError | None:
    """The answer to one of the engine's documented errors; None for any other exception."""
    match error:
        case ApiError():
            return error
        case QueueFullError() if is_draining:
            return draining(error.retry_after_s)
        case QueueFullError():
            return ApiError(
                429,
                f"The queue is full: {error.waiting} {error.what} are waiting, at most "
                f"{error.bound} may wait. Retry later.",
                code="queue_full",
                headers=retry_headers(error.retry_after_s),
            )
        case RequestRefusedError():
            return invalid(str(error), code="request_refused")
        case EngineDeadError():
            return ApiError(
                503,
                "The engine has stopped and serves no requests; see the server's log.",
                code="engine_unavailable",
                headers=retry_headers(30),
            )
        case _:
            return None


def _type_of_status(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status >= 500:
        return "server_error"
    return "invalid_request_error"
