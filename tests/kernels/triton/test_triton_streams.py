"""Triton kernels that stream memory (rotation, activation, gather, KV write) against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hal_kernels.activation.triton as triton_activation
import hal_kernels.embedding.triton as triton_embedding
import hal_kernels.kv_write.triton as triton_kv_write
import hal_kernels.rope.triton as triton_rope
from gpu_devices import gpu
from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.activation import GatedActivationRequest
from hal.ops.activation import reference as exact_activation
from hal.ops.embedding import EmbeddingRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.kv_write import reference as exact_write
from hal.ops.rope import RopeRequest
from hal.ops.rope import reference as exact_rope

# Of the rotation, and the same of all that is rounded once here.
ROUNDING = CATALOGUE["rope"].largest_errors
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
    assert_rotated(dtype, heads, fields, tokens)


@pytest.mark.parametrize("many", [3, 4])
@pytest.mark.parametrize("heads", [(35, 33), (33, 0)])
def test_rope_of_several_blocks_of_heads(
    heads: tuple[int, int], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block a program of its own, or all of a token one program's."""
    monkeypatch.setattr(triton_rope, "MANY_TOKENS", many)
    assert_rotated("bfloat16", heads, {"head_dim": 128, "rotary_dim": 128}, 3)


def assert_rotated(dtype: str, heads: tuple[int, int], fields: dict[str, Any], tokens: int) -> None:
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
@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_rope_of_magnitudes(dtype: str, style: str) -> None:
    """Tokens of 1e-4 to 1e4, each judged by its own size."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    fields: dict[str, Any] = {"style": style, "head_dim": 32, "rotary_dim": 32}
    request = RopeRequest(num_heads=3, num_kv_heads=1, dtype=dtype, **fields)
    angles = torch.rand(9, 16) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    sizes = torch.logspace(-4, 4, 5)[:, None]
    rows = (torch.randn(5, 4 * 32).clamp(-3, 3) * sizes).to(torch_dtype)
    want = rows.double().clone()
    positions = torch.randint(0, 9, (5,))
    exact_rope(request, cos_sin_cache=table.double())(want[:, :96], want[:, 96:], positions)
    kernel = triton_rope.bind(request, gpu("sm_90"), cos_sin_cache=table)
    kernel(rows[:, :96], rows[:, 96:], positions)
    smallest = 2.0**-24 if dtype == "float16" else 0.0  # a step of numbers below the normal ones
    assert ((rows.double() - want).abs() <= ROUNDING[dtype] * 4.5 * sizes + smallest).all()


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


@DTYPES
@pytest.mark.parametrize("fields", [{}, {"clamp": 7.0}, {"activation": "gelu_tanh"}])
def test_gated_activation_of_magnitudes(dtype: str, fields: dict[str, Any]) -> None:
    """Rows of zeros, and of 1e-4 to 1e4 (1e2 in float16, which the product has to fit): gates whose
    exponential is zero or more than float32 holds."""
    width, torch_dtype = 70, getattr(torch, dtype)
    request = GatedActivationRequest(width=width, dtype=dtype, **fields)
    sizes = torch.cat((torch.zeros(1), torch.logspace(-4, 2 if dtype == "float16" else 4, 6)))
    x = (torch.randn(7, 2 * width).clamp(-2.5, 2.5) * sizes[:, None]).to(torch_dtype)
    found = triton_activation.bind(request, gpu("sm_90"))(x)
    exact = exact_activation(request)(x.double())
    assert found.isfinite().all()
    assert not found[0].any()
    gate, up = x.double().abs().split(width, dim=1)
    if "clamp" in fields:
        up = up.clamp(max=7.0)
    # By the size of the product, where the exponential takes nearly all; a float16 below 2**-14
    # has fewer bits.
    floor = 1e-6 * up * gate.clamp(min=1e-9) + (2.0**-25 if dtype == "float16" else 0.0)
    assert ((found.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + floor).all()


def test_a_clamp_keeps_what_is_not_a_number() -> None:
    width = 70
    request = GatedActivationRequest(width=width, dtype="bfloat16", clamp=1.5)
    x = (torch.randn(3, 2 * width) * 4).bfloat16()
    x[0, 5] = x[1, width + 7] = x[2, 9] = x[2, width + 9] = float("nan")
    found = triton_activation.bind(request, gpu("sm_90"))(x)
    expected = torch.zeros(3, width, dtype=torch.bool)
    expected[0, 5] = expected[1, 7] = expected[2, 9] = True
    assert torch.equal(found.isnan(), expected)


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


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_kv_write_into_fp8(kv_dtype: str, *, has_scales: bool) -> None:
    """Of values of all sizes, divided by a scale of keys and one of values: in float64 the quotient
    is within half a step of what is stored, or beyond the largest number, which then is stored."""
    request = KvWriteRequest(
        num_kv_heads=2, head_dim=32, v_head_dim=32, block_size=4, dtype="float32",
        kv_dtype=kv_dtype, has_scales=has_scales,
    )  # fmt: skip
    dtype: torch.dtype = getattr(torch, kv_dtype)
    sizes = torch.logspace(-3, 4, 7)[:, None]
    rows = [torch.randn(7, 64) * sizes for _ in range(2)]
    rows[0][1, 5] = float("nan")
    caches = [torch.zeros(3, 4, 2, 32).to(dtype) for _ in rows]
    scales = {"k_scale": 0.37, "v_scale": 11.3} if has_scales else {}
    slots = torch.randperm(12)[:7]
    triton_kv_write.bind(request, gpu("sm_90"), **scales)(*rows, *caches, slots)
    most = torch.finfo(dtype).max
    for given, cache, scale in zip(rows, caches, scales.values() or (1.0, 1.0), strict=True):
        quotient = given.double() / scale
        found = cache.view(12, 64)[slots].double()
        assert torch.equal(found.isnan(), quotient.isnan())
        want = quotient.clamp(-most, most)
        step = (want.abs() * 2.0**-3).clamp(min=torch.finfo(dtype).tiny * 2.0**-3)
        is_number = ~want.isnan()
        assert ((found - want).abs() <= step / 2 + 1e-6)[is_number].all()
    exact = [torch.zeros(3, 4, 2, 32).to(dtype) for _ in rows]
    exact_write(request, **scales)(*rows, *exact, slots)
    for cache, reference in zip(caches, exact, strict=True):
        assert torch.equal(cache.view(torch.uint8), reference.view(torch.uint8))


def test_scales_that_a_request_does_not_have_are_refused() -> None:
    fields: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 16, "v_head_dim": 16, "block_size": 4}
    plain = KvWriteRequest(dtype="bfloat16", kv_dtype="bfloat16", **fields)
    scaled = KvWriteRequest(dtype="bfloat16", kv_dtype="float8_e4m3fn", has_scales=True, **fields)
    for bind in (exact_write, lambda r, **scales: triton_kv_write.bind(r, gpu("sm_90"), **scales)):
        with pytest.raises(ValueError, match=r"required k_scale 1\.0"):
            bind(plain, k_scale=0.5)
        with pytest.raises(ValueError, match="required v_scale a positive number"):
            bind(scaled, v_scale=0.0)
    with pytest.raises(RequestError, match="kv_dtype float8_e4m3fn"):
        replace(plain, has_scales=True)
    with pytest.raises(RequestError, match="rows of a format have their own"):
        KvWriteRequest(
            dtype="bfloat16", kv_dtype="float8_e4m3fn", kv_format="v4_584", has_scales=True,
            num_kv_heads=1, head_dim=512, v_head_dim=0, block_size=64,
        )  # fmt: skip
