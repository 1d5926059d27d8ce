"""Who may call: the API key (`Authorization: Bearer KEY`), or else this machine's own programs.

The key is compared in constant time and never logged. It comes from the setting `api_key` (as a
variable: HAL_SERVE_API_KEY) or `api_key_file`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from hal.errors import SettingsError
from hal.text_files import read_regular_text
from hal_engine.server.config import ServerConfig, is_loopback_name
from hal_engine.server.errors import ApiError

_MAX_KEY_LENGTH = 1024
_PORT = re.compile(r":[0-9]*$")


def resolve_api_key(config: ServerConfig) -> bytes | None:
    """The key in use, or None; SettingsError for an unreadable file or an impossible key."""
    if config.api_key is not None:
        return _checked(config.api_key.get_secret_value(), "api_key")
    if config.api_key_file is not None:
        try:
            text = read_regular_text(config.api_key_file)
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "not ASCII"
            raise SettingsError(
                f"server: api_key_file {config.api_key_file}",
                "a readable ASCII file with the key",
                str(reason),
                "check the path and its permissions",
            ) from None  # a decoding error would show the file's bytes
        return _checked(text.strip(), f"api_key_file {config.api_key_file}")
    return None


def _checked(key: str, source: str) -> bytes:
    is_sendable = key.isascii() and key.isprintable() and " " not in key
    if not key or len(key) > _MAX_KEY_LENGTH or not is_sendable:
        raise SettingsError(
            f"server: {source}",
            f"1 to {_MAX_KEY_LENGTH} printable ASCII characters without spaces",
            f"{len(key)} characters" if is_sendable else "other characters",
            "choose a key such as the output of `openssl rand -hex 32`",
        )
    return key.encode("ascii")


class ApiKeyMiddleware:
    """Refuses HTTP requests without the key, except those that are open to all."""

    def __init__(self, app: ASGIApp, *, api_key: bytes, is_open: Callable[[Scope], bool]) -> None:
        self._app = app
        self._digest = hashlib.sha256(api_key).digest()
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            raise _refused("You must send one header 'Authorization: Bearer API_KEY'.")
        scheme, _, key = values[0].partition(b" ")
        # Digests have one length, so the comparison's time says nothing of the key's length.
        presented = hashlib.sha256(key.strip()).digest()
        if scheme.lower() != b"bearer" or not hmac.compare_digest(presented, self._digest):
            raise _refused("The API key is not right.")


class LoopbackHostMiddleware:
    """Refuses requests under other names than this machine's own.

    For servers without a key: a page in the user's browser may give this machine's address to a
    name of its own (DNS rebinding), and would then call the server like a page of the server's.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            value: bytes = dict(scope["headers"]).get(b"host", b"")
            name = _PORT.sub("", value.decode("latin-1").lower()).strip("[]")
            if not is_loopback_name(name) and name not in self._allowed_hosts:
                raise ApiError(
                    403,
                    "This server has no API key, and answers under this machine's own names only. "
                    "Its operator can set a key, or serve.allowed_hosts.",
                    code="host_not_allowed",
                    headers={"connection": "close"},
                )
        await self._app(scope, receive, send)


def _refused(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer", "connection": "close"},
    )
