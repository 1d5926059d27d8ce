"""Health, readiness, metrics, plan, API key, errors of the router, logs, drain and signals."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from hal.errors import SettingsError
from hal_engine.api import EngineDeadError
from hal_engine.server.app import create_app
from hal_engine.server.auth import resolve_api_key
from hal_engine.server.config import ServerConfig
from hal_engine.server.run import (
    DrainingServer,
    ServerStartError,
    bind_listener,
    check_exposure,
)

BODY = {"model": "fake/model", "prompt": "hi", "max_tokens": 5}
KEY = "a-very-secret-key"


def test_health_and_plan(server: Any) -> None:
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        plan = http.get("/v1/hal/plan")
        assert plan.json() == server.engine.plan_json()
        assert plan.headers["x-hal-plan"] == server.engine.plan_hash()
        assert "/v1/completions" in http.get("/").json()["endpoints"]


def test_ready(start_server: Any) -> None:
    server = start_server(ready_deadline_s=0.2)
    engine = server.engine
    with server.http() as http:
        assert http.get("/ready").json()["status"] == "ready"
        engine.degraded = ["waiver 3: attention.decode runs 'portable' (expires 2027-01-01)"]
        degraded = http.get("/ready")
        assert degraded.status_code == 200
        assert degraded.json()["status"] == "degraded"
        assert degraded.json()["reasons"] == engine.degraded
        engine.ready_delay_s = 60
        late = http.get("/ready")
        assert (late.status_code, late.json()["status"]) == (503, "not ready")
        engine.ready_error = EngineDeadError("/secret/path")
        dead = http.get("/ready")
        assert dead.status_code == 503
        assert "/secret" not in dead.text
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("failures", "line"),
    [([TimeoutError(), TimeoutError("busy")], "ready"), ([EngineDeadError("gone")], "not ready")],
    ids=["slow", "dead"],
)
def test_ready_is_said_when_a_forward_has_worked(
    fake: Any, failures: list[Exception], line: str
) -> None:
    """Not before, however often the first one is late; and never by an engine that is dead."""
    engine = fake.FakeEngine()
    left, said = list(failures), []

    async def check_ready(deadline_s: float) -> None:
        assert not said
        if left:
            raise left.pop(0)

    engine.check_ready = check_ready
    config = ServerConfig(port=0)
    with contextlib.closing(bind_listener(config)) as listener:
        port = listener.getsockname()[1]
        server = DrainingServer(create_app(engine, config), config, listener, said.append)

        async def start_and_end() -> None:
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup([listener])
            await server.shutdown([listener])

        asyncio.run(start_and_end())
    assert not left
    assert said == [f"{line}: serving fake/model at http://127.0.0.1:{port}"]


def test_ready_runs_one_forward_for_many_probes(start_server: Any) -> None:
    server = start_server(ready_cache_s=60)
    before = server.engine.ready_checks
    with server.http() as http:
        for _ in range(5):
            assert http.get("/ready").status_code == 200
    assert server.engine.ready_checks == before + 1


def _samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics(start_server: Any) -> None:
    server = start_server()
    with server.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert http.post("/v1/completions", json={**BODY, "n": 0}).status_code == 400
        assert http.post("/v1/completions", json={**BODY, "prompt": "!queue"}).status_code == 429
        assert http.post("/v1/completions", json={**BODY, "prompt": "!crash"}).status_code == 500
        http.get("/some/secret/path")
        text = http.get("/metrics").text
    found = _samples(text)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    path = "/v1/completions"
    for outcome in ("ok", "client_error", "overload", "error"):
        assert value("hal_requests_total", endpoint=path, outcome=outcome) == 1
    assert value("hal_requests_total", endpoint="other", outcome="client_error") == 1
    assert value("hal_time_to_first_token_seconds_count") == 1
    assert value("hal_inter_token_latency_seconds_count") == 4
    assert value("hal_request_duration_seconds_count", endpoint=path) == 4
    assert value("hal_generated_tokens_total") == 5
    assert value("hal_sequences_waiting") == 3
    assert value("hal_kv_blocks_total") == 100
    assert value("hal_preemptions_total") == 2
    assert value("hal_engine_replayed_steps_total") == 2
    assert value("hal_cached_prompt_tokens_total") == 11
    assert value("hal_engine_alive") == 1
    assert value("hal_plan_info", hash=server.engine.plan_hash()) == 1
    calls = value(
        "hal_op_calls_total",
        op="gemm",
        phase="decode",
        implementation="cpu.onednn",
        tier="native",
        token_range="1-16",
    )
    assert calls == 20  # four call sites, five calls each
    assert "secret" not in text


def test_metrics_of_a_dead_engine(start_server: Any) -> None:
    server = start_server()
    server.engine.stats_error = EngineDeadError("gone")
    with server.http() as http:
        found = _samples(http.get("/metrics").text)
    assert found["hal_engine_alive", ()] == 0


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/models/other", "/docs", "/openapi.json"])
def test_unknown_paths(server: Any, assert_api_error: Any, path: str) -> None:
    with server.http() as http:
        assert_api_error(http.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/v1/models"), ("BREW", "/ready")],
)
def test_wrong_methods(server: Any, assert_api_error: Any, method: str, path: str) -> None:
    with server.http() as http:
        response = http.request(method, path)
    assert_api_error(response, 405)
    assert response.headers["allow"]


def test_request_ids(server: Any) -> None:
    with server.http() as http:
        echoed = http.get("/health", headers={"x-request-id": "mine-1.2"})
        refused = http.get("/health", headers={"x-request-id": "a b<script>"})
        ids = {http.get("/health").headers["x-request-id"] for _ in range(5)}
    assert echoed.headers["x-request-id"] == "mine-1.2"
    assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])
    assert len(ids) == 5


def test_cors_is_off_by_default(server: Any, start_server: Any) -> None:
    origin = {"origin": "https://page.example"}
    preflight = {**origin, "access-control-request-method": "POST"}
    with server.http() as http:
        assert "access-control-allow-origin" not in http.get("/health", headers=origin).headers
        assert http.options("/v1/completions", headers=preflight).status_code == 405
    opened = start_server(cors_allowed_origins=("https://page.example",))
    with opened.http() as http:
        allowed = http.options("/v1/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:80", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.1", 403),
        ("my.host:1", 200),
    ],
)
def test_names_of_a_server_without_a_key(
    start_server: Any, assert_api_error: Any, host: str, status: int
) -> None:
    """A page whose name resolves to this machine gets nothing (DNS rebinding)."""
    server = start_server(allowed_hosts=("My.Host",))
    with server.http() as http:
        response = http.post("/v1/completions", json=BODY, headers={"host": host})
    assert response.status_code == status
    if status == 403:
        assert assert_api_error(response)["code"] == "host_not_allowed"
        assert not server.engine.requests


def test_a_key_allows_every_name(start_server: Any) -> None:
    server = start_server(api_key=KEY)
    headers = {"host": "proxy.example", "authorization": f"Bearer {KEY}"}
    with server.http() as http:
        assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.fixture
def keyed(start_server: Any) -> Any:
    return start_server(api_key=KEY)


def test_api_key(keyed: Any, assert_api_error: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert keyed.openai(api_key=KEY).models.list().data
    with pytest.raises(openai.AuthenticationError) as caught:
        keyed.openai(api_key=KEY + "x").models.list()
    assert caught.value.code == "invalid_api_key"
    refused = [
        {},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer \xff"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"x-api-key": KEY},
    ]
    with keyed.http() as http:
        for headers in refused:
            latin = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in ("/v1/models", "/metrics", "/ready", "/v1/hal/plan", "/", "/nothing"):
                assert_api_error(http.get(path, headers=latin), 401)
            assert_api_error(http.post("/v1/completions", json=BODY, headers=latin), 401)
        assert http.get("/health").status_code == 200
        twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
        assert_api_error(http.get("/v1/models", headers=twice), 401)
        assert not keyed.engine.requests
        right = {"authorization": f"bearer {KEY}"}
        assert http.post("/v1/completions", json=BODY, headers=right).status_code == 200
    assert KEY not in caplog.text


def test_the_key_is_compared_in_constant_time(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function made for it, which sees values of one length, whatever a client sends."""
    compared: list[tuple[bytes, bytes]] = []
    in_constant_time = hmac.compare_digest

    def compare(presented: bytes, wanted: bytes) -> bool:
        compared.append((presented, wanted))
        return in_constant_time(presented, wanted)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    statuses = []
    with keyed.http() as http:
        for key in (KEY, KEY[:-1], KEY + "x", "x", KEY[1:], "x" * 4000):
            headers = {"authorization": f"Bearer {key}"}
            statuses.append(http.get("/v1/models", headers=headers).status_code)
    assert statuses == [200, *[401] * 5]
    assert {len(value) for pair in compared for value in pair} == {32}
    assert len(compared) == 6
    assert not any(KEY.encode() in value for pair in compared for value in pair)


def test_open_metrics_and_readiness(start_server: Any) -> None:
    server = start_server(api_key=KEY, metrics_require_api_key=False, ready_requires_api_key=False)
    with server.http() as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/ready").status_code == 200
        assert http.get("/v1/models").status_code == 401


def test_key_sources(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    assert resolve_api_key(ServerConfig()) is None
    assert resolve_api_key(ServerConfig(api_key_file=path)) == KEY.encode()
    assert resolve_api_key(ServerConfig(api_key=KEY)) == KEY.encode()
    assert KEY not in repr(ServerConfig(api_key=KEY))
    for bad in ("", "with space", "ümlaut", "x" * 2000, "tab\t"):
        with pytest.raises(SettingsError) as caught:
            resolve_api_key(ServerConfig(api_key=bad))
        assert bad == "" or bad not in str(caught.value)
    with pytest.raises(SettingsError):
        resolve_api_key(ServerConfig(api_key_file=tmp_path / "none"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bytes").write_bytes(KEY.encode() + b"\xff")
    for unreadable in ("fifo", "bytes", "."):  # none of them hangs, and no key is shown
        with pytest.raises(SettingsError) as caught:
            resolve_api_key(ServerConfig(api_key_file=tmp_path / unreadable))
        assert KEY not in str(caught.value)
    with pytest.raises(ValidationError) as both:
        ServerConfig(api_key=KEY, api_key_file=path)
    assert KEY not in str(both.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError):
        ServerConfig(max_header_byte=5)  # type: ignore[call-arg]


def test_exposure() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        check_exposure(ServerConfig(host=host))
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org"):
        with pytest.raises(ServerStartError, match="allow_unauthenticated"):
            check_exposure(ServerConfig(host=host))
        check_exposure(ServerConfig(host=host, allow_unauthenticated=True))
        check_exposure(ServerConfig(host=host, api_key=KEY))


def test_taken_port(server: Any) -> None:
    with pytest.raises(ServerStartError, match="another port"):
        bind_listener(ServerConfig(port=server.port))


def test_access_log(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with server.http() as http:
        body = {**BODY, "prompt": "private words"}
        response = http.post("/v1/completions?token=hidden", json=body)
        http.get("/private/path%0aX")
    server.wait(lambda: caplog.text.count("duration_s") >= 2)
    rows = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "hal_engine.server.access"
    ]
    logged = "".join(r.getMessage() for r in caplog.records if not r.name.startswith("httpx"))
    assert rows[0]["request_id"] == response.headers["x-request-id"]
    assert (rows[0]["path"], rows[0]["status"], rows[0]["outcome"]) == (
        "/v1/completions",
        200,
        "ok",
    )
    assert rows[1]["path"] == "other"
    for secret in ("private", "hidden", "quick"):
        assert secret not in logged


def test_internal_errors_are_logged(
    server: Any, fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with server.http() as http:
        headers = {"x-request-id": "find-me"}
        body = {**BODY, "prompt": "!crash"}
        response = http.post("/v1/completions", json=body, headers=headers)
    assert "find-me" in caplog.text
    assert response.json()["error"]["message"]
    assert response.headers["x-request-id"] in caplog.text
    assert "Traceback" in caplog.text
    assert fake.SECRET_DETAIL in caplog.text


def test_drain(start_server: Any, assert_api_error: Any) -> None:
    """Streams finish, new requests are refused, and the engine's full queue is called a drain."""
    server = start_server()
    body = {**BODY, "prompt": "!slow", "max_tokens": 40, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        with server.http() as other:
            server.state.is_draining = True
            refused = other.post("/v1/completions", json=BODY)
            assert assert_api_error(refused, 503)["code"] == "server_draining"
            assert int(refused.headers["retry-after"]) >= 1
            ready = other.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
            assert other.get("/health").status_code == 200
        rest = "\n".join(lines)
    assert rest.count('"text"') == 37  # 40 tokens, two of them half a character, one read before
    assert rest.rstrip().endswith("[DONE]")


class Process:
    """The fake server in a process of its own."""

    def __init__(self, close_s: float, **settings: Any) -> None:
        script = str(Path(__file__).parent / "serve_fake.py")
        self.child = subprocess.Popen(
            [sys.executable, script, json.dumps(settings), str(close_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        self.ready_line = self.child.stdout.readline()
        self.url = self.ready_line.rsplit(" ", 1)[-1].strip()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0)

    def stream(self, max_tokens: int) -> Iterator[str]:
        stream = self.client.completions.create(
            model="fake/model", prompt="!slow", max_tokens=max_tokens, stream=True
        )
        for chunk in stream:
            yield chunk.choices[0].text

    def end(self) -> tuple[int, str, str]:
        out, err = self.child.communicate(timeout=60)
        return self.child.returncode, out, err

    def drain(self, number: int = signal.SIGTERM) -> None:
        """Sends the first signal and returns when it is heeded: two at once may come as one."""
        self.child.send_signal(number)
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", trust_env=False).status_code == 503:
                    return
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def process() -> Iterator[Any]:
    started: list[Process] = []

    def start(close_s: float = 0, **settings: Any) -> Process:
        started.append(Process(close_s, port=0, **settings))
        return started[-1]

    yield start
    for item in started:
        item.child.kill()
        item.child.communicate()


def test_first_signal_drains(process: Any) -> None:
    server = process()
    assert re.match(r"ready: serving fake/model at http://127\.0\.0\.1:\d+$", server.ready_line)
    stream = server.stream(200)
    text = next(stream)
    server.drain()
    with pytest.raises(openai.InternalServerError) as refused:
        server.client.completions.create(model="fake/model", prompt="x")
    assert refused.value.code == "server_draining"
    text += "".join(stream)
    assert len(text.encode()) == 200
    code, out, err = server.end()
    assert code == 0
    assert "engine closed" in out
    assert "aborting" not in err


def test_drain_deadline_ends_streams_with_an_error(process: Any) -> None:
    server = process(drain_deadline_s=0.5)
    stream = server.stream(1500)
    next(stream)
    server.child.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert server.end()[0] == 0


def test_second_signal_aborts(process: Any) -> None:
    server = process(abort_deadline_s=50)
    stream = server.stream(1500)
    next(stream)
    server.drain()
    server.child.send_signal(signal.SIGTERM)
    with pytest.raises(Exception, match=r"(?i)peer|closed|reset|connection"):
        list(stream)
    code, out, err = server.end()
    assert code == 128 + signal.SIGTERM
    assert "engine closed" in out, "cut off, where an orderly end had time enough"
    assert "SIGTERM: aborting; the process ends with status 143 within 50 s" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_while_the_engine_closes(process: Any, number: int) -> None:
    server = process(close_s=250, abort_deadline_s=0.5)
    server.child.send_signal(signal.SIGTERM)
    while server.child.stdout.readline() != "engine closes\n":
        assert server.child.poll() is None
    server.child.send_signal(number)
    code, out, err = server.end()
    assert code == 128 + number
    assert "engine closed" not in out
    assert f"{signal.Signals(number).name}: aborting" in err
    assert "Traceback" not in err


def test_second_signal_while_the_engine_closes_in_time(process: Any) -> None:
    server = process(close_s=0.5, abort_deadline_s=60)
    server.child.send_signal(signal.SIGINT)
    while server.child.stdout.readline() != "engine closes\n":
        assert server.child.poll() is None
    server.child.send_signal(signal.SIGTERM)
    code, out, _ = server.end()
    assert code == 128 + signal.SIGTERM
    assert "engine closed" in out


def test_interrupt_when_idle(process: Any) -> None:
    server = process(drain_deadline_s=250)
    server.child.send_signal(signal.SIGINT)
    code, _, err = server.end()
    assert code == 0
    assert "Traceback" not in err


def test_concurrent_streams_do_not_mix(server: Any) -> None:
    texts: dict[int, str] = {}

    client = server.openai()

    def run(seed: int) -> None:
        stream = client.completions.create(
            model="fake/model", prompt="x", max_tokens=50, seed=seed, stream=True
        )
        texts[seed] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, text in texts.items():
        whole = client.completions.create(model="fake/model", prompt="x", max_tokens=50, seed=seed)
        assert whole.choices[0].text == text
    assert len(texts) == 12
