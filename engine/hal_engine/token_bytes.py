"""The bytes that a token stands for, by the tokenizer's own kind of decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hal_engine.tokenizer_errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"  # sentencepiece's visible space


def byte_decoder(described: Mapping[str, Any], source: Path) -> Callable[[str], bytes]:
    """Token -> bytes. Raises TokenizerError for a decoder of another kind."""
    kinds = _decoder_kinds(described.get("decoder"))
    if "ByteLevel" in kinds:
        table = byte_level_table()
        return lambda token: _byte_level_bytes(table, token)
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_bytes
    raise TokenizerError(
        source,
        "decoder",
        "ByteLevel, ByteFallback or Metaspace",
        ", ".join(sorted(kinds)) or "none",
    )


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    kinds = {str(decoder.get("type"))}
    for step in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(step)
    return kinds


def byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for the
    characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


def _byte_level_bytes(table: Mapping[str, int], token: str) -> bytes:
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode("utf-8")  # not spelled in the alphabet: its own text


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode("utf-8")
