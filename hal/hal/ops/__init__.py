"""The op catalogue: one file per op family. A new family is a new file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hal.ops import (
    activation,
    attention,
    collective,
    embedding,
    gemm,
    kv_write,
    norm,
    rope,
    sampling,
)
from hal.ops.request import OpFamily, OpRequest, Phase, TokenRange, Tolerance

_FAMILIES: tuple[OpFamily, ...] = (
    attention.FAMILY,
    gemm.FAMILY,
    gemm.GROUPED_FAMILY,
    norm.FAMILY,
    rope.FAMILY,
    activation.FAMILY,
    embedding.FAMILY,
    kv_write.FAMILY,
    sampling.FAMILY,
    collective.FAMILY,
)

CATALOGUE: Mapping[str, OpFamily] = MappingProxyType({f.name: f for f in _FAMILIES})

__all__ = ["CATALOGUE", "OpFamily", "OpRequest", "Phase", "TokenRange", "Tolerance"]
