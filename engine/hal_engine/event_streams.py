"""From the engine thread to event loops: one call per loop and step, not one per token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hal_engine.api import TokenEvent
from hal_engine.sequence import LiveSequence

T = TypeVar("T")


class EventStream:
    """The events of one request, read by one task of `loop`."""

    __slots__ = ("_events", "_waiter", "has_ended", "loop", "sequence")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sequence: LiveSequence | None = None  # the engine thread's; set on submission
        self.has_ended = False  # the last event was read
        self._events: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: TokenEvent) -> None:
        """On the loop's thread."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> TokenEvent:
        while not self._events:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        self.has_ended = event.finish_reason is not None
        return event


class Reply(Generic[T]):
    """A future of `loop` that the engine thread answers."""

    __slots__ = ("_loop", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[T] = loop.create_future()

    @property
    def is_abandoned(self) -> bool:
        return self.future.done() or self._loop.is_closed()

    def set_result(self, value: T) -> None:
        call_in_loop(self._loop, self._set, value, None)

    def set_exception(self, error: Exception) -> None:
        call_in_loop(self._loop, self._set, None, error)

    def _set(self, value: T, error: Exception | None) -> None:
        if self.future.done():  # given up meanwhile
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


def call_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> bool:
    """False if the loop has been closed, so that nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def deliver(pairs: Sequence[tuple[EventStream, TokenEvent]]) -> list[EventStream]:
    """Hands events to their streams; returns the streams whose loop is gone."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EventStream, TokenEvent]]] = {}
    for pair in pairs:
        by_loop.setdefault(pair[0].loop, []).append(pair)
    lost: list[EventStream] = []
    for loop, group in by_loop.items():
        if not call_in_loop(loop, _push_all, group):
            lost.extend(stream for stream, _ in group)
    return lost


def _push_all(pairs: Sequence[tuple[EventStream, TokenEvent]]) -> None:
    for stream, event in pairs:
        stream.push(event)
