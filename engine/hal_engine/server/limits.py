"""Limits that hold before a request reaches its endpoint: head, content type, body, drain."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hal_engine.server.errors import ApiError, ClientDisconnected, draining, retry_headers
from hal_engine.server.json_body import is_json_content_type
from hal_engine.server.state import ServerState

GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})

# A client that still sends when it is refused would see a reset instead of the answer. So what it
# sends is thrown away for a moment before the connection is closed.
_LINGER_S = 1.0
_LINGER_BODIES = 8


class LimitsMiddleware:
    """Reads the whole body within its limits, then calls the app with it.

    Raises ApiError (413, 415, 414, 431, 408, 503) and ClientDisconnected.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_head(scope)
        if scope["path"] not in GENERATING_PATHS or scope["method"] != "POST":
            await self._call_with_body(scope, receive, send)
            return
        if self._state.is_draining:
            raise _closing(draining(self._state.config.drain_deadline_s))
        _check_content_type(scope)
        self._state.active_requests += 1
        self._state.metrics.active_requests.inc()
        try:
            await self._call_with_body(scope, receive, send)
        finally:
            self._state.active_requests -= 1
            self._state.metrics.active_requests.dec()

    def _check_head(self, scope: Scope) -> None:
        config = self._state.config
        if len(scope["raw_path"]) + len(scope["query_string"]) > config.max_path_bytes:
            raise _closing(ApiError(414, "The request's path is too long.", code="path_too_long"))
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if len(scope["headers"]) > config.max_header_count or size > config.max_header_bytes:
            raise _closing(
                ApiError(
                    431,
                    f"The request has {len(scope['headers'])} headers of {size} bytes; at most "
                    f"{config.max_header_count} of {config.max_header_bytes} bytes are allowed.",
                    code="headers_too_large",
                )
            )
        _check_framing(scope)

    async def _call_with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = _HeldBytes(self._state)
        try:
            body = await self._read_body(scope, receive, held)
            await self._app(scope, _replayed(body, receive), send)
        finally:
            held.release()

    async def _read_body(self, scope: Scope, receive: Receive, held: _HeldBytes) -> bytes:
        limit = self._state.config.max_body_bytes
        if _declared_length(scope) > limit:
            await self._refuse_body(receive, limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._state.config.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    body += message.get("body", b"")
                    if len(body) > limit:
                        await self._refuse_body(receive, limit)
                    held.hold(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise _closing(
                ApiError(
                    408,
                    f"The body did not arrive within {self._state.config.body_timeout_s:g} s.",
                    code="body_timeout",
                    headers={"x-should-retry": "false"},
                )
            ) from error

    async def _refuse_body(self, receive: Receive, limit: int) -> None:
        await _discard(receive, limit * _LINGER_BODIES)
        raise _closing(
            ApiError(
                413,
                f"The request's body is larger than {limit} bytes.",
                code="body_too_large",
            )
        )


class _HeldBytes:
    """One request's share of the bytes that all bodies together may take."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._held = 0

    def hold(self, num_bytes: int) -> None:
        self._state.body_bytes_held += num_bytes - self._held
        self._held = num_bytes
        if self._state.body_bytes_held > self._state.config.max_total_body_bytes:
            raise _closing(
                ApiError(
                    503,
                    "The server holds too many large requests now. Retry later.",
                    code="bodies_too_large",
                    headers=retry_headers(1),
                )
            )

    def release(self) -> None:
        self._state.body_bytes_held -= self._held
        self._held = 0


def _check_framing(scope: Scope) -> None:
    """Two lengths of one body: a proxy in front may go by the other one, and what it takes for
    the body would be the next request here (request smuggling,
    https://www.rfc-editor.org/rfc/rfc9112#section-6.1)."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        raise _closing(
            ApiError(
                400,
                "The request has both Content-Length and Transfer-Encoding; send one of them.",
                code="invalid_http",
            )
        )


def _check_content_type(scope: Scope) -> None:
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if not is_json_content_type(content_type):
        raise _closing(
            ApiError(
                415,
                "The request needs the header 'Content-Type: application/json'.",
                code="unsupported_content_type",
            )
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise _closing(
            ApiError(
                415,
                "Compressed request bodies are not supported.",
                code="unsupported_content_encoding",
            )
        )


def _declared_length(scope: Scope) -> int:
    """Content-Length, which the HTTP parser has checked; 0 for chunked bodies."""
    value = dict(scope["headers"]).get(b"content-length", b"0")
    return int(value) if value.isdigit() else 0


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` once and then what the connection says (disconnects)."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal first
        if first is not None:
            message, first = first, None
            return message
        return await receive()

    return replay


async def _discard(receive: Receive, max_bytes: int) -> None:
    try:
        async with asyncio.timeout(_LINGER_S):
            discarded = 0
            while discarded <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                discarded += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return  # it had its moment


def _closing(error: ApiError) -> ApiError:
    """`error`, after which the connection ends: the rest of the request is not read."""
    error.headers["connection"] = "close"
    return error
