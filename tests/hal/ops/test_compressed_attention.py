"""Window and compressed entries: against transformers' DeepSeek-V4 layers, and single dots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.compressed_attention import (
    CompressedAttentionMetadata,
    CompressedAttentionRequest,
    bytes_moved,
    flops,
    reference,
)
from hal.ops.kv_formats import pack_rows, unpack_rows
from hal.ops.rope import RopeRequest
from op_inputs import NO_BLOCK, assert_within, normal, paged, random_lists, starts_of
from oracle_modules import causal_mask, randomised, rope_table

REQUEST = CompressedAttentionRequest(
    num_heads=3,
    head_dim=24,
    rope_dim=8,
    window=6,
    top_k=5,
    compress_ratio=4,
    has_sinks=True,
    window_format="bf16",
    main_format="bf16",
    block_size=4,
    dtype="float64",
    phase="prefill",
)
MIXED = [(5, 41), (1, 1), (0, 20), (3, 3), (1, 50), (17, 17)]


def metadata(
    lengths: list[tuple[int, int]], window_table: torch.Tensor, main_table: torch.Tensor | None
) -> CompressedAttentionMetadata:
    return CompressedAttentionMetadata(
        query_start_loc=starts_of([q for q, _ in lengths]),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32),
        window_block_table=window_table,
        main_block_table=main_table,
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
    )


def one_query_at_a_time(
    request: CompressedAttentionRequest,
    q: torch.Tensor,
    windows: list[torch.Tensor],
    mains: list[torch.Tensor],
    lengths: list[tuple[int, int]],
    scale: float,
    sinks: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """Every head of every query in Python loops, in float64."""
    out = torch.zeros(q.shape[0], request.num_heads, request.head_dim, dtype=torch.float64)
    row = 0
    for (queries, seq_len), window, main in zip(lengths, windows, mains, strict=True):
        for j in range(queries):
            position = seq_len - queries + j
            keys = [window[p] for p in range(max(0, position - request.window + 1), position + 1)]
            complete = (position + 1) // request.compress_ratio if request.compress_ratio else 0
            named = range(complete) if indices is None else indices[row].tolist()
            keys += [main[w] for w in named if 0 <= w < complete]
            stacked = torch.stack(keys).double()
            for head in range(request.num_heads):
                query = q[row].double().view(request.num_heads, -1)[head]
                scores = (stacked @ query) * scale
                top = scores.max()
                extra = torch.exp(sinks[head].double() - top) if sinks is not None else 0.0
                weights = torch.exp(scores - top)
                out[row, head] = weights @ stacked / (weights.sum() + extra)
            row += 1
    return out.flatten(1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ratio", "top_k"), [(0, 0), (4, 5), (4, 0), (1, 7), (2, 64), (128, 0)], ids=str
)
@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "plain"])
def test_each_query_sees_its_window_and_its_entries(
    rng: torch.Generator, dtype: str, ratio: int, top_k: int, has_sinks: bool
) -> None:
    request = dataclasses.replace(
        REQUEST, dtype=dtype, compress_ratio=ratio, top_k=top_k, has_sinks=has_sinks
    )
    windows = [normal(rng, s, 24, dtype=dtype) for _, s in MIXED]
    entries = [(n, s // ratio if ratio else 0) for n, s in MIXED]
    mains = [normal(rng, s, 24, dtype=dtype) for _, s in entries]
    window_cache, window_table = paged(rng, "bf16", windows, 4, dtype=dtype)
    main_cache, main_table = paged(rng, "bf16", mains, 4, dtype=dtype)
    q = normal(rng, sum(n for n, _ in MIXED), 3 * 24, dtype=dtype)
    sinks = normal(rng, 3, dtype="float32") if has_sinks else None
    lists = random_lists(rng, entries, top_k) if top_k else None
    got = reference(request, scale=0.2, sinks=sinks)(
        q,
        window_cache,
        main_cache if ratio else None,
        metadata(MIXED, window_table, main_table if ratio else None),
        lists,
    )
    assert got.dtype == q.dtype
    want = one_query_at_a_time(request, q, windows, mains, MIXED, 0.2, sinks, lists)
    assert_within("compressed_attention", got, want)


@pytest.mark.parametrize(
    ("window_format", "main_format"),
    [("v4_584", "v4_584"), ("v41_528", "fp4_288"), ("bf16", "v41_528")],
)
def test_packed_rows_are_their_exact_values(
    rng: torch.Generator, window_format: Any, main_format: Any
) -> None:
    request = dataclasses.replace(
        REQUEST, head_dim=512, rope_dim=64, window_format=window_format, main_format=main_format
    )
    lengths = [(2, 19), (1, 33)]
    entries = [(n, s // 4) for n, s in lengths]
    windows = [normal(rng, s, 512, dtype="float32") for _, s in lengths]
    mains = [normal(rng, s, 512, dtype="float32") for _, s in entries]
    window_cache, window_table = paged(rng, window_format, windows, 4)
    main_cache, main_table = paged(rng, main_format, mains, 4)
    q, sinks = normal(rng, 3, 3 * 512), normal(rng, 3)
    lists = random_lists(rng, entries, 5)
    got = reference(request, scale=512**-0.5, sinks=sinks)(
        q, window_cache, main_cache, metadata(lengths, window_table, main_table), lists
    )

    def stored(name: str, rows: torch.Tensor) -> torch.Tensor:
        if name == "bf16":
            return rows
        return unpack_rows(name, pack_rows(name, rows), torch.float64)

    want = one_query_at_a_time(
        request,
        q,
        [stored(window_format, r) for r in windows],
        [stored(main_format, r) for r in mains],
        lengths,
        512**-0.5,
        sinks,
        lists,
    )
    assert_within("compressed_attention", got, want)


def test_pages_before_the_window_may_be_gone_or_used_again(rng: torch.Generator) -> None:
    request = dataclasses.replace(REQUEST, compress_ratio=0, top_k=0, has_sinks=False)
    rows = normal(rng, 23, 24)
    cache, table = paged(rng, "bf16", [rows], 4)
    q = normal(rng, 1, 3 * 24)
    whole = reference(request, scale=0.2)(q, cache, None, metadata([(1, 23)], table, None))
    # Positions 17..22 are seen: blocks 4 and 5. The rest of the table names nothing that exists.
    table[0, :4] = NO_BLOCK
    got = reference(request, scale=0.2)(q, cache, None, metadata([(1, 23)], table, None))
    assert torch.equal(got, whole)


def tiny() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=48,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        partial_rotary_factor=0.25,
        sliding_window=8,
        num_hidden_layers=3,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        mlp_layer_types=["moe"] * 3,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=16,
        index_head_dim=16,
        index_topk=3,
        o_groups=2,
        o_lora_rank=12,
        n_routed_experts=4,
        max_position_embeddings=256,
        attn_implementation="eager",
    )


def sliding_mask(length: int, window: int) -> torch.Tensor:
    at = torch.arange(length)
    too_old = at[None, :] <= at[:, None] - window
    mask = causal_mask(length, length, torch.float32)
    return mask.masked_fill(too_old, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["window", "csa", "hca"])
def test_attention_of_a_v4_layer_is_transformers(rng: torch.Generator, layer: int) -> None:
    """The module's projections and entries; attention and both rotations by our ops."""
    config, length = tiny(), 43
    module: Any = randomised(DeepseekV4Attention(config, layer_idx=layer), rng)
    rotary = DeepseekV4RotaryEmbedding(config)
    x = normal(rng, 1, length, 48, dtype="float32")
    positions = torch.arange(length)
    angles = {name: rotary(x, positions[None], layer_type=name) for name in ("main", "compress")}
    cos, sin = angles["main" if layer == 0 else "compress"]
    with torch.no_grad():
        found = module(x, angles, positions[None], sliding_mask(length, 8))[0][0]
        residual = module.q_a_norm(module.q_a_proj(x))
        q = module.q_b_norm(module.q_b_proj(residual).view(length, 4, 32)).flatten(1).double()
        kv = module.kv_norm(module.kv_proj(x))[0].double()
        entries, lists = torch.zeros(0, 32), None
        if module.compressor is not None:
            entries = module.compressor(x, residual, positions[None], None, layer)[0][0, 0]
        if layer == 1:
            lists = module.compressor.indexer(x, residual, positions[None], None, layer)[0].int()
    rope = RopeRequest(
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        rotary_dim=8,
        rotary_start=24,
        dtype="float64",
        style="interleaved",
    )
    table = rope_table(cos, sin).double()
    CATALOGUE["rope"].reference(rope, cos_sin_cache=table)(q, kv, positions)
    request = dataclasses.replace(
        REQUEST,
        num_heads=4,
        head_dim=32,
        window=8,
        top_k=0 if lists is None else lists.shape[1],
        compress_ratio=(0, 4, 16)[layer],
    )
    window_cache, window_table = paged(rng, "bf16", [kv], 4)
    main_cache, main_table = paged(rng, "bf16", [entries.double()], 4)
    out = reference(request, scale=module.scaling, sinks=module.sinks.detach())(
        q,
        window_cache,
        main_cache if layer else None,
        metadata([(length, length)], window_table, main_table if layer else None),
        lists,
    )
    undo = dataclasses.replace(rope, is_inverse=True, num_kv_heads=0)
    CATALOGUE["rope"].reference(undo, cos_sin_cache=table)(out, None, positions)
    with torch.no_grad():
        grouped = module.o_a_proj.double()(out.view(1, length, 2, -1)).flatten(2)
        got = module.o_b_proj.double()(grouped)[0]
    torch.testing.assert_close(got, found.double(), rtol=1e-4, atol=2e-5)


def test_work_is_that_of_the_real_tensors() -> None:
    decode = dataclasses.replace(
        REQUEST, dtype="bfloat16", phase="decode", context_tokens=1000, head_dim=512, rope_dim=64
    )
    each = (6 + 5) * 1024 + 2 * 3 * 512 * 2 + 5 * 4
    assert bytes_moved(decode, 2) == 2 * each + 3 * 4
    assert flops(decode, 2) == 2 * (6 + 5) * 3 * 512 * 4
    packed = dataclasses.replace(decode, window_format="v4_584", main_format="fp4_288")
    assert bytes_moved(decode, 1) - bytes_moved(packed, 1) == 6 * (1024 - 584) + 5 * (1024 - 288)
    every = dataclasses.replace(decode, top_k=0, compress_ratio=128)
    assert flops(every, 1) == (6 + 7) * 3 * 512 * 4
    window = dataclasses.replace(decode, top_k=0, compress_ratio=0)
    assert flops(window, 1) == 6 * 3 * 512 * 4
    prefill = dataclasses.replace(decode, phase="prefill", top_k=1)
    # Queries 0..8 see 1..6 keys of the window, and one entry from the fourth on.
    assert flops(prefill, 9) == ((1 + 2 + 3 + 4 + 5 + 6 * 4) + 6) * 3 * 512 * 4
    assert bytes_moved(prefill, 9) == (9 + 2) * 1024 + 9 * 2 * 3 * 512 * 2 + 3 * 4 + 9 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_format": "fp4_288"}, "window_format one of"),
        ({"main_format": "v4"}, "main_format one of"),
        ({"window": 0}, "window >= 1"),
        ({"rope_dim": 25}, "rope_dim <= head_dim"),
        ({"compress_ratio": 0}, "a compress_ratio for lists"),
        ({"compress_ratio": -1, "top_k": 0}, "compress_ratio >= 0"),
        ({"main_format": "fp4_288"}, "head_dim 512 for packed rows"),
        ({"window_format": "v4_584", "head_dim": 512}, "rope_dim 64 for v4_584"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(REQUEST, **changes)


def test_arguments_must_be_those_of_the_request(rng: torch.Generator) -> None:
    cache, table = paged(rng, "bf16", [normal(rng, 5, 24)], 4)
    meta = metadata([(1, 5)], table, table)
    q, lists = normal(rng, 1, 72), torch.zeros(1, 5, dtype=torch.int32)
    kernel = reference(REQUEST, scale=1.0, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="found lists of 5 and none"):
        kernel(q, cache, None, meta, lists)
    with pytest.raises(ValueError, match="found lists of 0 and a cache"):
        kernel(q, cache, cache, meta)
    with pytest.raises(ValueError, match="has_sinks=True"):
        reference(REQUEST, scale=1.0)
