"""CPU decode attention against float64 softmax attention over the gathered context."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hal.ops.attention import AttentionMetadata
from hal_kernels.attention.cpu_decode import bind_attention_decode

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


CASES = {
    "one-token": ([1], (9, 3), 64, 16, {}),
    "smollm2-batch": ([192, 1, 17, 128, 129, 515], (9, 3), 64, 16, {}),
    "odd-heads": ([33, 300], (5, 5), 80, 16, {}),
    "mqa-big-blocks": ([70, 200], (4, 1), 128, 64, {}),
    "window": ([700, 3, 129], (8, 2), 32, 16, {"window": 100}),
    "window-many-splits": ([1000, 450], (2, 1), 16, 16, {"window": 300}),
    "softcap": ([140, 40], (4, 2), 64, 16, {"softcap": 5.0}),
    "sinks": ([300, 7], (6, 2), 64, 16, {"sinks": torch.linspace(-2, 3, 6)}),
    "all-three": (
        [260, 90],
        (4, 2),
        48,
        32,
        {"window": 150, "softcap": 10.0, "sinks": torch.linspace(-1, 1, 4)},
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CASES]
    + [(name, torch.bfloat16) for name in ("smollm2-batch", "all-three")],
    ids=[*CASES, "bf16", "bf16-all-three"],
)
def test_decode_matches_float64(
    attention_cases: SimpleNamespace, name: str, dtype: torch.dtype
) -> None:
    seq_lens, heads, head_dim, block_size, options = CASES[name]
    case = attention_cases.paged(seq_lens, [1] * len(seq_lens), heads, head_dim, block_size, dtype)
    scale = head_dim**-0.5
    kernel = bind_attention_decode(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=scale,
        **options,
    )
    expected = attention_cases.exact(*case, scale=scale, **options)
    for _ in range(3):  # the scratch memory and the arrival counters are reused
        out = kernel(*case)
        assert out.dtype == dtype
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[dtype]


def test_decode_reads_bf16_cache_with_fp32_queries(attention_cases: SimpleNamespace) -> None:
    case = attention_cases.paged([150, 20], [1, 1], (6, 2), 64, 16, torch.float32, torch.bfloat16)
    kernel = bind_attention_decode(
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        kv_dtype=torch.bfloat16,
        scale=0.125,
    )
    expected = attention_cases.exact(*case, scale=0.125)
    assert (kernel(*case).double() - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_a_sequence_does_not_depend_on_its_neighbours_or_the_threads(
    attention_cases: SimpleNamespace,
) -> None:
    bind: dict[str, Any] = {
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "block_size": 16,
        "dtype": torch.float32,
        "scale": 0.125,
    }
    q, k_cache, v_cache, meta = attention_cases.paged(
        [400, 37, 1000], [1, 1, 1], (9, 3), 64, 16, torch.float32
    )
    threads = torch.get_num_threads()
    together = bind_attention_decode(**bind)(q, k_cache, v_cache, meta)
    try:
        torch.set_num_threads(1)
        for i in range(3):
            alone = AttentionMetadata(
                torch.tensor([0, 1], dtype=torch.int32),
                meta.seq_lens[i : i + 1],
                meta.block_table[i : i + 1],
                1,
                int(meta.seq_lens[i]),
            )
            out = bind_attention_decode(**bind)(q[i : i + 1], k_cache, v_cache, alone)
            assert torch.equal(out[0], together[i])
    finally:
        torch.set_num_threads(threads)


def test_a_nan_in_the_context_is_not_hidden(attention_cases: SimpleNamespace) -> None:
    q, k_cache, v_cache, meta = attention_cases.paged([40], [1], (2, 1), 32, 16, torch.float32)
    k_cache[int(meta.block_table[0, 1]), 3] = math.nan
    kernel = bind_attention_decode(
        num_heads=2, num_kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32, scale=1.0
    )
    assert kernel(q, k_cache, v_cache, meta).isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 60}, "head_dim a multiple of 16"),
        ({"block_size": 8}, "block_size a multiple of 16"),
        ({"num_heads": 7}, "divisible by num_kv_heads"),
        ({"dtype": torch.float16}, "float32 or bfloat16"),
        ({"sinks": torch.zeros(3)}, "sinks need shape"),
        ({"window": -1}, "cannot be negative"),
    ],
)
def test_unsupported_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 16,
        "dtype": torch.float32,
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        bind_attention_decode(**(arguments | change))
