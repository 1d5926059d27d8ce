"""The page at `/` and the document behind it: who may read what, headers, limits, and cost."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hal_engine.api import EngineDeadError, OpCallCount
from hal_engine.server.dashboard import ASSETS
from hal_engine.server.latencies import RecentLatencies
from hal_engine.server.op_totals import op_totals, totals_without_ranges

KEY = "a-very-secret-key"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
BODY = {"model": "fake/model", "prompt": "hi", "max_tokens": 5}
STATIC = files("hal_engine.server") / "static"
FILES = [f"/static/{name}" for name in ASSETS]
DOCUMENT = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")


def _status(server: Any) -> dict[str, Any]:
    """A document made now."""
    server.state.status.body = None
    with server.http() as http:
        response = http.get("/v1/hal/status")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


# ---- the page ----


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML; q=0.5", True),
        ("*/*", False),
        ("application/json", False),
        ("text/html;q=0, */*", False),
        ("text/html; q=0.00", False),
        ("text/htmlx", False),
        ("", False),
    ],
)
def test_browsers_get_the_page_and_programs_the_endpoints(
    server: Any, accept: str, is_page: bool
) -> None:
    with server.http() as http:
        response = http.get("/", headers={"accept": accept})
    assert response.status_code == 200
    assert response.headers["vary"] == "accept"
    assert response.headers["content-type"].startswith("text/html") == is_page
    if not is_page:
        assert "/v1/hal/status" in response.json()["endpoints"]


@pytest.mark.parametrize("path", ["/", *FILES])
def test_headers_that_keep_the_page_to_itself(server: Any, path: str) -> None:
    with server.http() as http:
        response = http.get(path, headers={"accept": BROWSER})
        head = http.head(path, headers={"accept": BROWSER})
    assert response.status_code == head.status_code == 200
    assert not head.content
    assert int(head.headers["content-length"]) == len(response.content)
    policy = dict(
        directive.partition(" ")[::2]
        for directive in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"


def test_no_file_needs_or_holds_what_the_policy_forbids() -> None:
    """No inline script or style, no address of elsewhere, no way from text to markup."""
    names = {path.name for path in STATIC.iterdir()}
    assert names == {"index.html", *ASSETS}
    for name in names - {"grafana-dashboard.json"}:
        text = (STATIC / name).read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\"' )]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"setTimeout\([\"'`]|new Function|javascript:", text), name
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    wanted = set(re.findall(r"(?:src|href)=\"(/[^\"]*)\"", page))
    assert wanted <= set(FILES)
    modules = "".join((STATIC / n).read_text(encoding="utf-8") for n in names if n.endswith(".js"))
    imported = {f"/static/{name}" for name in re.findall(r"from \"\./([^\"]+)\"", modules)}
    assert imported | wanted == set(FILES), "a file that nothing uses, or one that is not served"
    used = set(re.findall(r"byId\(\"([^\"]+)\"\)", modules))
    assert used <= set(re.findall(r"\bid=\"([^\"]+)\"", page))


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/none.js",
        "/static/index.html",
        "/static/..%2fauth.py",
        "/static/%2e%2e/auth.py",
        "/static/main.js/",
        "/static//etc/passwd",
    ],
)
def test_only_named_files_are_served(server: Any, assert_api_error: Any, path: str) -> None:
    with server.http() as http:
        assert_api_error(http.get(path), 404)


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/v1/hal/status"])
@pytest.mark.parametrize("method", ["POST", "OPTIONS", "DELETE", "BREW"])
def test_other_methods(server: Any, assert_api_error: Any, method: str, path: str) -> None:
    with server.http() as http:
        response = http.request(method, path, headers={"accept": BROWSER})
    assert_api_error(response, 405)
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}


# ---- who may read ----


def test_with_a_key_only_the_files_of_the_page_are_open(
    start_server: Any, assert_api_error: Any
) -> None:
    server = start_server(api_key=KEY, served_model_names=("private-name",))
    plain = {"accept": "*/*"}
    with server.http() as http:
        for path in ("/", *FILES):
            response = http.get(path, headers={"accept": BROWSER})
            assert response.status_code == 200
            assert http.head(path, headers={"accept": BROWSER}).status_code == 200
            for secret in ("fake/model", "private-name", KEY):
                assert secret not in response.text
            assert_api_error(http.post(path, headers={"accept": BROWSER}), 401)
        for path in ("/v1/hal/status", "/v1/hal/plan", "/metrics", "/static/none.js", "/v1/models"):
            assert_api_error(http.get(path, headers={"accept": BROWSER}), 401)
            assert http.head(path, headers={"accept": BROWSER}).status_code == 401
        assert_api_error(http.get("/", headers=plain), 401)
        assert_api_error(http.get("/", headers={"accept": "text/html;q=0"}), 401)
        right = {"authorization": f"Bearer {KEY}"}
        assert http.get("/v1/hal/status", headers=right).json()["status"] == "ready"
        assert http.get("/", headers=right).json()["model"] == "fake/model"


def test_without_a_key_the_page_has_this_machines_names_only(
    server: Any, assert_api_error: Any
) -> None:
    with server.http() as http:
        for path in ("/", "/static/main.js", "/v1/hal/status"):
            headers = {"host": "evil.example", "accept": BROWSER}
            assert assert_api_error(http.get(path, headers=headers), 403)


def test_limits_hold_for_the_page_too(start_server: Any, assert_api_error: Any) -> None:
    server = start_server(max_path_bytes=100, max_header_count=8)
    with server.http() as http:
        for path in ("/", "/v1/hal/status", "/static/main.js"):
            assert_api_error(http.get(f"{path}?x={'y' * 200}"), 414)
            many = {f"x-{i}": "1" for i in range(20)}
            assert_api_error(http.get(path, headers=many), 431)


# ---- the document ----


def test_status_of_a_server_at_work(start_server: Any) -> None:
    server = start_server(default_temperature=0.25)
    before = _status(server)
    assert before["latency"]["time_to_first_token"] == {
        "count": 0,
        "p50_s": None,
        "p95_s": None,
        "last_s": None,
    }
    with server.http() as http:
        for _ in range(3):
            assert http.post("/v1/completions", json=BODY).status_code == 200
        assert http.post("/v1/completions", json={}).status_code == 400
    server.wait(lambda: server.state.active_requests == 0)
    found = _status(server)
    assert found["schema"] == "halstack.status/1"
    assert (found["status"], found["reasons"]) == ("ready", [])
    assert found["model"] == {
        "id": "fake/model",
        "names": ["fake/model"],
        "max_model_len": 2000,
        "has_chat_template": True,
    }
    assert found["plan"] == {"hash": server.engine.plan_hash()}
    assert found["engine"]["generated_tokens"] == 15
    assert found["engine"]["kv_blocks_total"] == 100
    assert found["requests"] == {"active": 0, "by_outcome": {"ok": 3, "client_error": 1}}
    assert found["latency"]["time_to_first_token"]["count"] == 3
    assert found["latency"]["inter_token"]["count"] == 12
    assert 0 < found["latency"]["inter_token"]["p50_s"] <= found["latency"]["inter_token"]["p95_s"]
    assert found["process"]["resident_bytes"] > 2**20
    assert found["server"]["default_temperature"] == 0.25
    assert found["at_s"] > before["at_s"]
    assert found["calls"] == [
        {
            "op": "gemm",
            "phase": "decode",
            "implementation": "cpu.onednn",
            "tier": "native",
            "calls": 20,
        }
    ]


def test_the_document_names_every_key_of_the_status(server: Any) -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*(keys(item) for item in value.values()))
        return set().union(*(keys(item) for item in value)) if isinstance(value, list) else set()

    missing = {key for key in keys(_status(server)) if f"`{key}`" not in DOCUMENT}
    assert not missing


def test_status_says_what_is_not_well(start_server: Any) -> None:
    server = start_server()
    server.engine.degraded = [f"tier waiver {i}" for i in range(80)]
    degraded = _status(server)
    assert degraded["status"] == "degraded"
    assert degraded["waivers"]["count"] == 80
    assert degraded["reasons"] == degraded["waivers"]["in_use"] == server.engine.degraded[:50]
    server.state.is_draining = True
    draining = _status(server)
    assert draining["status"] == "draining"
    assert draining["waivers"]["count"] == 80
    server.engine.stats_error = EngineDeadError("/secret/path")
    stopped = _status(server)
    assert (stopped["status"], stopped["engine"], stopped["calls"]) == ("stopped", None, [])
    assert "/secret" not in json.dumps(stopped)


def test_names_of_any_characters(start_server: Any) -> None:
    server = start_server(served_model_names=("\udcff<b>\u202e",))
    server.engine.model_id = 'x</script><img src=x onerror="alert(1)">\udc80'
    server.engine.degraded = ["waiver for \ud800 <i>"]
    found = _status(server)
    assert found["model"]["id"] == 'x</script><img src=x onerror="alert(1)">?'
    assert found["model"]["names"][1] == "?<b>\u202e"
    assert found["reasons"] == ["waiver for ? <i>"]


def test_many_pages_cost_as_much_as_one(start_server: Any) -> None:
    server = start_server()
    engine, rows = server.engine, server.engine.op_calls()
    asked: list[float] = []

    def op_calls() -> Sequence[OpCallCount]:
        asked.append(time.monotonic())
        return rows

    engine.op_calls = op_calls
    begin = time.monotonic()
    with server.http() as http:
        bodies = {http.get("/v1/hal/status").content for _ in range(40)}
    seconds = time.monotonic() - begin
    assert len(bodies) == len(asked) <= 1 + seconds / 0.5


def test_a_poll_is_not_in_the_access_log(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with server.http() as http:
        http.get("/v1/hal/status")
        http.get("/static/main.js")
        http.post("/v1/hal/status")
    server.wait(lambda: caplog.text.count('"duration_s"') >= 2)
    rows = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "hal_engine.server.access"
    ]
    assert [(row["path"], row["status"]) for row in rows] == [
        ("/static", 200),
        ("/v1/hal/status", 405),
    ]


def test_metrics_of_a_degraded_server(start_server: Any) -> None:
    server = start_server()
    server.engine.degraded = ["tier waiver one", "semantic waiver two"]
    with server.http() as http:
        text = http.get("/metrics").text
        assert "hal_degraded 1.0" in text
        assert "hal_waivers_in_use 2.0" in text
        assert f'hal_plan_info{{hash="{server.engine.plan_hash()}"}} 1.0' in text
        server.engine.degraded = []
        text = http.get("/metrics").text
    assert "hal_degraded 0.0" in text
    assert "hal_waivers_in_use 0.0" in text


# ---- its parts ----


def _row(implementation: str, calls: int, tokens: str = "1-8", site: str = "a") -> OpCallCount:
    return OpCallCount(
        site=site,
        op="gemm",
        phase="any",
        implementation=implementation,
        tier="tuned",
        token_range=tokens,
        calls=calls,
    )


def test_totals_are_sums_over_sites_and_ranges() -> None:
    rows = [
        _row("cpu.a", 3),
        _row("cpu.a", 4, site="b"),
        _row("cpu.a", 5, tokens="9-16"),
        _row("cpu.b", 1),
    ]
    totals = op_totals(rows)
    assert totals["gemm", "any", "cpu.a", "tuned", "1-8"] == 7
    assert totals["gemm", "any", "cpu.a", "tuned", "9-16"] == 5
    assert totals_without_ranges(totals) == {
        ("gemm", "any", "cpu.a", "tuned"): 12,
        ("gemm", "any", "cpu.b", "tuned"): 1,
    }


def test_endless_names_are_bounded_and_lose_no_call() -> None:
    """A plug-in names its implementations; a label is no place for a book."""
    totals = op_totals([_row("x." + "y" * 5000, 2), _row("x." + "y" * 5001, 3)])
    assert sum(totals.values()) == 5
    assert all(len(part) <= 120 for key in totals for part in key)


def test_recent_latencies_are_those_of_the_last_minute() -> None:
    recent = RecentLatencies()
    assert recent.summary(0.0)["last_s"] is None
    for second in range(200):
        recent.add(float(second), second / 1000)
    summary = recent.summary(199.0)
    assert summary == {"count": 61, "p50_s": 0.169, "p95_s": 0.196, "last_s": 0.199}
    assert recent.summary(400.0) == {"count": 0, "p50_s": None, "p95_s": None, "last_s": 0.199}


def test_recent_latencies_are_bounded() -> None:
    recent = RecentLatencies()
    for number in range(10_000):
        recent.add(1.0, number * 0.001)
    assert recent.summary(1.0)["count"] == 2048
