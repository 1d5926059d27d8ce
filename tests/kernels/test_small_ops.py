"""CPU rope, KV write, embedding and gated activation against float64 torch."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as functional

from hal_kernels.activation.cpu import bind_gated_activation
from hal_kernels.embedding.cpu import bind_embedding
from hal_kernels.kv_write.cpu import bind_kv_write
from hal_kernels.rope.cpu import bind_rope

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


def exact_rope(
    x: torch.Tensor, angles: torch.Tensor, rotary_dim: int, is_interleaved: bool
) -> torch.Tensor:
    """Each pair as a complex number times exp(i angle). x: [T, heads, head_dim]."""
    out = x.double().clone()
    part = out[..., :rotary_dim]
    if is_interleaved:
        pairs = torch.complex(part[..., 0::2].clone(), part[..., 1::2].clone())
    else:
        pairs = torch.complex(
            part[..., : rotary_dim // 2].clone(), part[..., rotary_dim // 2 :].clone()
        )
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    if is_interleaved:
        part[..., 0::2], part[..., 1::2] = turned.real, turned.imag
    else:
        part[..., : rotary_dim // 2] = turned.real
        part[..., rotary_dim // 2 :] = turned.imag
    return out


@DTYPES
@pytest.mark.parametrize(
    ("style", "head_dim", "rotary_dim"),
    [
        ("half_split", 64, 64),
        ("half_split", 80, 40),
        ("half_split", 16, 16),
        ("half_split", 128, 64),
        ("interleaved", 64, 64),
        ("interleaved", 80, 32),
    ],
)
@pytest.mark.parametrize("tokens", [1, 70])
def test_rope(
    tokens: int,
    style: Literal["half_split", "interleaved"],
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
) -> None:
    heads, kv_heads = 5, 3
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    table = torch.arange(200).double()[:, None] * frequencies[None, :]
    cache = torch.cat((table.cos(), table.sin()), dim=-1).float()
    positions = torch.randint(0, 200, (tokens,))
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    before = qkv.clone()
    q, k, _ = qkv.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=1)
    kernel = bind_rope(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        dtype=dtype,
        cos_sin_cache=cache,
        style=style,
    )
    kernel(q, k, positions)
    rotated = (heads + kv_heads) * head_dim
    expected = exact_rope(
        before[:, :rotated].reshape(tokens, heads + kv_heads, head_dim),
        table[positions],
        rotary_dim,
        style == "interleaved",
    )
    assert_close(qkv[:, :rotated], expected.flatten(1), TOLERANCE[dtype])
    assert torch.equal(qkv[:, rotated:], before[:, rotated:])


def test_rope_refuses_a_position_outside_the_cache() -> None:
    kernel = bind_rope(
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rotary_dim=16,
        dtype=torch.float32,
        cos_sin_cache=torch.randn(10, 16),
    )
    q, k = torch.randn(2, 3, 16)
    for bad in (10, -1):
        with pytest.raises(IndexError, match=str(bad)):
            kernel(q, k, torch.tensor([0, bad, 1]))
    kernel(q, k, torch.tensor([0, 9, 1]))
    with pytest.raises(ValueError, match="rotary_dim"):
        bind_rope(
            num_heads=1,
            num_kv_heads=1,
            head_dim=16,
            rotary_dim=32,
            dtype=torch.float32,
            cos_sin_cache=torch.randn(10, 32),
        )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=["fp32", "bf16", "fp32-to-bf16"],
)
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (300, 64), (7, 20)])
def test_kv_write(tokens: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    kv_heads, block_size = 3, 16
    num_blocks = tokens // block_size + 4
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_cache = torch.full(shape, math.nan, dtype=kv_dtype)
    v_cache = torch.full(shape, math.nan, dtype=kv_dtype)
    qkv = torch.randn(tokens, 4 * kv_heads * head_dim).to(dtype)
    k, v = qkv.split(2 * kv_heads * head_dim, dim=1)
    k, v = k[:, : kv_heads * head_dim], v[:, kv_heads * head_dim :]
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    bind_kv_write(num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)(
        k, v, k_cache, v_cache, slots
    )
    for cache, rows in ((k_cache, k), (v_cache, v)):
        flat = cache.view(num_blocks * block_size, -1)
        assert torch.equal(flat[slots], rows.to(kv_dtype))
        untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
        untouched[slots] = False
        assert flat[untouched].isnan().all()


def test_kv_write_refuses_a_slot_outside_the_cache() -> None:
    kernel = bind_kv_write(num_kv_heads=1, head_dim=16, dtype=torch.float32)
    k, v = torch.randn(2, 1, 16)
    caches = torch.zeros(2, 2, 16, 1, 16)
    for bad in (32, -1):
        with pytest.raises(IndexError, match=str(bad)):
            kernel(k, v, caches[0], caches[1], torch.tensor([bad]))
    assert (caches == 0).all()


@DTYPES
@pytest.mark.parametrize("hidden", [576, 21])
def test_embedding(hidden: int, dtype: torch.dtype) -> None:
    weight = torch.randn(100, hidden).to(dtype)
    ids = torch.randint(0, 100, (37,))
    kernel = bind_embedding(weight=weight)
    assert torch.equal(kernel(ids), weight[ids])
    with pytest.raises(IndexError, match="token id 100"):
        kernel(torch.tensor([3, 100]))
    with pytest.raises(ValueError, match="contiguous"):
        bind_embedding(weight=weight.t())


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("tokens", "width", "clamp"), [(1, 1536, 0.0), (33, 1536, 0.0), (5, 37, 0.0), (9, 64, 1.5)]
)
def test_gated_activation(
    tokens: int,
    width: int,
    clamp: float,
    activation: Literal["silu", "gelu_tanh"],
    dtype: torch.dtype,
) -> None:
    x = (torch.randn(tokens, 2 * width) * 5).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if activation == "silu":
        expected = functional.silu(gate) * up
    else:
        expected = functional.gelu(gate, approximate="tanh") * up
    kernel = bind_gated_activation(width=width, dtype=dtype, activation=activation, clamp=clamp)
    assert_close(kernel(x), expected, TOLERANCE[dtype])


def test_gated_activation_extremes() -> None:
    gate = torch.tensor([-1e4, -100.0, -88.0, 88.0, 100.0, 1e4, math.nan])
    x = torch.cat((gate, torch.ones(7)))[None]
    for activation in ("silu", "gelu_tanh"):
        y = bind_gated_activation(width=7, dtype=torch.float32, activation=activation)(x)[0]
        assert y[:3].abs().max() <= 1e-30
        assert torch.equal(y[3:6], gate[3:6])
        assert y[6].isnan()


def test_outputs_do_not_follow_torchs_default_dtype() -> None:
    x = torch.randn(3, 64)
    kernel = bind_gated_activation(width=32, dtype=torch.float32)
    expected = kernel(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(kernel(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)
