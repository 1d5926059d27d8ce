"""Running the server: the listening socket, drain, and the end.

The first SIGTERM or SIGINT drains: new requests get 503 with Retry-After, running ones finish
within `drain_deadline_s`, the engine closes within `close_deadline_s`, then the process ends with
0. A second signal aborts, see `signals.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from hal.errors import HalError
from hal_engine.api import AsyncEngine, EngineDeadError
from hal_engine.server.app import create_app
from hal_engine.server.auth import resolve_api_key
from hal_engine.server.config import ServerConfig
from hal_engine.server.errors import draining
from hal_engine.server.http_protocol import protocol_class
from hal_engine.server.signals import ShutdownSignals, end_process_within
from hal_engine.server.state import ServerState

logger = logging.getLogger("hal_engine.server")


class ServerStartError(HalError):
    """The server cannot start: the address is taken, or serving there is not safe."""


def run_server(
    engine: AsyncEngine,
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Serves until a signal ends it; returns the process's exit status.

    `listener` is a bound socket (see `bind_listener`, to claim the port before the model loads).
    `announce` gets one line with the URL when the server is ready, or when it is clear that it will
    not be; by default it is written to stdout. Raises ServerStartError and SettingsError.
    """
    if not logging.getLogger().hasHandlers():
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
    return asyncio.run(_serve(engine, config, listener, announce or _write_line))


async def _serve(
    engine: AsyncEngine,
    config: ServerConfig,
    listener: socket.socket | None,
    announce: Callable[[str], None],
) -> int:
    signals = ShutdownSignals(config.abort_deadline_s)
    with signals.handled():
        try:
            check_exposure(config)
            with contextlib.closing(listener or bind_listener(config)) as bound:
                app = create_app(engine, config)
                await DrainingServer(app, config, bound, announce, signals).serve(sockets=[bound])
        finally:
            signals.is_over = True
            await _close(engine, config)
        return signals.exit_status


async def _close(engine: AsyncEngine, config: ServerConfig) -> None:
    """A stuck engine must not outlive the server: the supervisor waits for this process."""
    timer = end_process_within(config.close_deadline_s, status=1)
    try:
        await engine.close()
    finally:
        timer.cancel()


def check_exposure(config: ServerConfig) -> None:
    """ServerStartError if other machines could use the server without a key."""
    if config.is_loopback or config.allow_unauthenticated:
        return
    if resolve_api_key(config) is None:
        raise ServerStartError(
            f"server: listening on {config.host}",
            "an API key, because other machines can reach this address",
            "no key",
            "set HAL_SERVE_API_KEY or --api-key-file, listen on 127.0.0.1, or set "
            "serve.allow_unauthenticated to true",
        )


def bind_listener(config: ServerConfig) -> socket.socket:
    """A socket bound to the address of `config`; ServerStartError if it cannot be had."""
    try:
        infos = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from error
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn's server with this module's meaning of the two signals."""

    def __init__(
        self,
        app: object,
        config: ServerConfig,
        listener: socket.socket,
        announce: Callable[[str], None],
        signals: ShutdownSignals | None = None,
    ) -> None:
        """signals: nobody sends any by default, as in a thread."""
        super().__init__(_uvicorn_config(app, config))
        state = getattr(getattr(app, "state", None), "server", None)
        if not isinstance(state, ServerState):
            raise TypeError("server: the application must come from create_app()")
        self._state = state
        self._announce = announce
        self._url = _url_of(listener)
        self._drain_until_s: float | None = None
        self._signals = signals or ShutdownSignals(config.abort_deadline_s)
        self._signals.on_abort = self._stop_waiting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and says `ready` once a forward pass has worked, however long that takes."""
        await super().startup(sockets)
        is_ready = await self._has_run_a_forward()
        reasons = self._state.engine.degraded_reasons()
        for reason in reasons:
            logger.warning("degraded: %s", reason)
        state = "not ready" if not is_ready else "degraded" if reasons else "ready"
        self._announce(f"{state}: serving {self._state.engine.model_id} at {self._url}")

    async def _has_run_a_forward(self) -> bool:
        """Waits for a forward pass; False once the engine is dead or a signal has come.

        Meanwhile /health answers 200 and /ready 503, as they do when it is dead.
        """
        while True:
            try:
                await self._state.engine.check_ready(self._state.config.ready_deadline_s)
                return True
            except EngineDeadError as error:
                logger.error("the engine is not ready: %s", error)
                return False
            except TimeoutError as error:
                logger.warning("the engine is not ready yet: %s", error or "no forward in time")
                if self._signals.has_come or self.should_exit:
                    return False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers are not wanted: `ShutdownSignals` has the signals."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._signals.abort_signal is not None:
            self._cut_connections()
            return True
        if self._signals.has_come:
            self._state.is_draining = True
        if self._state.is_draining:
            return self._has_drained()
        return await super().on_tick(counter)

    def _stop_waiting(self) -> None:
        self.force_exit = True

    def _has_drained(self) -> bool:
        now = asyncio.get_running_loop().time()
        config = self._state.config
        if self._drain_until_s is None:
            self._drain_until_s = now + config.drain_deadline_s
            self._state.metrics.draining.set(1)
            logger.info("draining: %d requests are running", self._state.active_requests)
        if self._state.active_requests == 0:
            return True
        if now < self._drain_until_s:
            return False
        logger.warning("drain deadline: %d requests are stopped", self._state.active_requests)
        for generation in list(self._state.in_flight):
            generation.fail(draining(config.drain_deadline_s))
        return True

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()


def _uvicorn_config(app: object, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=protocol_class(config),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,  # request_context.py writes one that holds no content
        server_header=False,
        proxy_headers=False,  # a forwarded address is a claim
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=math.ceil(config.keep_alive_timeout_s),
        timeout_graceful_shutdown=math.ceil(config.abort_deadline_s),
    )


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _cannot_listen(config: ServerConfig, error: OSError) -> ServerStartError:
    return ServerStartError(
        f"server: listening on {config.host}:{config.port}",
        "a free address of this machine",
        error.strerror or str(error),
        "choose another port with --port, or end the program that holds it",
    )
