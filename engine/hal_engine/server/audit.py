"""`/v1/hal/audit`: what the running engine did so far, against its plan. Off by default."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from hal_engine.server.errors import ApiError
from hal_engine.server.state import state_of


async def audit(request: Request) -> Response:
    """The audit report of this engine so far, if `serve.audit_every` is set; 404 otherwise"""
    state = state_of(request)
    async with request.app.state.audit_lock:  # a report takes a moment: one at a time
        text = await asyncio.to_thread(state.engine.audit_report)
    if text is None:
        raise ApiError(
            404,
            "The audit of this server is off; start it with --set serve.audit_every=32.",
            code="audit_off",
        )
    return Response(text, media_type="application/json")
