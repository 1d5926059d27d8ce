"""A small client of `/v1/completions` streams: as little of the processors as possible is taken
from the server that is measured, so no HTTP library is used."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
REQUEST_DEADLINE_S = 180.0


class StreamError(RuntimeError):
    """The server answered with an error, or the stream ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult:
    """Times in seconds since the request was sent. tokens: by the server's usage, if it told."""

    first_token_s: float
    seconds: float
    tokens: int
    text: str


async def complete(port: int, body: Mapping[str, Any]) -> StreamResult:
    """One streamed completion from a server on this machine. Raises StreamError, TimeoutError."""
    async with asyncio.timeout(REQUEST_DEADLINE_S):
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 22)
        try:
            return await _exchange(reader, writer, body)
        finally:
            writer.close()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Mapping[str, Any]
) -> StreamResult:
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    started = time.perf_counter()
    writer.write(head.encode() + payload)
    await writer.drain()
    status = (await reader.readline()).decode("latin-1").strip()
    if " 200 " not in f"{status} ":
        rest = (await reader.read(2000)).decode(errors="replace")
        raise StreamError(f"required status 200, found {status}: {rest[-500:]}")
    first_s, usage, chunks, text = 0.0, 0, 0, []
    # Lines of the headers and of chunked framing are told apart from events by their beginning.
    while line := await reader.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise StreamError(f"the stream has an error: {event['error']}")
        usage = (event.get("usage") or {}).get("completion_tokens") or usage
        piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
        if piece:
            first_s = first_s or time.perf_counter() - started
            chunks += 1
            text.append(piece)
    if not chunks:
        raise StreamError("required some text, found none before the end of the stream")
    return StreamResult(
        first_token_s=first_s,
        seconds=time.perf_counter() - started,
        tokens=usage or chunks,
        text="".join(text),
    )


async def get_status(port: int, path: str) -> int:
    """Status of a GET; 0 if nobody listens yet."""
    try:
        async with asyncio.timeout(10.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
            )
            await writer.drain()
            parts = (await reader.readline()).split()
            writer.close()
            return int(parts[1]) if len(parts) > 1 else 0
    except (OSError, TimeoutError):
        return 0
