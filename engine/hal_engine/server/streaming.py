"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html.

Each chunk is one `data:` line; `data: [DONE]` ends a complete stream. An error after the first
byte is a `data: {"error": …}` event, and the stream ends without `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hal_engine.api import TokenEvent
from hal_engine.server.errors import ClientDisconnected, encode_json
from hal_engine.server.generation import Batch, Generation, to_api_error, until_disconnect
from hal_engine.server.metrics import outcome_of
from hal_engine.server.state import ServerState, state_of

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"


class ChunkFormatter(Protocol):
    """One endpoint's chunk shapes."""

    def chunks(self, index: int, event: TokenEvent) -> Iterable[dict[str, Any]]:
        """The chunks that tell of one event of choice `index`."""
        ...

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        """The chunks after all choices have finished (usage)."""
        ...


class SseResponse(Response):
    """Sends a generation as events and stops it when the client goes.

    `first` is the first batch of events: it was awaited before the status line was sent, so that
    a full queue or a refused request is a proper HTTP error.
    """

    media_type = "text/event-stream"

    def __init__(
        self, state: ServerState, generation: Generation, first: Batch, formatter: ChunkFormatter
    ) -> None:
        super().__init__(None, 200, _HEADERS)
        del self.headers["content-length"]
        self._state = state
        self._generation = generation
        self._first = first
        self._formatter = formatter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = str(scope["state"]["request_id"])
        try:
            await until_disconnect(receive, self._send_stream(send, request_id, scope))
        except ClientDisconnected:
            scope["state"]["outcome"] = "disconnected"
        finally:
            await self._generation.close()

    async def _send_stream(self, send: Send, request_id: str, scope: Scope) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)}
        )
        try:
            batch = self._first
            while batch:
                data = b"".join(
                    _event(chunk)
                    for index, event in batch
                    for chunk in self._formatter.chunks(index, event)
                )
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                batch = await self._generation.next_batch()
            end = b"".join(map(_event, self._formatter.last_chunks())) + _DONE
        except Exception as error:  # noqa: BLE001  # to_api_error logs it; the client is told
            answer = to_api_error(error, self._state, request_id)
            scope["state"]["outcome"] = outcome_of(answer.status)
            end = _event(answer.body())
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def stream_response(
    request: Request, generation: Generation, formatter: ChunkFormatter
) -> SseResponse:
    """Starts `generation` and answers once its first events are there.

    Raises ClientDisconnected and whatever `Generation.next_batch` raises; the generation is
    closed then.
    """
    generation.start()
    try:
        first = await until_disconnect(request.receive, generation.next_batch())
    except BaseException:
        await generation.close()
        raise
    return SseResponse(state_of(request), generation, first, formatter)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(document) + b"\n\n"
