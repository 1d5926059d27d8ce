"""Sizes that requests of the support matrix share."""

from __future__ import annotations

from typing import Any

from hal.ops.request import TokenRange

TOKENS = TokenRange(1, 64)
LONG = TokenRange(1024, 8192)
BF16: dict[str, Any] = {"dtype": "bfloat16", "tokens": TOKENS}
