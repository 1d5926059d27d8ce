"""The sequences of one HTTP request, generated together, and stopped together when it ends.

Between the engine and the client stands a bounded buffer: a client that reads slowly holds up its
own request only. Whatever ends the request (answer complete, client gone, deadline, drain, error)
ends in `Generation.close()`, which closes the engine's iterators, and so frees their KV blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from starlette.types import Receive

from hal_engine.api import EngineDeadError, GenerationRequest, RequestRefusedError, TokenEvent
from hal_engine.server.errors import (
    ApiError,
    ClientDisconnected,
    deadline_exceeded,
    from_engine_error,
    internal_error,
)
from hal_engine.server.state import ServerState

logger = logging.getLogger("hal_engine.server")

Batch = list[tuple[int, TokenEvent]]
ResultT = TypeVar("ResultT")


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class Generation:
    """Runs `requests` side by side; `next_batch` gives their events as (index, event) pairs.

    Use as `async with`, or call `start` and `close`. `arrived_s` is the event loop's time of the
    HTTP request's arrival.
    """

    def __init__(
        self, state: ServerState, requests: Sequence[GenerationRequest], arrived_s: float
    ) -> None:
        self._state = state
        self._requests = tuple(requests)
        self._arrived_s = arrived_s
        self._deadline_at = arrived_s + state.config.request_deadline_s
        self._buffer: deque[tuple[int, TokenEvent]] = deque()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._unfinished = len(self._requests)
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_token_s: dict[int, float] = {}

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Hands all requests to the engine."""
        self._state.in_flight.add(self)
        for index, request in enumerate(self._requests):
            task = asyncio.create_task(self._pump(index, request), name=request.request_id)
            task.add_done_callback(self._note_failure)
            self._tasks.append(task)

    async def next_batch(self) -> Batch:
        """All events that have come since the last call, at least one; empty after the end.

        Raises what ended the generation early: ApiError, an error of the engine's API, or an
        unexpected exception.
        """
        while not self._buffer and self._failure is None and self._unfinished:
            self._readable.clear()
            await self._readable.wait()
        if not self._buffer and self._failure is not None:
            raise self._failure
        batch = list(self._buffer)
        self._buffer.clear()
        self._writable.set()
        return batch

    def fail(self, error: BaseException) -> None:
        """Ends the generation with `error`; the first error stays."""
        if self._failure is None:
            self._failure = error
        for task in self._tasks:
            task.cancel()
        self._readable.set()

    async def close(self) -> None:
        """Cancels what still runs and returns when the engine has let go of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._state.in_flight.discard(self)

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        try:
            async with asyncio.timeout_at(self._deadline_at) as scope:
                await self._forward_events(index, request)
        except TimeoutError:
            if not scope.expired():
                raise
            self.fail(deadline_exceeded(self._state.config.request_deadline_s))

    async def _forward_events(self, index: int, request: GenerationRequest) -> None:
        events = self._state.engine.generate(request)
        try:
            async for event in events:
                self._refuse_early_end(event)
                self._observe(index, event)
                while len(self._buffer) >= self._state.config.event_buffer:
                    self._writable.clear()
                    await self._writable.wait()
                self._buffer.append((index, event))
                self._readable.set()
                if event.finish_reason is not None:
                    self._unfinished -= 1
                    return
        finally:
            await _close(events)
        raise RuntimeError(f"engine: the events of {request.request_id} ended without a reason")

    def _refuse_early_end(self, event: TokenEvent) -> None:
        if event.finish_reason == "error":
            raise self._error_of(event)
        if event.finish_reason == "cancelled":
            raise ApiError(503, "The engine cancelled the request.", code="cancelled")

    def _error_of(self, event: TokenEvent) -> Exception:
        message = event.error or "The engine ended the request with an error."
        match event.fault:
            case "request":
                return RequestRefusedError(message)
            case "deadline":
                return deadline_exceeded(self._state.config.request_deadline_s)
            case "engine":  # its last words hold the cause, which is for the log
                return EngineDeadError(message)
            case _:
                # Clients retry a 500 by themselves; this request would fail again.
                headers = {"x-should-retry": "false"}
                return ApiError(500, message, code="generation_failed", headers=headers)

    def _observe(self, index: int, event: TokenEvent) -> None:
        if event.token_id is None:
            return
        now = asyncio.get_running_loop().time()
        last = self._last_token_s.get(index)
        if last is None:
            self._state.metrics.observe_first_token(now, now - self._arrived_s)
        else:
            self._state.metrics.observe_token(now, now - last)
        self._last_token_s[index] = now

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


def to_api_error(error: Exception, state: ServerState, request_id: str) -> ApiError:
    """The answer to `error`; one that nobody expected is logged and becomes a plain 500."""
    known = from_engine_error(error, is_draining=state.is_draining)
    if known is None:
        logger.error("request %s: internal error", request_id, exc_info=error)
        return internal_error()
    if known.status >= 500:
        logger.warning("request %s: %s: %s", request_id, type(error).__name__, error)
    return known


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled if the client goes first (ClientDisconnected)."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    if isinstance(events, _Closable):
        await events.aclose()
