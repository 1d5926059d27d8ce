"""CPU prefill attention against float64 softmax attention over the gathered context."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hal.ops.attention import AttentionMetadata
from hal_kernels.attention.cpu_prefill import bind_attention_prefill

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}

# name: sequence lengths, query lengths, heads, head_dim, block_size, options
CASES = {
    "one-token": ([1], [1], (9, 3), 64, 16, {}),
    "smollm2-mixed": ([100, 17, 130, 200], [100, 5, 1, 37], (9, 3), 64, 16, {}),
    "odd-heads": ([70], [70], (5, 5), 80, 16, {}),
    "mqa-big-blocks": ([90, 65], [33, 65], (4, 1), 128, 64, {}),
    "window": ([150, 140, 20], [90, 10, 20], (4, 2), 32, 16, {"window": 40}),
    "all-options": (
        [130, 90],
        [60, 90],
        (4, 2),
        48,
        32,
        {"window": 70, "softcap": 5.0, "sinks": torch.linspace(-1, 2, 4)},
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CASES] + [("smollm2-mixed", torch.bfloat16)],
    ids=[*CASES, "bf16"],
)
def test_prefill_matches_float64(
    attention_cases: SimpleNamespace, name: str, dtype: torch.dtype
) -> None:
    seq_lens, query_lens, heads, head_dim, block_size, options = CASES[name]
    case = attention_cases.paged(seq_lens, query_lens, heads, head_dim, block_size, dtype)
    scale = head_dim**-0.5
    kernel = bind_attention_prefill(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=scale,
        **options,
    )
    expected = attention_cases.exact(*case, scale=scale, **options)
    out = kernel(*case)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_chunks_and_neighbours_do_not_change_a_row(attention_cases: SimpleNamespace) -> None:
    q, k_cache, v_cache, meta = attention_cases.paged(
        [150, 40], [150, 40], (9, 3), 64, 16, torch.float32
    )
    kernel = bind_attention_prefill(
        num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32, scale=0.125
    )
    whole = kernel(q, k_cache, v_cache, meta)
    done = 0
    for chunk in (1, 30, 64, 55):
        part = AttentionMetadata(
            torch.tensor([0, chunk], dtype=torch.int32),
            torch.tensor([done + chunk], dtype=torch.int32),
            meta.block_table[:1],
            chunk,
            done + chunk,
        )
        out = kernel(q[done : done + chunk], k_cache, v_cache, part)
        assert torch.equal(out, whole[done : done + chunk])
        done += chunk
    assert done == 150


def test_a_nan_is_seen_by_the_tokens_after_it(attention_cases: SimpleNamespace) -> None:
    q, k_cache, v_cache, meta = attention_cases.paged([40], [40], (9, 3), 64, 16, torch.float32)
    k_cache[int(meta.block_table[0, 1]), 3] = math.nan  # position 19
    kernel = bind_attention_prefill(
        num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32, scale=0.125
    )
    out = kernel(q, k_cache, v_cache, meta)
    assert out[:19].isfinite().all()
    assert out[19:].isnan().all()
