"""Products, rows per expert and rows into slots over drawn sizes, of which few are multiples of a
tile: where a row ends, where an expert's rows begin, which slots are written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hal_kernels.gemm.triton as triton_gemm
import hal_kernels.grouped_gemm.triton as triton_grouped
import hal_kernels.kv_write.triton as triton_kv_write
import hal_kernels.norm.triton as triton_norm
from gpu_devices import gpu
from hal.ops import kv_write, norm
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from kernel_errors import assert_exact

FEW = settings(
    max_examples=20, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
SEEDS = st.integers(0, 10**6)
# Of one expert, among them a tile of rows and one row more.
COUNTS = st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 16, 17, 64, 65]))
ARCHS = st.sampled_from(["sm_80", "sm_90", "sm_120", "gfx942", "gfx1100"])


@FEW
@given(data=st.data(), seed=SEEDS)
def test_products(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    m, n, k = (data.draw(st.integers(1, most)) for most in (40, 150, 200))
    x, weight = torch.randn(m, k).bfloat16(), (torch.randn(n, k) / k**0.5).bfloat16()
    request = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS["bfloat16"])
    found = triton_gemm.bind(request, gpu(data.draw(ARCHS)), weight=weight)(x)
    # Of one column or one term sums may cancel: by the size of their terms.
    floor = float(x.double().abs().max()) * 2.0**-16
    assert_exact("gemm", found, x.double() @ weight.double().T, floor=floor)


@FEW
@given(data=st.data(), seed=SEEDS)
def test_rows_per_expert(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    counts = data.draw(st.lists(COUNTS, min_size=1, max_size=5))
    n, k = data.draw(st.integers(8, 90)), data.draw(st.integers(8, 100))
    offsets = torch.tensor([0, *counts]).cumsum(0)
    x = torch.randn(sum(counts), k).bfloat16()
    weight = (torch.randn(len(counts), n, k) / k**0.5).bfloat16()
    request = GroupedGemmRequest(
        num_experts=len(counts), experts_per_token=1, n=n, k=k, dtype="bfloat16",
        weight_format=FORMATS["bfloat16"],
    )  # fmt: skip
    found = triton_grouped.bind(request, gpu(data.draw(ARCHS)), weight=weight)(x, offsets)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    exact = torch.einsum("mk,mnk->mn", x.double(), weight.double()[expert])
    assert_exact("grouped_gemm", found, exact, floor=1e-4)


@FEW
@given(data=st.data(), seed=SEEDS)
def test_rows_of_k_and_v_go_into_their_slots_only(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    heads, block_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    dims, pages = [data.draw(st.integers(1, 70)) for _ in "kv"], data.draw(st.integers(1, 4))
    request = kv_write.KvWriteRequest(
        num_kv_heads=heads, head_dim=dims[0], v_head_dim=dims[1], block_size=block_size,
        dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    count = data.draw(st.integers(0, min(5, pages * block_size)))
    slots = torch.randperm(pages * block_size)[:count]
    rows = [torch.randn(count, heads * dim + 3).bfloat16()[:, : heads * dim] for dim in dims]
    exact, found = (
        [torch.full((pages, block_size, heads, dim), math.nan).bfloat16() for dim in dims]
        for _ in range(2)
    )
    triton_kv_write.bind(request, gpu("sm_90"))(*rows, *found, slots)
    kv_write.reference(request)(*rows, *exact, slots)
    for got, want in zip(found, exact, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@FEW
@given(data=st.data(), seed=SEEDS)
def test_norms(dtype: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, tokens = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 5))
    request = norm.RmsNormRequest(hidden_size=hidden, dtype=dtype)
    x = torch.randn(tokens, hidden + 8).to(getattr(torch, dtype))[:, :hidden]
    weight = torch.rand(hidden).to(x.dtype)
    found = triton_norm.bind(request, gpu("sm_90"), weight=weight, eps=1e-6)(x)
    assert_exact("norm.rms", found, norm.reference(request, weight=weight, eps=1e-6)(x.double()))
