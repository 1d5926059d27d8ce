"""Scores of the indexer against transformers' indexers and single dots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Indexer,
    DeepseekV4IndexerScorer,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Indexer,
    DeepseekV32RotaryEmbedding,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaIndexer,
    GlmMoeDsaRotaryEmbedding,
)

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.index_logits import IndexLogitsRequest, bytes_moved, flops, reference
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest
from hal.ops.kv_formats import pack_rows, unpack_rows
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.rope import RopeRequest
from op_inputs import assert_within, metadata, normal, paged, starts_of
from oracle_modules import causal_mask, randomised, rope_table

REQUEST = IndexLogitsRequest(
    num_heads=17, head_dim=12, key_format="bf16", block_size=8, dtype="float64", phase="prefill"
)
MIXED = [(5, 41), (1, 1), (0, 20), (3, 3), (1, 50), (17, 17)]


def one_pair_at_a_time(
    request: IndexLogitsRequest,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: list[torch.Tensor],
    scale: float,
    width: int,
) -> torch.Tensor:
    """Every query-entry pair in float64, from the formula."""
    out = torch.full((q.shape[0], width), float("-inf"), dtype=torch.float64)
    row = 0
    for (queries, seq_len), stored in zip(MIXED, keys, strict=True):
        for j in range(queries):
            heads = q[row].double().view(request.num_heads, -1)
            for entry in range((seq_len - queries + j + 1) // request.compress_ratio):
                dots = heads @ stored[entry].double()
                out[row, entry] = (dots.clamp(min=0) * weights[row].double()).sum() * scale
            row += 1
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_each_pair_is_its_formula(rng: torch.Generator, dtype: str, ratio: int) -> None:
    request = dataclasses.replace(REQUEST, dtype=dtype, compress_ratio=ratio)
    keys = [normal(rng, s // ratio, 12, dtype="bfloat16").double() for _, s in MIXED]
    cache, table = paged(rng, "bf16", keys, 8)
    tokens = sum(n for n, _ in MIXED)
    q, weights = normal(rng, tokens, 17 * 12, dtype=dtype), normal(rng, tokens, 17, dtype="float32")
    got = reference(request, scale=0.3)(q, weights, cache, metadata(MIXED, table))
    assert got.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    want = one_pair_at_a_time(request, q.double(), weights, keys, 0.3, 50 // ratio)
    assert_within("index_logits", got, want)


@pytest.mark.parametrize("name", ["fp8_132", "fp4_68"])
def test_packed_keys_are_their_exact_values(rng: torch.Generator, name: Any) -> None:
    request = dataclasses.replace(REQUEST, head_dim=128, key_format=name)
    keys = [normal(rng, s, 128, dtype="float32") for _, s in MIXED]
    cache, table = paged(rng, name, keys, 8)
    stored = [unpack_rows(name, pack_rows(name, k), torch.float64) for k in keys]
    tokens = sum(n for n, _ in MIXED)
    q, weights = normal(rng, tokens, 17 * 128), normal(rng, tokens, 17)
    got = reference(request, scale=0.1)(q, weights, cache, metadata(MIXED, table))
    want = one_pair_at_a_time(request, q, weights, stored, 0.1, 50)
    assert_within("index_logits", got, want)


def assert_same_choice(
    found: torch.Tensor, got: torch.Tensor, logits: torch.Tensor, slack: float
) -> None:
    """Two lists per query name the same entries, but for entries whose scores are `slack` near the
    last that is chosen: the modules score in float32."""
    for row in range(len(found)):
        theirs = {i for i in found[row].tolist() if i >= 0 and logits[row, i] > float("-inf")}
        ours = {i for i in got[row].tolist() if i >= 0}
        assert len(theirs) == len(ours)
        if not ours:
            continue
        last = min(float(logits[row, i]) for i in ours)
        assert all(abs(float(logits[row, i]) - last) <= slack for i in theirs ^ ours)


@pytest.mark.parametrize(
    ("config_type", "indexer_type", "rotary_type", "style"),
    [
        (DeepseekV32Config, DeepseekV32Indexer, DeepseekV32RotaryEmbedding, "half_split"),
        (GlmMoeDsaConfig, GlmMoeDsaIndexer, GlmMoeDsaRotaryEmbedding, "interleaved"),
    ],
    ids=["deepseek-v3.2", "glm-5"],
)
def test_choice_is_that_of_the_indexer_of_transformers(
    rng: torch.Generator, config_type: Any, indexer_type: Any, rotary_type: Any, style: Any
) -> None:
    """Layer norm, rope, scores and choice by our ops, projections by the module's weights."""
    config = config_type(
        hidden_size=48,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        head_dim=8,
        index_n_heads=32,
        index_head_dim=24,
        index_topk=11,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    length = 45
    module = randomised(indexer_type(config, layer_idx=0), rng)
    x = normal(rng, 1, length, 48, dtype="float32")
    residual = normal(rng, 1, length, 24, dtype="float32")
    positions = torch.arange(length)
    cos, sin = rotary_type(config)(x, positions[None])
    mask = causal_mask(length, length, torch.float32)[:, 0]
    with torch.no_grad():
        found = module(x, residual, (cos, sin), mask, positions[None])[0]
        q = module.wq_b(residual)[0].double()
        k = module.wk(x)[0].double()
        weights = module.weights_proj(x)[0].double() * 32**-0.5
    norm = LayerNormRequest(hidden_size=24, has_bias=True, dtype="float64")
    keys = CATALOGUE["layer_norm"].reference(
        norm, weight=module.k_norm.weight.detach(), bias=module.k_norm.bias.detach(), eps=1e-6
    )(k)
    rope = RopeRequest(
        num_heads=32, num_kv_heads=1, head_dim=24, rotary_dim=8, dtype="float64", style=style
    )
    table = rope_table(cos[..., :4], sin[..., :4]).double()
    CATALOGUE["rope"].reference(rope, cos_sin_cache=table)(q, keys, positions)
    request = dataclasses.replace(REQUEST, num_heads=32, head_dim=24)
    cache, blocks = paged(rng, "bf16", [keys], 8)
    logits = reference(request, scale=24**-0.5)(
        q, weights, cache, metadata([(length, length)], blocks)
    )
    choose = CATALOGUE["index_top_k"].reference(IndexTopKRequest(top_k=11))
    got = choose(logits, (positions + 1).int())
    assert_same_choice(found, got, logits, 1e-5 * float(logits[logits.isfinite()].abs().max()))


def test_scores_are_those_of_the_v4_scorer(rng: torch.Generator) -> None:
    config = DeepseekV4Config(index_n_heads=17, index_head_dim=12, hidden_size=20)
    module: Any = randomised(DeepseekV4IndexerScorer(config), rng)
    x = normal(rng, 1, 30, 20, dtype="float32")
    q, keys = normal(rng, 1, 30, 17, 12, dtype="float32"), normal(rng, 1, 7, 12, dtype="float32")
    with torch.no_grad():
        found = module(q, keys, x)[0]
        weights = module.weights_proj(x)[0] * 17**-0.5
    request = dataclasses.replace(REQUEST, compress_ratio=4)
    cache, table = paged(rng, "bf16", [keys[0].double()], 8)
    got = reference(request, scale=12**-0.5)(
        q[0].flatten(1).double(), weights, cache, metadata([(30, 30)], table)
    )
    seen = got.isfinite()
    assert seen.sum(dim=1).tolist() == [(p + 1) // 4 for p in range(30)]
    torch.testing.assert_close(got[seen], found.double()[seen], rtol=1e-4, atol=1e-5)


def test_entries_that_v4_chooses(rng: torch.Generator) -> None:
    """The whole indexer of a CSA layer: compressor, rotations, scores and choice by our ops."""
    config = DeepseekV4Config(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=20,
        partial_rotary_factor=0.25,
        num_hidden_layers=1,
        layer_types=["compressed_sparse_attention"],
        mlp_layer_types=["moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=32,
        index_head_dim=16,
        index_topk=5,
        max_position_embeddings=256,
    )
    length = 61
    module: Any = randomised(DeepseekV4Indexer(config), rng)
    x = normal(rng, 1, length, 32, dtype="float32")
    residual = normal(rng, 1, length, 20, dtype="float32")
    positions = torch.arange(length)
    with torch.no_grad():
        found = module(x, residual, positions[None], None, 0)[0]
        q = module.q_b_proj(residual)[0].double()
        kv, gate = module.kv_proj(x)[0].double(), module.gate_proj(x)[0].double()
        weights = module.scorer.weights_proj(x)[0] * 32**-0.5
        cos, sin = module.rotary_emb(x, positions[None], layer_type="compress")
    pooling = KvCompressorRequest(ratio=4, head_dim=16, is_overlapping=True, dtype="float64")
    pool = CATALOGUE["kv_compressor"].reference(
        pooling,
        norm_weight=module.kv_norm.weight.detach(),
        eps=config.rms_norm_eps,
        position_bias=module.position_bias.detach(),
    )
    meta = CompressorMetadata(
        query_start_loc=starts_of([length]),
        seq_lens=torch.tensor([length]),
        state_slots=torch.tensor([0]),
        entry_start_loc=starts_of([length // 4]),
    )
    keys = pool(kv, gate, torch.zeros(1, 8, 2, 32, dtype=torch.float64), meta)
    queries = RopeRequest(
        num_heads=32,
        num_kv_heads=0,
        head_dim=16,
        rotary_dim=8,
        rotary_start=8,
        dtype="float64",
        style="interleaved",
    )
    table = rope_table(cos, sin).double()
    rope = CATALOGUE["rope"]
    rope.reference(queries, cos_sin_cache=table)(q, None, positions)
    entries = dataclasses.replace(queries, num_heads=1)
    rope.reference(entries, cos_sin_cache=table)(keys, None, torch.arange(length // 4) * 4)
    request = dataclasses.replace(REQUEST, num_heads=32, head_dim=16, compress_ratio=4)
    cache, blocks = paged(rng, "bf16", [keys], 8)
    logits = reference(request, scale=16**-0.5)(
        q, weights, cache, metadata([(length, length)], blocks)
    )
    choose = CATALOGUE["index_top_k"].reference(IndexTopKRequest(top_k=5, compress_ratio=4))
    got = choose(logits, ((positions + 1) // 4).int())
    slack = 1e-5 * float(logits[logits.isfinite()].abs().max())
    assert_same_choice(found, got, logits, slack)


def test_work_is_that_of_the_real_tensors() -> None:
    decode = IndexLogitsRequest(
        num_heads=64,
        head_dim=128,
        key_format="fp8_132",
        block_size=64,
        dtype="float8_e4m3fn",
        phase="decode",
        context_tokens=1000,
    )
    assert bytes_moved(decode, 2) == 2 * (64 * 128 + 64 * 4 + 1000 * 132 + 1000 * 4)
    assert flops(decode, 1) == 1000 * 64 * 2 * (128 + 1)
    wide = dataclasses.replace(decode, key_format="fp4_68", compress_ratio=4)
    assert bytes_moved(wide, 1) == 64 * 128 + 64 * 4 + 250 * (68 + 4)
    prefill = dataclasses.replace(wide, phase="prefill")
    pairs = 4 * 1 + 2 * 2  # queries 3..6 see one entry, 7 and 8 two
    assert bytes_moved(prefill, 9) == 9 * (64 * 128 + 64 * 4) + 2 * 68 + pairs * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_format": "fp8_656"}, "key_format one of"),
        ({"key_format": "fp8_132"}, "head_dim 128 for fp8_132"),
        ({"compress_ratio": 0}, "compress_ratio >= 1"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(REQUEST, **changes)
