"""Norm, rope, activation, rows and sampling against float64, with random shapes and tails."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal_opencl import small_ops


def _number(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


@pytest.mark.parametrize("has_residual", [False, True])
def test_norm(any_memory: DeviceSpec, generator: torch.Generator, has_residual: bool) -> None:
    """All summands are positive: the relative error of their sum is below `size` units."""
    rows, size = _number(generator, 1, 20), _number(generator, 1, 300)
    x = torch.randn(rows, size, generator=generator)
    residual = torch.randn(rows, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    request = RmsNormRequest(hidden_size=size, dtype="float32", has_residual=has_residual)
    kernel = small_ops.load_norm(any_memory)(request, weight=weight, eps=1e-5)
    total = x + residual if has_residual else x
    exact = total.double()
    want = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    if has_residual:
        got, new_residual = kernel(x, residual)
        assert torch.equal(new_residual, total)
    else:
        got = kernel(x)
    torch.testing.assert_close(got.double(), want, rtol=(size + 8) * 2.0**-24, atol=1e-30)


def test_norm_of_heads(device: DeviceSpec, generator: torch.Generator) -> None:
    x = torch.randn(4, 3 * 20, generator=generator)
    request = RmsNormRequest(hidden_size=20, dtype="float32", rows_per_token=3)
    got = small_ops.load_norm(device)(request, weight=torch.ones(20), eps=1e-5)(x)
    want = functional.rms_norm(x.double().view(4, 3, 20), (20,), eps=1e-5).view(4, 60)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_rope(any_memory: DeviceSpec, generator: torch.Generator, style: str) -> None:
    """A rotation is a product of complex numbers; q, k and v are parts of one tensor."""
    half, tokens = _number(generator, 1, 40), _number(generator, 1, 30)
    start, is_inverse = _number(generator, 0, 9), bool(_number(generator, 0, 2))
    head_dim = start + 2 * half + _number(generator, 0, 9)
    heads, kv_heads = 3, 2
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    qkv = torch.randn(tokens, sum(sizes), generator=generator)
    before = qkv.clone()
    angles = torch.randn(50, half, generator=generator).double()
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    request = RopeRequest(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=2 * half,
        dtype="float32",
        style=style,  # type: ignore[arg-type]
        rotary_start=start,
        is_inverse=is_inverse,
    )
    q, k, v = torch.split_with_sizes(qkv, sizes, 1)
    small_ops.load_rope(any_memory)(request, cos_sin_cache=table)(q, k, positions)
    turn = torch.complex(*table[positions].double().chunk(2, dim=1))[:, None]
    turn = turn.conj() if is_inverse else turn
    for got, old, count in (
        (q, before[:, : sizes[0]], heads),
        (k, before[:, sizes[0] : -sizes[2]], kv_heads),
    ):
        want = old.double().reshape(tokens, count, head_dim).clone()
        part = want[..., start : start + 2 * half]
        if style == "half_split":
            turned = torch.complex(part[..., :half], part[..., half:]) * turn
            part[:] = torch.cat((turned.real, turned.imag), dim=-1)
        else:
            turned = torch.complex(part[..., 0::2], part[..., 1::2]) * turn
            part[:] = torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)
        torch.testing.assert_close(got.double(), want.flatten(1), rtol=0.0, atol=4e-6)
    assert torch.equal(v, before[:, -sizes[2] :])


def test_rope_without_keys(device: DeviceSpec, generator: torch.Generator) -> None:
    request = RopeRequest(num_heads=1, num_kv_heads=0, head_dim=4, rotary_dim=4, dtype="float32")
    q = torch.randn(3, 4, generator=generator)
    want = torch.cat((-q[:, 2:], q[:, :2]), dim=1)
    quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    small_ops.load_rope(device)(request, cos_sin_cache=quarter)(q, None, torch.zeros(3).long())
    assert torch.equal(q, want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("clamp", [0.0, 1.5])
def test_activation(
    any_memory: DeviceSpec, generator: torch.Generator, activation: str, clamp: float
) -> None:
    """Over the whole range: where silu is nothing, where it is the identity, and between."""
    rows, width = _number(generator, 1, 9), _number(generator, 1, 90)
    x = torch.randn(rows, 2 * width, generator=generator)
    x[:, ::3] *= 30.0
    request = GatedActivationRequest(
        width=width,
        dtype="float32",
        activation=activation,  # type: ignore[arg-type]
        clamp=clamp,
    )
    gate, up = x.double().chunk(2, dim=-1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    acted = (
        functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    )
    got = small_ops.load_activation(any_memory)(request)(x).double()
    bound = 1e-6 * ((acted * up).abs() + gate.abs() * up.abs())
    assert bool(((got - acted * up).abs() <= bound + 1e-30).all())


def test_exponential_over_its_range(device: DeviceSpec) -> None:
    """silu(x) of a large negative x is x * exp(x): its relative error shows."""
    x = torch.linspace(-80.0, -20.0, 4001)
    request = GatedActivationRequest(width=4001, dtype="float32")
    both = torch.cat((x, torch.ones(4001)))[None]
    got = small_ops.load_activation(device)(request)(both)[0].double()
    want = functional.silu(x.double())
    assert float(((got - want) / want).abs().max()) <= 6 * 2.0**-24


def test_rows(any_memory: DeviceSpec, device: DeviceSpec, generator: torch.Generator) -> None:
    size, vocab = _number(generator, 1, 100), _number(generator, 2, 60)
    weight = torch.randn(vocab, size, generator=generator)
    ids = torch.randint(0, vocab, (11,), generator=generator)
    request = EmbeddingRequest(vocab_size=vocab, hidden_size=size, dtype="float32")
    got = small_ops.load_embedding(any_memory)(request, weight=weight)(ids)
    assert torch.equal(got, weight[ids])


def test_kv_write(device: DeviceSpec, generator: torch.Generator) -> None:
    heads, k_dim, v_dim, tokens = 2, _number(generator, 1, 40), _number(generator, 1, 40), 9
    request = KvWriteRequest(
        num_kv_heads=heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        block_size=4,
        dtype="float32",
        kv_dtype="float32",
    )
    kv = torch.randn(tokens, heads * (k_dim + v_dim), generator=generator)
    k, v = torch.split_with_sizes(kv, (heads * k_dim, heads * v_dim), 1)
    k_cache, v_cache = torch.zeros(6, 4, heads, k_dim), torch.zeros(6, 4, heads, v_dim)
    slots = torch.randperm(24, generator=generator)[:tokens]
    small_ops.load_kv_write(device)(request)(k, v, k_cache, v_cache, slots)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        want = torch.zeros(24, rows.shape[1])
        want[slots] = rows
        assert torch.equal(cache.view(24, -1), want)


@pytest.mark.parametrize("has_ties", [False, True])
def test_sampling(any_memory: DeviceSpec, generator: torch.Generator, has_ties: bool) -> None:
    """The kept set is that of a stable sort in float64; at the very edge of p either answer is
    right, and a row there is left out."""
    rows, vocab = 24, _number(generator, 2, 3000)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if has_ties:
        logits = (2 * logits).round() / 2
    top_k = torch.randint(0, vocab + 2, (rows,), generator=generator)
    top_k[:4] = torch.tensor([vocab, 1, 0, 5])
    top_p = torch.rand(rows, generator=generator)
    top_p[4:7] = torch.tensor([1.0, 0.0, 0.999])
    kernel = small_ops.load_top_k_top_p(any_memory)(TopKTopPRequest(vocab_size=vocab))
    got = kernel(logits, top_k, top_p)
    checked = 0
    for row in range(rows):
        values, order = logits[row].double().sort(descending=True, stable=True)
        values = values[: max(1, int(top_k[row]))]
        mass = torch.softmax(values, dim=-1)
        before = mass.cumsum(-1) - mass
        p = float(top_p[row])
        if p < 1.0 and bool(((before - p).abs() < 1e-5)[1:].any()):
            continue
        count = len(values) if p >= 1.0 else max(1, int((before < p).sum()))
        want = torch.full((vocab,), float("-inf"))
        want[order[:count]] = logits[row, order[:count]]
        assert torch.equal(got[row], want), (row, int(top_k[row]), p)
        checked += 1
    assert checked >= 3  # those with p of 0 and 1, at least
