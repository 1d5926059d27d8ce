"""The pass from projection to attention in Triton (norms, rotation, KV write) against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal_kernels.rope_kv_write.triton as triton_rope_kv_write
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.ops.rope_kv_write import reference as exact_pass
from hal.reasons import ReasonKind
from hal_kernels.rope_kv_write.triton_limits import not_supported_reasons

ROUNDING = CATALOGUE["rope"].largest_errors
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING))
Style = Literal["half_split", "interleaved"]
STYLES = pytest.mark.parametrize("style", ["half_split", "interleaved"])


@DTYPES
@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    ("heads", "dims"), [((9, 3), (64, 64, 64)), ((5, 1), (48, 48, 20)), ((4, 4), (16, 24, 16))]
)
@STYLES
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rope_kv_write(
    dtype: str,
    has_qk_norm: bool,
    heads: tuple[int, int],
    dims: tuple[int, int, int],
    style: Style,
    tokens: int,
) -> None:
    check_pass(dtype, has_qk_norm, heads, dims, torch.ones(tokens), style)


@DTYPES
@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["", "norms"])
@STYLES
def test_rope_kv_write_of_magnitudes(dtype: str, has_qk_norm: bool, style: Style) -> None:
    check_pass(dtype, has_qk_norm, (3, 1), (32, 32, 32), torch.logspace(-4, 4, 5), style)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_drawn_sizes(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    draw = data.draw
    head_dim = 2 * draw(st.integers(1, 40))
    dims = head_dim, draw(st.integers(1, 70)), 2 * draw(st.integers(1, head_dim // 2))
    heads = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    sizes = torch.ones(draw(st.integers(1, 5)))
    check_pass(
        draw(st.sampled_from(list(ROUNDING))), draw(st.booleans()), heads, dims, sizes,
        draw(st.sampled_from(["half_split", "interleaved"])),
    )  # fmt: skip


def check_pass(
    dtype: str,
    has_qk_norm: bool,
    heads: tuple[int, int],
    dims: tuple[int, int, int],
    sizes: torch.Tensor,
    style: Style,
) -> None:
    """One token of each size."""
    tokens = len(sizes)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = RopeKvWriteRequest(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0], v_head_dim=dims[1],
        rotary_dim=dims[2], block_size=4, dtype=dtype, kv_dtype=dtype, has_qk_norm=has_qk_norm,
        style=style,
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


@STYLES
@pytest.mark.parametrize(
    ("arch", "kv_dtype"),
    [("sm_90", "float8_e4m3fn"), ("gfx942", "float8_e4m3fnuz"), ("sm_80", "float8_e4m3fn")],
)
def test_rope_kv_write_with_scales(style: Style, arch: str, kv_dtype: str) -> None:
    """What is read back times its scale is the normed and rotated key, and the value, to within
    half a step of e4m3; what is too large is the largest number."""
    request = RopeKvWriteRequest(
        num_heads=3, num_kv_heads=2, head_dim=32, v_head_dim=32, rotary_dim=16, block_size=4,
        dtype="bfloat16", kv_dtype=kv_dtype, has_qk_norm=True, style=style, has_kv_scales=True,
    )  # fmt: skip
    dtype: torch.dtype = getattr(torch, kv_dtype)
    angles = torch.rand(8, 8) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q, k, v = (torch.randn(5, heads * 32).bfloat16() for heads in (3, 2, 2))
    v[3] *= 1e4
    weights = {name: (1 + torch.randn(32) / 3).bfloat16() for name in ("q_weight", "k_weight")}
    scales = {"k_scale": 0.021, "v_scale": 1.7}
    positions, slots = torch.randint(0, 8, (5,)), torch.randperm(12)[:5]
    plain = [torch.zeros(3, 4, 2, 32, dtype=torch.float64) for _ in range(2)]
    exact = replace(request, kv_dtype="float64", has_kv_scales=False)
    doubles = {name: w.double() for name, w in weights.items()}
    exact_pass(exact, cos_sin_cache=table.double(), eps=1e-5, **doubles)(
        q.double(), k.double(), v.double(), positions, *plain, slots
    )
    caches = [torch.zeros(3, 4, 2, 32).to(dtype) for _ in range(2)]
    kernel = triton_rope_kv_write.bind(
        request, gpu(arch), cos_sin_cache=table, eps=1e-5, **weights, **scales
    )
    kernel(q, k, v, positions, *caches, slots)
    most = torch.finfo(dtype).max
    for cache, rows, scale in zip(caches, plain, scales.values(), strict=True):
        want = (rows / scale).clamp(-most, most)
        # Half a step of e4m3, of its smallest numbers in whole, and two roundings to bfloat16.
        rounding = 2.0**-4 + 2.0**-6 + 2.0**-8
        smallest = torch.finfo(dtype).tiny * 2.0**-3
        largest = want.abs().amax(dim=-1, keepdim=True)
        limit = rounding * want.abs() + smallest + 2.0**-8 * largest
        assert ((cache.double() - want).abs() <= limit).all()


@pytest.mark.parametrize(
    ("arch", "fields", "kind"),
    [
        ("sm_80", {}, None),
        ("sm_80", {"dtype": "float32", "kv_dtype": "float32"}, None),
        ("sm_120", {"style": "interleaved", "has_qk_norm": True}, None),
        ("sm_90", {"kv_dtype": "float8_e4m3fn", "has_kv_scales": True}, None),
        ("gfx942", {"kv_dtype": "float8_e4m3fnuz", "has_kv_scales": True}, None),
        ("gfx950", {"kv_dtype": "float8_e4m3fn", "style": "interleaved"}, None),
        ("gfx942", {"kv_dtype": "float8_e4m3fn"}, ReasonKind.ARGUMENT),
        ("sm_80", {"kv_dtype": "float8_e4m3fn", "has_kv_scales": True}, None),
        ("gfx90a", {"kv_dtype": "float8_e4m3fn", "style": "interleaved"}, None),
        ("gfx1100", {"kv_dtype": "float8_e4m3fnuz"}, ReasonKind.ARGUMENT),
        ("sm_90", {"dtype": "float32", "kv_dtype": "float8_e4m3fn"}, ReasonKind.ARGUMENT),
        ("sm_90", {"dtype": "float64", "kv_dtype": "float64"}, ReasonKind.MISSING),
    ],
)
def test_what_is_offered(arch: str, fields: dict[str, Any], kind: ReasonKind | None) -> None:
    given: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | fields
    request = RopeKvWriteRequest(
        num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, rotary_dim=64, block_size=16,
        **given,
    )  # fmt: skip
    reasons = not_supported_reasons(request, gpu(arch))
    assert [reason.kind for reason in reasons] == ([] if kind is None else [kind])


def test_rope_kv_write_needs_its_weights() -> None:
    request = RopeKvWriteRequest(
        num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, rotary_dim=16, block_size=4,
        dtype="float32", kv_dtype="float32", has_qk_norm=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="required q_weight and k_weight"):
        triton_rope_kv_write.bind(request, gpu("sm_90"), cos_sin_cache=torch.ones(4, 16))
