"""The page at `/` and its files: part of this package, and kept from loading anything else.

The files hold no data. The page asks `/v1/hal/status` and `/v1/hal/plan` for them, with the API key
where there is one; so its files need no key, and the list of endpoints, which programs get at the
same address, needs it as before.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from hal_engine.server.endpoint import json_response
from hal_engine.server.state import state_of

ASSETS = {
    "api.js": "text/javascript",
    "calls.js": "text/javascript",
    "charts.js": "text/javascript",
    "chat.js": "text/javascript",
    "dashboard.css": "text/css",
    "dom.js": "text/javascript",
    "format.js": "text/javascript",
    "grafana-dashboard.json": "application/json",
    "history.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript",
    "overview.js": "text/javascript",
    "plan.js": "text/javascript",
    "theme.js": "text/javascript",
}
_PAGE = "index.html"
_PREFIX = "/static/"
_REFUSED = re.compile(r"q=0(\.0*)?")

# Text of models, devices and answers is never markup: no inline script or style, nothing from
# elsewhere, no frame around the page, and no string that a script could turn into markup.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # after an upgrade, the new files
}


async def index(request: Request) -> Response:
    """For browsers the dashboard, with a chat; for programs the model and the endpoints"""
    if wants_page(request.scope):
        response = _file(_PAGE, "text/html")
    else:
        paths = sorted({getattr(route, "path", "") for route in request.app.routes} - {"/", ""})
        response = json_response({"model": state_of(request).engine.model_id, "endpoints": paths})
    response.headers["vary"] = "accept"
    return response


async def asset(request: Request) -> Response:
    """A file of the dashboard, or `grafana-dashboard.json`; needs no key"""
    name = request.path_params["name"]
    media_type = ASSETS.get(name)
    if media_type is None:
        raise HTTPException(404)
    return _file(name, media_type)


def is_public(scope: Scope) -> bool:
    """Whether the request is for a file of the page, which holds nothing of this server's."""
    path: str = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    if path == "/":
        return wants_page(scope)
    return path.removeprefix(_PREFIX) in ASSETS and path.startswith(_PREFIX)


def wants_page(scope: Scope) -> bool:
    """Whether the client names HTML among what it takes, as browsers do and programs do not."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    for entry in accepted.decode("latin-1").lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind == "text/html":
            return not any(_REFUSED.fullmatch(parameter) for parameter in parameters)
    return False


def _file(name: str, media_type: str) -> Response:
    return Response(_content(name), headers=HEADERS, media_type=media_type)


@cache
def _content(name: str) -> bytes:
    return (files("hal_engine.server") / "static" / name).read_bytes()
