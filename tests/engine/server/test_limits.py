"""Bodies, heads, connections and clients beyond the limits, on raw sockets where need be."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

BODY = {"model": "fake/model", "prompt": "hi", "max_tokens": 2}
JSON = {"content-type": "application/json"}


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def _read_ok(connection: socket.socket) -> None:
    """Reads the answer to GET /health."""
    data = b""
    while not data.endswith(b'{"status":"ok"}'):
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    assert data.startswith(b"HTTP/1.1 200 ")


def _head(path: str = "/v1/completions", *lines: str) -> bytes:
    default = ("host: localhost", "content-type: application/json")
    return "\r\n".join([f"POST {path} HTTP/1.1", *default, *lines, "", ""]).encode()


def _error_of(raw: bytes, status: int) -> dict[str, Any]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), raw[:200]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_declared_body_too_large(start_server: Any, assert_api_error: Any) -> None:
    server = start_server(max_body_bytes=5000)
    with server.http() as http:
        response = http.post("/v1/completions", json={**BODY, "prompt": "x" * 6000})
        assert assert_api_error(response, 413)["code"] == "body_too_large"
        assert http.post("/v1/completions", json=BODY).status_code == 200
    assert len(server.engine.requests) == 1
    server.wait(lambda: server.state.body_bytes_held == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_chunked_body_too_large(start_server: Any, assert_api_error: Any, path: str) -> None:
    server = start_server(max_body_bytes=5000)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100_000):
            sent += 1000
            yield b"x" * 1000

    with server.http(headers=JSON) as http, contextlib.suppress(httpx.WriteError, httpx.ReadError):
        response = http.post(path, content=endless())
        assert_api_error(response, 413)
    assert sent < 20_000_000  # it was cut off, not read to its end
    server.wait(lambda: server.state.body_bytes_held == 0)


def test_chunked_body_within_the_limit(server: Any) -> None:
    with server.http(headers=JSON) as http:
        pieces = [json.dumps(BODY).encode()[i : i + 7] for i in range(0, 100, 7)]
        assert http.post("/v1/completions", content=iter(pieces)).status_code == 200


def test_all_bodies_together(start_server: Any, assert_api_error: Any) -> None:
    server = start_server(max_total_body_bytes=2000)
    with server.http() as http, server.connect() as other:
        other.sendall(_head("/v1/completions", "content-length: 5000") + b"x" * 1500)
        server.wait(lambda: server.state.body_bytes_held == 1500)
        response = http.post("/v1/completions", json={**BODY, "prompt": "x" * 1000})
        assert_api_error(response, 503)
        assert response.headers["retry-after"] == "1"
    server.wait(lambda: server.state.body_bytes_held == 0)


def test_body_that_does_not_arrive(start_server: Any) -> None:
    server = start_server(body_timeout_s=0.3)
    with server.connect() as connection:
        connection.sendall(_head("/v1/completions", "content-length: 50") + b'{"model"')
        error = _error_of(_read_all(connection), 408)
    assert error["code"] == "body_timeout"
    assert not server.engine.requests


def test_head_that_does_not_arrive(start_server: Any) -> None:
    server = start_server(header_timeout_s=0.4)
    begin = time.monotonic()
    with server.connect() as silent, server.connect() as drip:
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 2:
                drip.sendall(b"GET /health HTTP/1.1\r\n"[:1])
                time.sleep(0.1)
        assert _error_of(_read_all(silent), 408)["code"] == "header_timeout"
    assert not server.wait(lambda: len(server_connections(server)) == 0)


def server_connections(server: Any) -> list[str]:
    """Connections that this process still has open to the server, from the kernel's table."""
    port = f":{server.port:04X}"
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return [row[1] for row in rows if row[1].endswith(port) and row[3] == "01"]


def test_second_head_on_a_kept_connection(start_server: Any) -> None:
    """After a first request the deadline of the head holds again, and so does keep-alive."""
    server = start_server(header_timeout_s=2, keep_alive_timeout_s=3)
    with server.connect() as drip, server.connect() as idle:
        for connection in (drip, idle):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            _read_ok(connection)
        drip.sendall(b"GET /hea")
        assert _error_of(_read_all(drip), 408)["code"] == "header_timeout"
        assert _read_all(idle) == b""


def test_keep_alive_outlives_the_head_deadline(start_server: Any) -> None:
    server = start_server(header_timeout_s=1, keep_alive_timeout_s=60)
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            _read_ok(connection)
            time.sleep(1.3)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (_head("/v1/completions", *(f"x-{i}: y" for i in range(100))), 431),
        (_head("/v1/completions", "x-large: " + "y" * 17_000), 431),
        (_head("/v1/completions", "x-huge: " + "y" * 2_000_000), 431),
        (_head("/" + "p" * 3000), 414),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no host
        (_head("/v1/completions", "content-length: 5", "content-length: 6"), 400),
        (_head("/v1/completions", "content-length: -5"), 400),
        (_head("/v1/completions", "transfer-encoding: gzip"), 501),
        (_head("/nowhere", "content-length: 3", "transfer-encoding: chunked") + b"0\r\n\r\n", 400),
        (_head("/v1/completions", "transfer-encoding: chunked") + b"zz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS to a plain port
    ],
    ids=[
        "many-headers",
        "large-header",
        "huge-header",
        "long-path",
        "nonsense",
        "no-host",
        "two-lengths",
        "negative-length",
        "transfer-encoding",
        "length-and-chunks",
        "bad-chunk",
        "tls",
    ],
)
def test_bad_heads(server: Any, head: bytes, status: int) -> None:
    with server.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head)
        raw = _read_all(connection)
    if raw or len(head) < 100_000:  # a reset may overtake the answer to a flood
        _error_of(raw, status)
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_many_requests_in_one_write(server: Any) -> None:
    with server.connect() as connection:
        one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        connection.sendall(one * 9 + one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert _read_all(connection).count(b'{"status":"ok"}') == 10


def test_too_many_connections(start_server: Any) -> None:
    server = start_server(max_connections=3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            held = stack.enter_context(server.connect())
            held.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            _read_ok(held)
        with server.connect() as one_more:
            error = _error_of(_read_all(one_more), 503)
    assert error["code"] == "too_many_connections"

    def is_open_again() -> bool:
        with server.http() as http:
            return http.get("/health").status_code == 200

    server.wait(is_open_again)


def test_client_that_does_not_read(start_server: Any, fake: Any) -> None:
    """Its generation is held up by the bounded buffer, then ended by the write deadline."""
    engine = fake.FakeEngine(max_model_len=500_000)
    server = start_server(engine, write_timeout_s=0.5)
    body = {**BODY, "max_tokens": 400_000, "stream": True}
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        content = json.dumps(body).encode()
        connection.sendall(_head("/v1/completions", f"content-length: {len(content)}") + content)
        server.wait(lambda: engine.tokens_sent > 100)
        server.wait(lambda: bool(engine.cancelled), 30)
        assert engine.tokens_sent < 400_000
        server.wait(lambda: not engine.live)
    with server.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_slow_reader_gets_everything(start_server: Any, fake: Any) -> None:
    server = start_server(fake.FakeEngine(max_model_len=50_000), event_buffer=2)
    body = {**BODY, "max_tokens": 3000, "stream": True}
    received = b""
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for number, piece in enumerate(response.iter_raw(4096)):
            received += piece
            time.sleep(0.05 if number < 10 else 0)
    assert received.endswith(b"data: [DONE]\n\n")
    texts = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in received.decode().split("\n\n")
        if line.startswith("data: {")
    ]
    answer = fake.ANSWER.encode()
    expected = bytes(answer[i % len(answer)] for i in range(3000)).decode("utf-8", "ignore")
    assert "".join(texts) == expected


@pytest.mark.parametrize(
    ("path", "field"),
    [("completions", "prompt"), ("embeddings", "input"), ("chat/completions", "messages")],
)
def test_a_text_that_is_surely_too_long_is_not_tokenised(
    start_server: Any, fake: Any, assert_api_error: Any, path: str, field: str
) -> None:
    engine = fake.FakeEngine()
    tokenised: list[int] = []

    def encode(text: str, **_: Any) -> list[int]:
        tokenised.append(len(text))
        return [1] * len(text)

    engine.tokenizer.encode = encode
    server = start_server(engine)
    body = {"model": "fake/model"}
    with server.http() as http:
        for length in (3 * 2**20, engine.max_model_len + 1):
            text = "x" * length
            value: Any = [{"role": "user", "content": text}] if field == "messages" else text
            error = assert_api_error(http.post(f"/v1/{path}", json={**body, field: value}), 400)
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == field
            assert "at least" in error["message"]
            assert int(error["message"].partition("at least ")[2].split()[0]) >= length
    assert not tokenised
    assert not engine.requests


def test_queue_bound(start_server: Any, fake: Any, assert_api_error: Any) -> None:
    """Two hundred at once against a bound of four: all are answered, with 200 or 429."""
    import threading

    engine = fake.FakeEngine()
    engine.max_live = 4
    server = start_server(engine)
    statuses: list[int] = []

    def send(count: int) -> None:
        with server.http() as http:
            for _ in range(count):
                body = {**BODY, "prompt": "!slow", "max_tokens": 3}
                response = http.post("/v1/completions", json=body)
                if response.status_code == 429:
                    assert_api_error(response)
                    assert response.headers["retry-after"] == "3"
                statuses.append(response.status_code)

    threads = [threading.Thread(target=send, args=(10,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 200
    assert set(statuses) == {200, 429}
    server.wait(lambda: not engine.live and not server.state.in_flight)


def test_deadline(start_server: Any, fake: Any, assert_api_error: Any) -> None:
    server = start_server(request_deadline_s=0.3)
    with server.http() as http:
        for prompt in ("!endless", "!slow"):
            body = {**BODY, "prompt": prompt, "max_tokens": 500}
            response = http.post("/v1/completions", json=body)
            assert assert_api_error(response, 504)["code"] == "deadline_exceeded"
            assert response.headers["x-should-retry"] == "false"
        streamed = http.post("/v1/completions", json={**body, "stream": True})
        assert '"code":"deadline_exceeded"' in streamed.text
        assert "[DONE]" not in streamed.text
        embed = http.post("/v1/embeddings", json={"model": "fake/model", "input": "!endless"})
        assert_api_error(embed, 504)
    server.wait(lambda: len(server.engine.cancelled) == 3 and not server.engine.live)
