"""A client that goes away stops its generation, in every phase."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from typing import Any

import httpx
import pytest

BODY = {"model": "fake/model", "prompt": "!slow", "max_tokens": 1000}


def _send(server: Any, path: str, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    connection = server.connect()
    connection.sendall(head.encode() + content)
    return connection


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _is_idle(server: Any) -> bool:
    return not (server.engine.live or server.state.in_flight or server.state.active_requests)


@pytest.mark.parametrize("leave", [socket.socket.close, _reset], ids=["close", "reset"])
@pytest.mark.parametrize("prompt", ["!endless", "!slow"], ids=["before-token", "amid-tokens"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_stops_all_sequences(
    server: Any, leave: Any, prompt: str, stream: bool, n: int
) -> None:
    engine = server.engine
    engine.cancelled.clear()
    before = engine.tokens_sent
    connection = _send(
        server, "/v1/completions", {**BODY, "prompt": prompt, "stream": stream, "n": n}
    )
    server.wait(lambda: len(engine.live) == n)
    if prompt == "!slow":
        server.wait(lambda: engine.tokens_sent > before + 3 * n)
    leave(connection)
    server.wait(lambda: _is_idle(server))
    assert len(engine.cancelled) == n
    assert engine.tokens_sent < before + 1000


def test_disconnect_of_a_chat(server: Any) -> None:
    server.engine.cancelled.clear()
    messages = [{"role": "user", "content": "!slow"}]
    stream = server.openai().chat.completions.create(
        model="fake/model", messages=messages, stream=True
    )
    next(iter(stream))
    stream.close()
    server.wait(lambda: _is_idle(server))
    assert len(server.engine.cancelled) == 1


def test_client_timeout(server: Any) -> None:
    server.engine.cancelled.clear()
    with server.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=BODY, timeout=httpx.Timeout(60, read=1.5))
    server.wait(lambda: _is_idle(server))
    assert len(server.engine.cancelled) == 1


def test_disconnect_of_an_embedding(server: Any) -> None:
    body = {"model": "fake/model", "input": "!endless"}
    connection = _send(server, "/v1/embeddings", body)
    server.wait(lambda: server.engine.embeds_live == 1)
    connection.close()
    server.wait(lambda: _is_idle(server) and server.engine.embeds_live == 0)
    assert server.engine.embeds_cancelled == 1


def test_disconnect_amid_the_body(server: Any) -> None:
    requests = len(server.engine.requests)
    connection = server.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b'content-length: 500\r\n\r\n{"model": "fake'
    )
    server.wait(lambda: server.state.active_requests == 1)
    connection.close()
    server.wait(lambda: _is_idle(server) and server.state.body_bytes_held == 0)
    assert len(server.engine.requests) == requests


def test_disconnect_behind_a_pipelined_request(server: Any) -> None:
    """Bytes that wait behind the running request do not hide that the client has gone."""
    server.engine.cancelled.clear()
    connection = _send(server, "/v1/completions", {**BODY, "prompt": "!endless"})
    server.wait(lambda: len(server.engine.live) == 1)
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    time.sleep(0.1)
    connection.close()
    server.wait(lambda: _is_idle(server))
    assert len(server.engine.cancelled) == 1


def test_flood_behind_a_running_request(server: Any) -> None:
    server.engine.cancelled.clear()
    connection = _send(server, "/v1/completions", {**BODY, "prompt": "!endless"})
    server.wait(lambda: len(server.engine.live) == 1)
    with contextlib.suppress(ConnectionError), connection:
        for _ in range(1000):
            connection.sendall(b"x" * 65_536)
    server.wait(lambda: _is_idle(server))
    assert len(server.engine.cancelled) == 1


def test_one_failure_stops_the_other_sequences(server: Any) -> None:
    """One of two prompts fails: the request fails as a whole, and nothing goes on running."""
    server.engine.cancelled.clear()
    with server.http() as http:
        body = {**BODY, "prompt": ["!endless", "!mid_error"]}
        assert http.post("/v1/completions", json=body).status_code == 500
        assert http.post("/v1/completions", json={**body, "stream": True}).status_code == 200
    server.wait(lambda: _is_idle(server))
    assert len([r for r in server.engine.cancelled if r.endswith("-0")]) == 2


def test_many_disconnects_leave_nothing(server: Any) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(30):
            body = {**BODY, "stream": number % 2 == 0}
            stack.callback(_send(server, "/v1/completions", body).close)
        server.wait(lambda: len(server.engine.live) == 30)
    server.wait(lambda: _is_idle(server))
    with server.http() as http:
        assert http.post("/v1/completions", json={**BODY, "max_tokens": 2}).status_code == 200
