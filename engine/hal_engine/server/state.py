"""What all requests of one server share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from hal_engine.api import AsyncEngine
from hal_engine.server.config import ServerConfig
from hal_engine.server.errors import ApiError
from hal_engine.server.metrics import ServerMetrics


class Stoppable(Protocol):
    """A generation in flight, which the end of the drain can stop with an error."""

    def fail(self, error: ApiError) -> None: ...


@dataclass(slots=True)
class Readiness:
    """The last result of the dummy forward."""

    checked_at_s: float = float("-inf")
    failure: str | None = None


@dataclass(slots=True)
class StatusCache:
    """The last document of `/v1/hal/status`."""

    body: bytes | None = None
    fresh_until_s: float = float("-inf")  # monotonic


@dataclass(slots=True, kw_only=True)
class ServerState:
    """One per app, at `app.state.server`; `in_flight` is what a drain waits for."""

    engine: AsyncEngine
    config: ServerConfig
    metrics: ServerMetrics
    plan_hash: str
    created: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)
    is_draining: bool = False
    in_flight: set[Stoppable] = field(default_factory=set)
    active_requests: int = 0  # HTTP requests to a generating endpoint, from head to last byte
    body_bytes_held: int = 0
    readiness: Readiness = field(default_factory=Readiness)
    ready_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    status: StatusCache = field(default_factory=StatusCache)
    plan_body: bytes | None = None  # what /v1/hal/plan answers, once it was asked

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names a request may use for the model; the first is the engine's own."""
        return (self.engine.model_id, *self.config.served_model_names)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when the plan changes."""
        return f"fp_{self.plan_hash[:16]}"


def state_of(request: Request) -> ServerState:
    """The state of the app that serves `request`."""
    state = request.app.state.server
    if not isinstance(state, ServerState):
        raise TypeError("server: app.state.server is not a ServerState; use create_app()")
    return state


def check_model(name: str, state: ServerState) -> None:
    """ApiError 404 for a model that is not served."""
    if name not in state.model_names:
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise ApiError(
            404,
            f"The model '{shown}' is not served here; GET /v1/models lists what is.",
            param="model",
            code="model_not_found",
        )
