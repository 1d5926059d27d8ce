"""A server with a fake engine on a port of its own, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from hal_engine.server.app import create_app
from hal_engine.server.config import ServerConfig
from hal_engine.server.run import DrainingServer, bind_listener
from hal_engine.server.state import ServerState


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake_engine = _load("fake_engine")


@dataclass
class RunningServer:
    engine: Any
    state: ServerState
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> openai.OpenAI:
        defaults = {"api_key": "none", "max_retries": 0, "timeout": 120}
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**defaults, **options})

    def http(self, **options: Any) -> httpx.Client:
        # Without certificates, which take long to load and are not used.
        return httpx.Client(
            base_url=self.url, timeout=120, trust_env=False, verify=False, **options
        )

    def connect(self, **options: Any) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Returns when `condition` holds; fails the test when it does not in time."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.005)


@contextlib.contextmanager
def running_server(engine: Any, **settings: Any) -> Iterator[RunningServer]:
    config = ServerConfig(**{"port": 0, "ready_cache_s": 0, **settings})
    listener = bind_listener(config)
    app = create_app(engine, config)
    server = DrainingServer(app, config, listener, lambda _: None)
    loop_of: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loop_of.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield RunningServer(engine, app.state.server, listener.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with settings of the test's choice."""
    with contextlib.ExitStack() as stack:

        def start(engine: Any = None, **settings: Any) -> RunningServer:
            own = engine or fake_engine.FakeEngine()
            return stack.enter_context(running_server(own, **settings))

        yield start


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """`serve(engine, **settings)`: a server for the length of a block."""
    return running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server with default settings for a whole file."""
    with running_server(fake_engine.FakeEngine()) as running:
        yield running


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module of the fake engine."""
    return fake_engine


@pytest.fixture(scope="session")
def assert_api_error() -> Callable[..., dict[str, Any]]:
    """Checks OpenAI's error shape and returns the error."""

    def check(response: httpx.Response, status: int | None = None) -> dict[str, Any]:
        assert response.headers["content-type"] == "application/json", response.text
        body = response.json()
        assert set(body) == {"error"}
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        if status is not None:
            assert response.status_code == status, response.text
        return error

    return check
