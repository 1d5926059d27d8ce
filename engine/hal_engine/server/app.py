"""The ASGI application: routes and the layers around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from hal_engine.api import AsyncEngine
from hal_engine.server import dashboard, health
from hal_engine.server.audit import audit
from hal_engine.server.auth import ApiKeyMiddleware, LoopbackHostMiddleware, resolve_api_key
from hal_engine.server.chat import chat_completions
from hal_engine.server.completions import completions
from hal_engine.server.config import ServerConfig
from hal_engine.server.embeddings import embeddings
from hal_engine.server.limits import LimitsMiddleware
from hal_engine.server.metrics import ServerMetrics
from hal_engine.server.request_context import RequestContextMiddleware
from hal_engine.server.state import ServerState
from hal_engine.server.status import status


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The server's application for `engine`, with its state at `app.state.server`.

    Raises SettingsError for an unusable API key.
    """
    api_key = resolve_api_key(config)
    plan_hash = engine.plan_hash()
    state = ServerState(
        engine=engine,
        config=config,
        metrics=ServerMetrics(engine, plan_hash),
        plan_hash=plan_hash,
    )
    # No generated documentation: its pages load scripts from elsewhere.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    app.state.audit_lock = asyncio.Lock()
    _add_routes(app)
    app.add_exception_handler(HTTPException, _http_exception)
    # The layer added last is the outermost.
    app.add_middleware(LimitsMiddleware, state=state)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key, is_open=_open_requests(config))
    elif config.is_loopback:
        hosts = frozenset(host.lower() for host in config.allowed_hosts)
        app.add_middleware(LoopbackHostMiddleware, allowed_hosts=hosts)
    app.add_middleware(RequestContextMiddleware, state=state)
    if config.cors_allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "x-hal-plan"],
        )
    return app


def _add_routes(app: FastAPI) -> None:
    gets = {
        "/": dashboard.index,
        "/health": health.health,
        "/ready": health.ready,
        "/metrics": health.metrics,
        "/v1/hal/plan": health.plan,
        "/v1/hal/audit": audit,
        "/v1/hal/status": status,
        "/static/{name}": dashboard.asset,
        "/v1/models": health.list_models,
        "/v1/models/{model:path}": health.retrieve_model,
    }
    posts = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/embeddings": embeddings,
    }
    for path, endpoint in gets.items():
        app.add_route(path, endpoint, methods=["GET"])
    for path, endpoint in posts.items():
        app.add_route(path, endpoint, methods=["POST"])


def _open_requests(config: ServerConfig) -> Callable[[Scope], bool]:
    """Which requests need no key: some paths by the settings, and the page, which holds no data."""
    paths = {"/health"}
    if not config.metrics_require_api_key:
        paths.add("/metrics")
    if not config.ready_requires_api_key:
        paths.add("/ready")
    return lambda scope: scope["path"] in paths or dashboard.is_public(scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    """The router's 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return health.not_found(error.status_code, headers).response()
