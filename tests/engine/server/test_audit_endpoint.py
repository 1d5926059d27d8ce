"""`/v1/hal/audit`: the engine's report, or how to have one."""

from __future__ import annotations

from typing import Any


def test_off(server: Any) -> None:
    with server.http() as http:
        answer = http.get("/v1/hal/audit")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "audit_off"
    assert "serve.audit_every" in answer.json()["error"]["message"]


def test_on(server: Any) -> None:
    server.engine.audit = '{"schema": "halstack.audit/1"}'
    with server.http() as http:
        answer = http.get("/v1/hal/audit")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"schema": "halstack.audit/1"}
