"""uvicorn's HTTP/1.1 protocol with what slow, silent or too many clients call for.

Added: a deadline for the request's head, a deadline for a client that does not read, a bound on
connections, and parse errors in the shape of every other error.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from hal_engine.server.config import ServerConfig
from hal_engine.server.errors import ApiError, encode_json, retry_headers

_WRITE_BUFFER_BYTES = 65_536


class GuardedH11Protocol(H11Protocol):
    """One connection. Use `protocol_class` to get a class with its limits."""

    limits: ClassVar[ServerConfig]

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self.access_log = False  # uvicorn's would show query strings; see request_context.py

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Arms the head's deadline, or refuses the connection when there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(
                ApiError(
                    503,
                    f"The server has {self.limits.max_connections} connections, the most it takes.",
                    code="too_many_connections",
                    headers=retry_headers(1),
                )
            )
            return
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser and starts or ends the head's deadline."""
        if self._is_refused:
            return
        super().data_received(data)
        self._keep_reading()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all timers."""
        self._head_timer = _cancel(self._head_timer)
        self._write_timer = _cancel(self._write_timer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """The client does not read: it has until the write deadline to go on."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self.limits.write_timeout_s, self.transport.abort
            )

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._write_timer = _cancel(self._write_timer)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, by force if its last bytes are never read."""
        super().timeout_keep_alive_handler()
        self._abort_later()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser refused; called while its error is handled."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # stops the app: nothing it says fits any more
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        if status == 431:
            message, code = "The request's head is too large.", "headers_too_large"
        else:
            message, code = "The request is not valid HTTP/1.1.", "invalid_http"
        self._refuse(ApiError(status, message, code=code))

    def _keep_reading(self) -> None:
        """Reads on behind a pipelined request, for else the client's end would go unnoticed."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not (self.flow.read_paused and is_answering and not self.cycle.more_body):
            return
        pipelined, _ = self.conn.trailing_data
        if len(pipelined) > self.limits.max_header_bytes:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _watch_head(self) -> None:
        is_waiting = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not is_waiting or self._is_refused:
            self._head_timer = _cancel(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.limits.header_timeout_s, self._head_timed_out
            )

    def _head_timed_out(self) -> None:
        self._refuse(
            ApiError(
                408,
                f"The request's head did not arrive within {self.limits.header_timeout_s:g} s.",
                code="header_timeout",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answers without the app and closes."""
        self._is_refused = True
        self._head_timer = _cancel(self._head_timer)
        if self.transport.is_closing():
            return
        self.transport.write(_plain_response(error))
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)


def protocol_class(config: ServerConfig) -> type[GuardedH11Protocol]:
    """The protocol with the limits of `config`."""
    return type("LimitedH11Protocol", (GuardedH11Protocol,), {"limits": config})


def _plain_response(error: ApiError) -> bytes:
    body = encode_json(error.body())
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} \r\n{lines}\r\n".encode("latin-1") + body


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Ends `timer`, if there is one; None to keep in its place."""
    if timer is not None:
        timer.cancel()
    return None
