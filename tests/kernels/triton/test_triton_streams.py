"""Triton kernels that stream memory (rotation, activation, gather, KV write) against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.activation.triton as triton_activation
import hal_kernels.embedding.triton as triton_embedding
import hal_kernels.kv_write.triton as triton_kv_write
import hal_kernels.rope.triton as triton_rope
from gpu_devices import gpu
from hal.ops.activation import GatedActivationRequest
from hal.ops.activation import reference as exact_activation
from hal.ops.embedding import EmbeddingRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.kv_write import reference as exact_write
from hal.ops.rope import RopeRequest
from hal.ops.rope import reference as exact_rope

ROUNDING = {"float32": 3e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING))


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    assert found.shape == exact.shape
    bound = ROUNDING[dtype] * exact.abs() + 1e-6
    assert ((found.double() - exact).abs() <= bound).all()


@DTYPES
@pytest.mark.parametrize(
    ("heads", "fields"),
    [
        ((9, 3), {"head_dim": 64, "rotary_dim": 64}),
        ((5, 1), {"head_dim": 48, "rotary_dim": 20}),
        ((4, 0), {"head_dim": 64, "rotary_dim": 32, "rotary_start": 32}),
        ((3, 2), {"head_dim": 64, "rotary_dim": 64, "style": "interleaved"}),
        ((2, 1), {"head_dim": 64, "rotary_dim": 16, "rotary_start": 48, "style": "interleaved",
                  "is_inverse": True}),
    ],
    ids=["whole", "part", "tail-no-k", "interleaved", "interleaved-tail-inverse"],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rope(dtype: str, heads: tuple[int, int], fields: dict[str, Any], tokens: int) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = RopeRequest(num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, **fields)
    angles = torch.rand(50, request.rotary_dim // 2) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    width = (heads[0] + heads[1]) * request.head_dim
    # One matrix holds q and k, as after a fused projection: rows are strided.
    both = torch.randn(tokens, width).to(torch_dtype)
    split = heads[0] * request.head_dim
    positions = torch.randint(0, 50, (tokens,))
    want_q, want_k = both[:, :split].double().clone(), both[:, split:].double().clone()
    exact_rope(request, cos_sin_cache=table.double())(
        want_q, want_k if heads[1] else None, positions
    )
    kernel = triton_rope.bind(request, gpu("sm_90"), cos_sin_cache=table)
    kernel(both[:, :split], both[:, split:] if heads[1] else None, positions)
    peak = 1.5  # of a rotated pair against its own length: the terms may cancel
    for found, want in ((both[:, :split], want_q), (both[:, split:], want_k)):
        assert ((found.double() - want).abs() <= ROUNDING[dtype] * peak * 6 + 1e-6).all()


@DTYPES
@pytest.mark.parametrize(
    "fields",
    [{}, {"activation": "gelu_tanh"}, {"clamp": 1.5}],
    ids=["silu", "gelu", "silu-clamp"],
)
@pytest.mark.parametrize("width", [64, 1500])
def test_gated_activation(dtype: str, fields: dict[str, Any], width: int) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = GatedActivationRequest(width=width, dtype=dtype, **fields)
    x = (torch.randn(5, 2 * width) * 4).to(torch_dtype)
    kernel = triton_activation.bind(request, gpu("sm_90"))
    assert_rounded(kernel(x), exact_activation(request)(x.double()), dtype)
    assert kernel(x[:0]).shape == (0, width)


@pytest.mark.parametrize("hidden", [64, 2500])
def test_embedding(hidden: int) -> None:
    request = EmbeddingRequest(vocab_size=40, hidden_size=hidden, dtype="bfloat16")
    weight = torch.randn(40, hidden).bfloat16()
    kernel = triton_embedding.bind(request, gpu("sm_90"), weight=weight)
    ids = torch.tensor([39, 0, 7, 7])
    assert torch.equal(kernel(ids), weight[ids])
    assert kernel(ids[:0]).shape == (0, hidden)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
def test_kv_write_touches_its_slots_only(kv_dtype: str) -> None:
    request = KvWriteRequest(
        num_kv_heads=3, head_dim=40, v_head_dim=24, block_size=16, dtype="float32",
        kv_dtype=kv_dtype,
    )  # fmt: skip
    cache_dtype: torch.dtype = getattr(torch, kv_dtype)
    k, v = torch.randn(5, 120 + 8)[:, :120], torch.randn(5, 72)
    caches = [
        torch.full((4, 16, 3, dim), float("nan"), dtype=cache_dtype)
        for dim in (40, 24, 40, 24)
    ]  # fmt: skip
    slots = torch.tensor([63, 0, 17, 16, 40])
    triton_kv_write.bind(request, gpu("sm_90"))(k, v, caches[0], caches[1], slots)
    exact_write(request)(k, v, caches[2], caches[3], slots)
    for found, want in ((caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(), want.nan_to_num())
