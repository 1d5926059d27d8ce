"""Triton kernels that stream memory (rotation, activation, gather, KV write) against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.activation.triton as triton_activation
import hal_kernels.embedding.triton as triton_embedding
import hal_kernels.kv_write.triton as triton_kv_write
import hal_kernels.rope.triton as triton_rope
import hal_kernels.rope_kv_write.triton as triton_rope_kv_write
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.activation import GatedActivationRequest
from hal.ops.activation import reference as exact_activation
from hal.ops.embedding import EmbeddingRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.kv_write import reference as exact_write
from hal.ops.rope import RopeRequest
from hal.ops.rope import reference as exact_rope
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.ops.rope_kv_write import reference as exact_pass

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


@DTYPES
@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    ("heads", "dims"), [((9, 3), (64, 64, 64)), ((5, 1), (48, 48, 20)), ((4, 4), (16, 24, 16))]
)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rope_kv_write(
    dtype: str, has_qk_norm: bool, heads: tuple[int, int], dims: tuple[int, int, int], tokens: int
) -> None:
    check_pass(dtype, has_qk_norm, heads, dims, torch.ones(tokens))


@DTYPES
@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["", "norms"])
def test_rope_kv_write_of_magnitudes(dtype: str, has_qk_norm: bool) -> None:
    check_pass(dtype, has_qk_norm, (3, 1), (32, 32, 32), torch.logspace(-4, 4, 5))


def check_pass(
    dtype: str,
    has_qk_norm: bool,
    heads: tuple[int, int],
    dims: tuple[int, int, int],
    sizes: torch.Tensor,
) -> None:
    """One token of each size."""
    tokens = len(sizes)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = RopeKvWriteRequest(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0], v_head_dim=dims[1],
        rotary_dim=dims[2], block_size=4, dtype=dtype, kv_dtype=dtype, has_qk_norm=has_qk_norm,
    )  # fmt: skip
    angles = torch.rand(50, dims[2] // 2) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    widths = (heads[0] * dims[0], heads[1] * dims[0], heads[1] * dims[1])
    # One product gave all three.
    rows = (torch.randn(tokens, sum(widths)) * sizes[:, None]).to(torch_dtype)
    q, k, v = rows.split(widths, dim=1)
    positions = torch.randint(0, 50, (tokens,))
    slots = torch.randperm(40)[:tokens]
    caches = [torch.full((10, 4, heads[1], dim), float("nan")).to(torch_dtype) for dim in dims[:2]]
    weights: dict[str, Any] = {}
    if has_qk_norm:
        weights = {name: 1 + torch.randn(dims[0]) / 3 for name in ("q_weight", "k_weight")}
        weights |= {"eps": 1e-3}
    rounded = {n: w.to(torch_dtype) if n != "eps" else w for n, w in weights.items()}
    exact_weights = {n: w.double() if n != "eps" else w for n, w in rounded.items()}
    exact_caches = [cache.double() for cache in caches]
    want = exact_pass(request, cos_sin_cache=table.double(), **exact_weights)(
        q.double(), k.double(), v.double(), positions, *exact_caches, slots
    )
    before = k.clone(), v.clone()
    kernel = triton_rope_kv_write.bind(request, gpu("sm_90"), cos_sin_cache=table, **rounded)
    got = kernel(q, k, v, positions, *caches, slots)
    # With a norm two roundings, of two values that a rotation adds.
    bound = ROUNDING[dtype] * (4.0 if has_qk_norm else 1.0)
    of_slot = torch.ones(40)
    of_slot[slots] = sizes
    slacks = [sizes[:, None], *[of_slot.view(10, 4, 1, 1)] * 2]  # float32 sums that cancel
    for found, exact, slack in zip((got, *caches), (want, *exact_caches), slacks, strict=True):
        written = ~exact.isnan()
        assert torch.equal(found.isnan(), exact.isnan()), "only the slots' rows are written"
        limit = bound * (exact.abs() + (4.0 if has_qk_norm else 0.0)) + 2e-6 * slack
        if dtype == "float16":
            limit += 2.0**-24  # a step of numbers below the normal ones
        assert ((found.double() - exact).abs() <= limit)[written].all()
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


def test_rope_kv_write_rounds_to_the_caches_dtype() -> None:
    request = RopeKvWriteRequest(
        num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, rotary_dim=16, block_size=4,
        dtype="float32", kv_dtype="float8_e4m3fn",
    )  # fmt: skip
    table = torch.cat((torch.ones(8, 8), torch.zeros(8, 8)), dim=-1)  # by no angle
    q, k, v = torch.randn(3, 32), torch.randn(3, 16) * 20, torch.randn(3, 16)
    caches = [torch.zeros(2, 4, 1, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.tensor([5, 0, 2])
    kernel = triton_rope_kv_write.bind(request, gpu("sm_90"), cos_sin_cache=table)
    kernel(q, k, v, torch.zeros(3, dtype=torch.int64), *caches, slots)
    for rows, cache in zip((k, v), caches, strict=True):
        stored = cache.view(8, 16).float()
        assert torch.equal(stored[slots], rows.to(torch.float8_e4m3fn).float())
        assert not stored[[1, 3, 4, 6, 7]].any()


def test_rope_kv_write_needs_its_weights() -> None:
    request = RopeKvWriteRequest(
        num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, rotary_dim=16, block_size=4,
        dtype="float32", kv_dtype="float32", has_qk_norm=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="required q_weight and k_weight"):
        triton_rope_kv_write.bind(request, gpu("sm_90"), cos_sin_cache=torch.ones(4, 16))
