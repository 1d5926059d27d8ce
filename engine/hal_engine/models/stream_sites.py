"""The calls around sublayers: hyper-connections between residual streams, Engram before a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hal.ops.engram import EngramRequest
from hal.ops.hyper_connection import HyperConnectionRequest
from hal_engine.config_parts import EngramConfig, HyperConnectionConfig
from hal_engine.models.site_parts import Call, SiteParts

ENGRAM_TENSOR = "engram.wkv.weight"


def stream_call(
    parts: SiteParts, hyper: HyperConnectionConfig, kind: Literal["pre", "post", "head"]
) -> HyperConnectionRequest:
    """pre: streams to a sublayer's input; post: its output to streams; head: after the last."""
    return HyperConnectionRequest(
        kind=kind,
        num_streams=hyper.num_streams,
        hidden_size=parts.config.hidden_size,
        sinkhorn_iterations=hyper.sinkhorn_iterations,
        is_lagged=hyper.is_lagged,
        dtype=parts.precision.dtype,
        tokens=parts.limits.all_tokens,
    )


def engram_sites(parts: SiteParts, layer: int, engram: EngramConfig) -> Iterator[Call]:
    """n-gram rows of a rank's hash heads, projected to a key per stream and a value, mixed in.

    The projection is cut along its input, as the heads are, so its output is summed over ranks.
    """
    hyper = parts.config.hyper_connections
    streams = 1 if hyper is None else hyper.num_streams
    heads = parts.shard.engram_heads
    inputs = (engram.max_ngram - 1) * heads * engram.row_width
    outputs = (streams + 1) * parts.config.hidden_size
    rows = engram.rows[engram.layers.index(layer)] * heads // engram.num_heads
    weight = parts.linear(layer, (ENGRAM_TENSOR,), outputs, inputs)
    yield "engram.gather", _engram(parts, engram, streams, "gather", rows)
    yield from parts.quantize("engram.quantize", inputs, weight.weight_format)
    yield "engram.kv_proj", weight
    yield from parts.all_reduce("engram.all_reduce", outputs)
    yield "engram.mix", _engram(parts, engram, streams, "mix", 0)


def _engram(
    parts: SiteParts,
    engram: EngramConfig,
    streams: int,
    kind: Literal["gather", "mix"],
    table_rows: int,
) -> EngramRequest:
    return EngramRequest(
        kind=kind,
        num_heads=parts.shard.engram_heads,
        max_ngram=engram.max_ngram,
        row_width=engram.row_width,
        hidden_size=parts.config.hidden_size,
        num_streams=streams,
        table_rows=table_rows,
        dtype=parts.precision.dtype,
        tokens=parts.limits.all_tokens,
    )
