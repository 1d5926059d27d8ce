"""Pooling of windows: against transformers' DeepSeek-V4 compressors, whole and in any pieces."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
    DeepseekV4RotaryEmbedding,
)

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.kv_compressor import (
    CompressorMetadata,
    KvCompressorRequest,
    bytes_moved,
    flops,
    reference,
)
from hal.ops.rope import RopeRequest
from op_inputs import UNTIMED, assert_within, normal, starts_of
from oracle_modules import randomised, rope_table

Piece = tuple[int, int, int]  # query_len, seq_len, state slot


def metadata(request: KvCompressorRequest, pieces: list[Piece]) -> CompressorMetadata:
    closed = [s // request.ratio - (s - q) // request.ratio for q, s, _ in pieces]
    return CompressorMetadata(
        query_start_loc=starts_of([q for q, _, _ in pieces]),
        seq_lens=torch.tensor([s for _, s, _ in pieces], dtype=torch.int32),
        state_slots=torch.tensor([slot for _, _, slot in pieces], dtype=torch.int32),
        entry_start_loc=starts_of(closed),
    )


def new_state(request: KvCompressorRequest, slots: int) -> torch.Tensor:
    shape = (slots, request.state_rows, 2, request.width)
    return torch.full(shape, float("nan"), dtype=torch.float64)


def one_channel_at_a_time(
    request: KvCompressorRequest,
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """All entries of one whole sequence, from the formulas, in Python loops."""
    m, d, entries = request.ratio, request.head_dim, []
    for w in range(len(kv) // m):
        pooled = torch.zeros(d, dtype=torch.float64)
        for c in range(d):
            if request.is_overlapping:
                places = [(p, c) for p in range(max(0, w - 1) * m, w * m)]
                places += [(p, d + c) for p in range(w * m, (w + 1) * m)]
            else:
                places = [(p, c) for p in range(w * m, (w + 1) * m)]
            logits = [
                gate[p, column] + (0.0 if bias is None else bias[p % m, column])
                for p, column in places
            ]
            weights = torch.softmax(torch.stack([torch.as_tensor(v) for v in logits]), dim=0)
            pooled[c] = sum(
                a * kv[p, column] for a, (p, column) in zip(weights, places, strict=True)
            )
        if weight is not None:
            pooled = pooled / torch.sqrt((pooled**2).mean() + eps) * weight
        entries.append(pooled)
    return torch.stack(entries) if entries else torch.zeros(0, d, dtype=torch.float64)


def pieces_of(length: int, cuts: list[int]) -> list[tuple[int, int]]:
    """(query_len, seq_len) of the steps between the cuts."""
    ends = [*sorted({c for c in cuts if 0 < c < length}), length]
    return [(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]


@settings(UNTIMED, max_examples=60)
@given(
    ratio=st.integers(1, 5),
    is_overlapping=st.booleans(),
    has_bias=st.booleans(),
    length=st.integers(1, 23),
    cuts=st.lists(st.integers(1, 22), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_any_pieces_give_the_entries_of_the_whole(
    ratio: int, is_overlapping: bool, has_bias: bool, length: int, cuts: list[int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    request = KvCompressorRequest(
        ratio=ratio, head_dim=3, is_overlapping=is_overlapping, dtype="float64"
    )
    kv, gate = normal(rng, length, request.width), normal(rng, length, request.width)
    bias = normal(rng, ratio, request.width) if has_bias else None
    weight = normal(rng, 3)
    kernel = reference(request, norm_weight=weight, eps=1e-6, position_bias=bias)
    state, got = new_state(request, 2), []
    for query_len, end in pieces_of(length, cuts):
        span = slice(end - query_len, end)
        meta = metadata(request, [(query_len, end, 1)])
        out = kernel(kv[span], gate[span], state, meta)
        assert len(out) == int(meta.entry_start_loc[-1])
        got.append(out)
    assert state[0].isnan().all()
    want = one_channel_at_a_time(request, kv, gate, bias, weight, 1e-6)
    assert_within("kv_compressor", torch.cat(got), want)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("is_overlapping", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
def test_sequences_of_a_batch_do_not_touch_each_other(
    rng: torch.Generator, dtype: str, is_overlapping: bool, has_norm: bool
) -> None:
    request = KvCompressorRequest(
        ratio=4, head_dim=5, is_overlapping=is_overlapping, dtype=dtype, has_norm=has_norm
    )
    lengths = [13, 0, 4, 1, 30]
    kvs = [normal(rng, n, request.width, dtype=dtype) for n in lengths]
    gates = [normal(rng, n, request.width, dtype=dtype) for n in lengths]
    bias, weight = normal(rng, 4, request.width), normal(rng, 5) if has_norm else None
    kernel = reference(request, norm_weight=weight, eps=1e-6, position_bias=bias)
    state = new_state(request, 8)
    first = [(n // 2, n // 2, slot) for slot, n in enumerate(lengths)]
    second = [(n - n // 2, n, slot) for slot, n in enumerate(lengths)]
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    for step in (first, second):
        meta = metadata(request, step)
        rows = [slice(s - q, s) for q, s, _ in step]
        out = kernel(
            torch.cat([kv[span] for kv, span in zip(kvs, rows, strict=True)]),
            torch.cat([gate[span] for gate, span in zip(gates, rows, strict=True)]),
            state,
            meta,
        )
        assert out.dtype == kvs[0].dtype
        for i, part in enumerate(out.tensor_split(meta.entry_start_loc[1:-1].tolist())):
            found[i].append(part)
    for kv, gate, parts in zip(kvs, gates, found, strict=True):
        want = one_channel_at_a_time(request, kv.double(), gate.double(), bias, weight, 1e-6)
        assert_within("kv_compressor", torch.cat(parts), want)


@pytest.mark.parametrize("kind", ["hca", "csa", "indexer"])
def test_entries_are_those_of_a_v4_compressor(rng: torch.Generator, kind: str) -> None:
    config = DeepseekV4Config(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=16,
        partial_rotary_factor=0.25,
        num_hidden_layers=1,
        layer_types=["heavily_compressed_attention"],
        mlp_layer_types=["moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=16,
        index_head_dim=16,
        max_position_embeddings=256,
    )
    length, ratio = 53, 16 if kind == "hca" else 4
    maker = DeepseekV4HCACompressor if kind == "hca" else DeepseekV4CSACompressor
    module: Any = randomised(maker(config), rng)
    x, positions = normal(rng, 1, length, 32, dtype="float32"), torch.arange(length)[None]
    part = module.indexer if kind == "indexer" else module
    with torch.no_grad():
        if kind == "indexer":
            kept: list[torch.Tensor] = []
            part.scorer.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[1]))
            part(x, normal(rng, 1, length, 16, dtype="float32"), positions, None, 0)
            found = kept[0][0]
        else:
            residual = normal(rng, 1, length, 16, dtype="float32")
            found = module(x, residual, positions, None, 0)[0][0, 0]
        kv, gate = part.kv_proj(x)[0].double(), part.gate_proj(x)[0].double()
    dim = found.shape[1]
    request = KvCompressorRequest(
        ratio=ratio, head_dim=dim, is_overlapping=kind != "hca", dtype="float64"
    )
    kernel = reference(
        request,
        norm_weight=part.kv_norm.weight.detach(),
        eps=config.rms_norm_eps,
        position_bias=part.position_bias.detach(),
    )
    state, entries = new_state(request, 1), []
    for query_len, end in pieces_of(length, [7, 8, 30, 31, 48]):
        span = slice(end - query_len, end)
        meta = metadata(request, [(query_len, end, 0)])
        entries.append(kernel(kv[span], gate[span], state, meta))
    got = torch.cat(entries)
    at = torch.arange(length // ratio)
    rotary = DeepseekV4RotaryEmbedding(config)
    cos, sin = rotary(x, at[None] * ratio, layer_type="compress")
    rope = RopeRequest(
        num_heads=1,
        num_kv_heads=0,
        head_dim=dim,
        rotary_dim=8,
        rotary_start=dim - 8,
        dtype="float64",
        style="interleaved",
    )
    table = rope_table(cos, sin).double()
    CATALOGUE["rope"].reference(rope, cos_sin_cache=table)(got, None, at)
    torch.testing.assert_close(got, found.double(), rtol=1e-4, atol=1e-5)


def test_work_is_that_of_the_real_tensors() -> None:
    request = KvCompressorRequest(
        ratio=4, head_dim=8, is_overlapping=True, dtype="bfloat16", phase="decode"
    )
    kv_and_gate, entry = 2 * 16 * 2, 8 * 2
    written, read = 2 * 16 * 4, 8 * 2 * 8 * 4
    assert bytes_moved(request, 4) == 4 * kv_and_gate + entry + 4 * written + read
    prompt = KvCompressorRequest(
        ratio=4, head_dim=8, is_overlapping=True, dtype="bfloat16", phase="prefill"
    )
    assert bytes_moved(prompt, 40) == 40 * kv_and_gate + 10 * entry + 8 * written
    assert flops(request, 8) == 2 * flops(request, 4) > 0


def test_a_captured_graph_has_entries_then_zeros(rng: torch.Generator) -> None:
    eager = KvCompressorRequest(
        ratio=3, head_dim=4, is_overlapping=False, dtype="float64", has_norm=False
    )
    graph = dataclasses.replace(eager, graph_mode="graph")
    meta = metadata(eager, [(5, 5, 0), (2, 10, 1), (1, 4, 2)])
    kv, gate = (normal(rng, 8, 4) for _ in range(2))
    states = [new_state(eager, 3).double() for _ in range(2)]
    states[1].copy_(states[0])
    entries = reference(eager)(kv, gate, states[0], meta)
    padded = reference(graph)(kv, gate, states[1], meta)
    assert len(entries) == 2
    assert padded.shape == (graph.most_entries(8, 3), 4) == (4, 4)
    assert torch.equal(padded[:2].nan_to_num(), entries.nan_to_num())
    assert not padded[2:].any()
    assert torch.equal(states[0].nan_to_num(), states[1].nan_to_num())


def test_wrong_requests_and_norms_are_refused() -> None:
    with pytest.raises(RequestError, match="ratio >= 1"):
        KvCompressorRequest(ratio=0, head_dim=8, is_overlapping=True, dtype="bfloat16")
    request = KvCompressorRequest(ratio=2, head_dim=8, is_overlapping=True, dtype="bfloat16")
    with pytest.raises(ValueError, match="norm_weight as has_norm=True"):
        reference(request)
