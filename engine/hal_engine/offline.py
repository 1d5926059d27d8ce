"""The engine without a server: a list of requests in, a list of completions out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from hal_engine.api import AsyncEngine, Fault, FinishReason, GenerationRequest, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All that one request produced. `token_ids` includes a final stop token, `text` does not."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None
    fault: Fault | None
    events: tuple[TokenEvent, ...]


async def generate_all(
    engine: AsyncEngine, requests: Sequence[GenerationRequest], *, max_in_flight: int = 64
) -> list[Completion]:
    """Runs the requests, at most `max_in_flight` at once; completions in the order given."""
    places = asyncio.Semaphore(max_in_flight)

    async def run(request: GenerationRequest) -> Completion:
        async with places:
            return _completion([event async for event in engine.generate(request)])

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(request)) for request in requests]
    return [task.result() for task in tasks]


def generate_sync(
    engine: AsyncEngine, requests: Sequence[GenerationRequest], *, max_in_flight: int = 64
) -> list[Completion]:
    """`generate_all` for scripts and benchmarks. Not from inside a running event loop."""
    return asyncio.run(generate_all(engine, requests, max_in_flight=max_in_flight))


def _completion(events: Sequence[TokenEvent]) -> Completion:
    last = events[-1]
    if last.finish_reason is None:
        raise RuntimeError(f"engine: the stream of {last.request_id} ended without a reason")
    return Completion(
        request_id=last.request_id,
        token_ids=tuple(e.token_id for e in events if e.token_id is not None),
        text="".join(e.text for e in events),
        finish_reason=last.finish_reason,
        error=last.error,
        fault=last.fault,
        events=tuple(events),
    )
