"""What CPU kernels do with tensors of another layout, width or dtype than they read by address:
the same numbers or an error, never other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.ops.attention import AttentionMetadata
from hal.ops.formats import FORMATS, QuantizedWeight
from hal_kernels.activation.cpu import bind_gated_activation
from hal_kernels.attention.cpu_decode import bind_attention_decode
from hal_kernels.attention.cpu_prefill import bind_attention_prefill
from hal_kernels.embedding.cpu import bind_embedding
from hal_kernels.gemm.cpu_w8a8 import bind_onednn_int8
from hal_kernels.kv_write.cpu import bind_kv_write
from hal_kernels.norm.cpu import bind_rms_norm
from hal_kernels.quantize.cpu import bind_quantize_rows
from hal_kernels.rope.cpu import bind_rope
from hal_kernels.sampling.cpu import bind_top_k_top_p

T, HEADS, DIM, BLOCK = 6, 4, 32, 16
F32 = torch.float32


def _attention(bind: Callable[..., Any]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    kernel = bind(
        num_heads=HEADS, num_kv_heads=2, head_dim=DIM, block_size=BLOCK, dtype=F32, scale=0.2
    )
    caches = [torch.randn(8, BLOCK, 2, DIM) for _ in range(2)]

    def run(
        q: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        meta = AttentionMetadata(starts, lengths, table, 1, 30)
        output: torch.Tensor = kernel(q, *caches, meta)
        return output

    table = torch.randperm(8).int()[:6].view(T, 1).expand(T, 2).contiguous()
    lengths = torch.randint(1, 30, (T,), dtype=torch.int32)
    return run, [
        torch.randn(T, HEADS * DIM),
        torch.arange(T + 1, dtype=torch.int32),
        lengths,
        table,
    ]


def _norm(has_residual: bool) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    kernel = bind_rms_norm(
        hidden_size=64, dtype=F32, weight=torch.rand(64), eps=1e-5, has_residual=has_residual
    )
    inputs = [torch.randn(T, 64), torch.randn(T, 64)]
    return kernel, inputs if has_residual else inputs[:1]


def _w8a8() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    weight = QuantizedWeight(
        format=FORMATS["int8_channel_a8"],
        data=torch.randint(-127, 128, (96, 64), dtype=torch.int8),
        scale=torch.rand(96) * 0.01,
    )
    return bind_onednn_int8(weight=weight), [torch.randn(T, 64)]


def _kv_write() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    kernel = bind_kv_write(num_kv_heads=2, head_dim=DIM, dtype=F32)
    caches = [torch.zeros(4, BLOCK, 2, DIM) for _ in range(2)]

    def run(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            cache.zero_()
        kernel(k, v, *caches, slots)
        return torch.stack(caches)

    slots = torch.randperm(4 * BLOCK)[:T]
    return run, [torch.randn(T, 2 * DIM), torch.randn(T, 2 * DIM), slots]


def _rope() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    kernel = bind_rope(
        num_heads=HEADS, num_kv_heads=2, head_dim=DIM, rotary_dim=DIM, dtype=F32,
        cos_sin_cache=torch.randn(64, DIM),
    )  # fmt: skip

    def run(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kernel(q, k, positions)
        return torch.cat([q, k], dim=-1)

    return run, [torch.randn(T, HEADS * DIM), torch.randn(T, 2 * DIM), torch.randint(64, (T,))]


CASES: dict[str, Callable[[], tuple[Callable[..., Any], list[torch.Tensor]]]] = {
    "activation": lambda: (
        bind_gated_activation(width=48, dtype=F32, activation="silu"),
        [torch.randn(T, 96)],
    ),
    "norm": lambda: _norm(False),
    "norm and residual": lambda: _norm(True),
    "quantise": lambda: (bind_quantize_rows(features=64, dtype=F32), [torch.randn(T, 64)]),
    "embedding": lambda: (
        bind_embedding(weight=torch.randn(50, 24)),
        [torch.randint(50, (T,))],
    ),
    "kv_write": _kv_write,
    "rope": _rope,
    "sampling": lambda: (
        bind_top_k_top_p(vocab_size=200),
        [torch.randn(T, 200), torch.randint(1, 50, (T,)), torch.rand(T)],
    ),
    "attention decode": lambda: _attention(bind_attention_decode),
    "attention prefill": lambda: _attention(bind_attention_prefill),
    "w8a8": _w8a8,
}
ALL = pytest.mark.parametrize("case", CASES)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Equal values, between whose columns lies something else."""
    wide = torch.full((*x.shape, 3), 7, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def _parts(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@ALL
def test_columns_apart_give_the_same_or_an_error(case: str) -> None:
    kernel, inputs = CASES[case]()
    want = [t.clone() for t in _parts(kernel(*(t.clone() for t in inputs)))]
    for index, x in enumerate(inputs):
        changed = [t.clone() for t in inputs]
        changed[index] = _apart(x)
        try:
            got = _parts(kernel(*changed))
        except ValueError:  # what is written in place cannot be copied
            continue
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), f"argument {index}"


@ALL
def test_another_dtype_or_width_is_an_error(case: str) -> None:
    kernel, inputs = CASES[case]()
    for index, x in enumerate(inputs):
        if (case, index) == ("attention decode", 1):
            continue  # one query a sequence: where queries start is not read
        other = torch.float64 if x.dtype.is_floating_point else torch.int16
        changed = [t.clone() for t in inputs]
        changed[index] = x.to(other)
        with pytest.raises((ValueError, IndexError)):
            kernel(*changed)
        if x.dim() == 2 and x.dtype.is_floating_point:
            changed[index] = torch.cat([x, x], dim=-1)
            with pytest.raises((ValueError, RuntimeError)):
                kernel(*changed)
