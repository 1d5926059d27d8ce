"""Latent attention: absorbed against transformers' expanded modules, and against single dots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32RotaryEmbedding,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaRotaryEmbedding,
)

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import pack_rows, unpack_rows
from hal.ops.mla_attention import MlaAttentionRequest, bytes_moved, flops, reference
from hal.ops.rope import RopeRequest
from op_inputs import assert_within, metadata, normal, paged, random_lists, starts_of
from oracle_modules import causal_mask, randomised, rope_table

REQUEST = MlaAttentionRequest(
    num_heads=5,
    kv_lora_rank=24,
    rope_dim=8,
    block_size=16,
    dtype="float64",
    kv_format="bf16",
    phase="prefill",
)
MIXED = [(5, 37), (1, 1), (0, 20), (3, 3), (1, 49), (16, 16)]


def one_query_at_a_time(
    request: MlaAttentionRequest,
    q: torch.Tensor,
    sequences: list[torch.Tensor],
    lengths: list[tuple[int, int]],
    scale: float,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """Every head of every query in Python loops, in float64."""
    out = torch.zeros(q.shape[0], request.num_heads, request.kv_lora_rank, dtype=torch.float64)
    row = 0
    for (queries, seq_len), keys in zip(lengths, sequences, strict=True):
        for j in range(queries):
            position = seq_len - queries + j
            visible = list(range(position + 1 if request.is_causal else seq_len))
            if indices is not None:
                visible = [p for p in indices[row].tolist() if p in visible]
            for head in range(request.num_heads):
                if not visible:
                    continue
                query = q[row].double().view(request.num_heads, -1)[head]
                chosen = keys.double()[visible]
                weights = torch.softmax(chosen @ query * scale, dim=0)
                out[row, head] = weights @ chosen[:, : request.kv_lora_rank]
            row += 1
    return out.flatten(1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("top_k", [0, 7, 64])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_each_query_sees_its_keys(
    rng: torch.Generator, dtype: str, top_k: int, is_causal: bool, block_size: int
) -> None:
    request = dataclasses.replace(
        REQUEST, dtype=dtype, top_k=top_k, is_causal=is_causal, block_size=block_size
    )
    rows = [normal(rng, max(s, 1), request.row_dim, dtype=dtype)[:s] for _, s in MIXED]
    cache, table = paged(rng, "bf16", rows, block_size, dtype=dtype)
    q = normal(rng, sum(n for n, _ in MIXED), request.num_heads * request.row_dim, dtype=dtype)
    lists = random_lists(rng, MIXED, top_k) if top_k else None
    got = reference(request, scale=0.2)(q, cache, metadata(MIXED, table), lists)
    assert got.dtype == q.dtype
    want = one_query_at_a_time(request, q, rows, MIXED, 0.2, lists)
    assert_within("mla_attention", got, want)


def test_rows_of_656_bytes_are_their_exact_values(rng: torch.Generator) -> None:
    request = dataclasses.replace(
        REQUEST, kv_lora_rank=512, rope_dim=64, kv_format="fp8_656", top_k=12
    )
    lengths = [(2, 19), (1, 33)]
    rows = [normal(rng, s, 576, dtype="float32") for _, s in lengths]
    cache, table = paged(rng, "fp8_656", rows, 16)
    stored = [unpack_rows("fp8_656", pack_rows("fp8_656", r), torch.float64) for r in rows]
    q = normal(rng, 3, request.num_heads * 576)
    lists = random_lists(rng, lengths, 12)
    got = reference(request, scale=0.04)(q, cache, metadata(lengths, table), lists)
    want = one_query_at_a_time(request, q, stored, lengths, 0.04, lists)
    assert_within("mla_attention", got, want)
    # And the rounding of the rows is what it costs: e4m3 has a relative step of 1/8.
    exact = one_query_at_a_time(request, q, rows, lengths, 0.04, lists)
    assert (got - exact).abs().max() < 0.5


def test_a_list_of_all_positions_is_dense_attention(rng: torch.Generator) -> None:
    lengths = [(9, 40), (1, 23)]
    rows = [normal(rng, s, REQUEST.row_dim) for _, s in lengths]
    cache, table = paged(rng, "bf16", rows, 16)
    meta = metadata(lengths, table)
    q = normal(rng, 10, REQUEST.num_heads * REQUEST.row_dim)
    dense = reference(REQUEST, scale=0.3)(q, cache, meta)
    every = torch.arange(64, dtype=torch.int32).expand(10, -1)
    order = torch.randperm(64, generator=rng)
    sparse = dataclasses.replace(REQUEST, top_k=64)
    got = reference(sparse, scale=0.3)(q, cache, meta, every[:, order])
    assert_within("mla_attention", got, dense)


def test_extreme_indices_are_padding_and_a_query_without_keys_is_zero(rng: torch.Generator) -> None:
    request = dataclasses.replace(REQUEST, top_k=4)
    rows = [normal(rng, 10, REQUEST.row_dim)]
    cache, table = paged(rng, "bf16", rows, 16)
    lists = torch.tensor(
        [[-1, -1, -1, -1], [-(2**31), 2**31 - 1, 10, 3], [9, 8, -123456, 114514]],
        dtype=torch.int32,
    )
    q = normal(rng, 3, REQUEST.num_heads * REQUEST.row_dim)
    meta = metadata([(3, 10)], table)
    got = reference(request, scale=0.3)(q, cache, meta, lists)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    only = rows[0][3, : REQUEST.kv_lora_rank].expand(REQUEST.num_heads, -1).flatten()
    assert_within("mla_attention", got[1], only)


def test_padded_queries_are_zero(rng: torch.Generator) -> None:
    """Rows behind the last sequence, as a graph of a fixed size has them."""
    cache, table = paged(rng, "bf16", [normal(rng, 10, REQUEST.row_dim)], 16)
    q = normal(rng, 4, REQUEST.num_heads * REQUEST.row_dim)
    got = reference(REQUEST, scale=0.3)(q, cache, metadata([(2, 10)], table))
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))


def tiny(config_type: Any) -> Any:
    return config_type(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=40,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=20,
        head_dim=16,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=8,
        num_hidden_layers=1,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )


@pytest.mark.parametrize(
    ("config_type", "attention_type", "rotary_type"),
    [
        (DeepseekV32Config, DeepseekV32Attention, DeepseekV32RotaryEmbedding),
        (GlmMoeDsaConfig, GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding),
    ],
    ids=["deepseek-v3.2", "glm-5"],
)
def test_absorbed_is_the_expanded_attention_of_transformers(
    rng: torch.Generator, config_type: Any, attention_type: Any, rotary_type: Any
) -> None:
    """Projections by the module's weights; attention over latent rows by our op, and rope too."""
    config, length = tiny(config_type), 29
    module = randomised(attention_type(config, layer_idx=0), rng, 0.2)
    x = normal(rng, 1, length, 48, dtype="float32")
    cos, sin = rotary_type(config)(x, torch.arange(length)[None])
    mask = causal_mask(length, length, torch.float32)
    positions = torch.arange(length)
    with torch.no_grad():
        found = module(x, (cos, sin), mask, position_ids=positions[None])
        residual = module.q_a_layernorm(module.q_a_proj(x))
        lists = module.indexer(x, residual, (cos, sin), mask[:, 0], positions[None])[0]
        q = module.q_b_proj(residual)[0].view(length, 4, 40).double()
        latent, k_rope = module.kv_a_proj_with_mqa(x)[0].split([32, 16], dim=1)
        latent = module.kv_a_layernorm(latent).double()
        up = module.kv_b_proj.weight.view(4, 44, 32).double()
    q_rope, k_rope = q[..., 24:].contiguous(), k_rope.double().contiguous()
    table = rope_table(cos[..., :8], sin[..., :8]).double()
    rope = RopeRequest(
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        rotary_dim=16,
        dtype="float64",
        style="interleaved",
    )
    CATALOGUE["rope"].reference(rope, cos_sin_cache=table)(
        q_rope.view(length, -1), k_rope, positions
    )
    absorbed = torch.einsum("thd,hdr->thr", q[..., :24], up[:, :24])
    request = dataclasses.replace(
        REQUEST, num_heads=4, kv_lora_rank=32, rope_dim=16, top_k=lists.shape[1]
    )
    rows = torch.cat((latent, k_rope), dim=1)
    cache, blocks = paged(rng, "bf16", [rows], 16)
    queries = torch.cat((absorbed, q_rope), dim=2).flatten(1)
    out = reference(request, scale=module.scaling)(
        queries, cache, metadata([(length, length)], blocks), lists
    )
    values = torch.einsum("thr,hdr->thd", out.view(length, 4, 32), up[:, 24:]).flatten(1)
    got = values @ module.o_proj.weight.double().T
    assert isinstance(found, tuple)
    torch.testing.assert_close(got.detach(), found[0][0].double().detach(), rtol=1e-4, atol=1e-5)


def test_work_is_that_of_the_real_tensors(rng: torch.Generator) -> None:
    decode = dataclasses.replace(
        REQUEST, dtype="bfloat16", phase="decode", context_tokens=40, top_k=16
    )
    rows, q = torch.zeros(16, 32, dtype=torch.bfloat16), torch.zeros(5 * 32, dtype=torch.bfloat16)
    out, lists = torch.zeros(5 * 24, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    each = rows.nbytes + q.nbytes + out.nbytes + lists.nbytes
    assert bytes_moved(decode, 3) == 3 * each
    assert flops(decode, 3) == 3 * 16 * 5 * 2 * (32 + 24)
    short = dataclasses.replace(decode, context_tokens=9)
    assert flops(short, 1) == 9 * 5 * 2 * (32 + 24)
    packed = dataclasses.replace(decode, kv_lora_rank=512, rope_dim=64, kv_format="fp8_656")
    dense = dataclasses.replace(packed, kv_format="bf16")
    assert bytes_moved(dense, 1) - bytes_moved(packed, 1) == 16 * (1152 - 656)
    prefill = dataclasses.replace(decode, phase="prefill", top_k=4)
    assert flops(prefill, 7) == (1 + 2 + 3 + 4 * 4) * 5 * 2 * (32 + 24)
    full = dataclasses.replace(prefill, is_causal=False)
    assert flops(full, 7) == 7 * 4 * 5 * 2 * (32 + 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "fp8"}, "kv_format one of"),
        ({"kv_format": "fp8_656"}, "kv_lora_rank 512 and rope_dim 64"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"num_heads": 0}, "num_heads >= 1"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(REQUEST, **changes)


def test_lists_must_be_those_of_the_request(rng: torch.Generator) -> None:
    meta = AttentionMetadata(
        query_start_loc=starts_of([1]),
        seq_lens=torch.tensor([1]),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=1,
    )
    q, cache = normal(rng, 1, 160), normal(rng, 1, 16, 32)
    lists = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lists of 0 entries \(0: none\), found 3"):
        reference(REQUEST, scale=1.0)(q, cache, meta, lists)
    with pytest.raises(ValueError, match="lists of 7 entries"):
        reference(dataclasses.replace(REQUEST, top_k=7), scale=1.0)(q, cache, meta)
