"""Triton attention with output projection in the interpreter against float64."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hal_kernels.attention_projection.triton as fused
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops import TokenRange
from hal.ops.attention import AttentionMetadata
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.reasons import ReasonKind
from hal_kernels.attention_projection.launch_model import (
    groups_of_heads,
    pieces_of_one_pass,
    prefers_one_pass,
)
from hal_kernels.attention_projection.triton_limits import not_supported_reasons
from kernel_errors import assert_exact

SHAPES = {  # (query heads, cached heads), head size, positions of a block, hidden size
    "gqa3-d64": ((9, 3), 64, 16, 72),
    "mha-d40": ((2, 2), 40, 16, 20),  # not a power of two, narrower than a tile
    "mqa5-d128": ((5, 1), 128, 32, 130),
}
WAYS = pytest.mark.parametrize("way", ["one_pass", "split_keys", "split_keys_in_groups"])


def request_of(shape: str, dtype: str, **fields: Any) -> AttentionProjectionRequest:
    (heads, kv_heads), head_dim, block_size, hidden = SHAPES[shape]
    defaults: dict[str, Any] = {
        "phase": "decode",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "hidden_size": hidden,
        "block_size": block_size,
        "dtype": dtype,
        "kv_dtype": dtype,
    }
    return AttentionProjectionRequest(**(defaults | fields))


def device(units: int, arch: str = "sm_120") -> DeviceSpec:
    plain = gpu(arch)
    return dataclasses.replace(plain, attributes={**plain.attributes, "compute_units": units})


@pytest.fixture
def on(way: str, monkeypatch: pytest.MonkeyPatch) -> DeviceSpec:
    """A device where each call goes the way that the test names."""
    is_one_pass = way == "one_pass"
    monkeypatch.setattr(fused, "prefers_one_pass", lambda *_: is_one_pass)
    monkeypatch.setattr(fused, "has_one_pass", lambda *_: True)
    return device({"one_pass": 24, "split_keys": 1, "split_keys_in_groups": 12}[way])


def launched(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Names of the kernels that are launched, as they are."""
    seen: list[str] = []

    class Spy:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            seen.append(self.name)
            return self.kernel[grid]

    for name in names:
        monkeypatch.setattr(fused, name, Spy(name, getattr(fused, name)))
    return seen


KERNELS = (
    "_attention_project_kernel",
    "_attention_decode_kernel",
    "_attention_merge_project_kernel",
    "_projection_sum_kernel",
)


RESIDUAL, SINKS = {"has_residual": True}, {"window": 20, "has_sinks": True}


@pytest.mark.parametrize(
    ("way", "shape", "dtype", "fields"),
    [
        ("one_pass", "gqa3-d64", "bfloat16", RESIDUAL),
        ("split_keys", "gqa3-d64", "bfloat16", RESIDUAL),
        ("split_keys_in_groups", "gqa3-d64", "bfloat16", RESIDUAL),
        ("one_pass", "gqa3-d64", "float16", SINKS),
        ("split_keys_in_groups", "gqa3-d64", "float16", SINKS),
        ("one_pass", "mha-d40", "bfloat16", {"softcap": 5.0}),
        ("split_keys", "mha-d40", "float16", {"softcap": 5.0}),
        ("split_keys", "mqa5-d128", "float16", {"has_sinks": True, "has_residual": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_against_float64(
    attention_cases: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    on: DeviceSpec,
    way: str,
    shape: str,
    dtype: str,
    fields: dict[str, Any],
) -> None:
    (heads, kv_heads), head_dim, block_size, hidden = SHAPES[shape]
    torch_dtype: torch.dtype = getattr(torch, dtype)
    lengths = [1, 530] if way == "split_keys" else [40, 1, 25]  # with two splits, and with one
    q, k, v, meta = attention_cases.paged(
        lengths, [1] * len(lengths), (heads, kv_heads), head_dim, block_size, torch_dtype
    )
    request = request_of(shape, dtype, **fields)
    weight = (torch.randn(hidden, heads * head_dim) / (heads * head_dim) ** 0.5).to(torch_dtype)
    sinks = torch.randn(heads).to(torch_dtype) if request.has_sinks else None
    rows = torch.randn(len(lengths), hidden + 8).to(torch_dtype)[:, :hidden]
    residual = rows if request.has_residual else None
    seen = launched(monkeypatch, *KERNELS)
    kernel = fused.bind(request, on, scale=head_dim**-0.5, weight=weight, sinks=sinks)
    found = kernel(q, k, v, meta, residual)
    attended = attention_cases.exact(
        q, k, v, meta, scale=head_dim**-0.5, window=request.window,
        softcap=request.softcap, sinks=sinks,
    )  # fmt: skip
    exact = attended @ weight.double().T
    exact = exact if residual is None else exact + residual.double()
    assert found.dtype == torch_dtype
    assert_exact("attention_projection", found, exact)
    assert seen[0] == KERNELS[way != "one_pass"]
    assert len(seen) == (3 if way == "split_keys_in_groups" else 2)  # three launches only in parts


@pytest.mark.parametrize("is_one_pass", [True, False], ids=["one_pass", "split_keys"])
@settings(
    max_examples=4, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_addresses_of_drawn_sizes(
    attention_cases: SimpleNamespace, is_one_pass: bool, data: st.DataObject, seed: int
) -> None:
    """Heads, pages, pieces of the result and groups of heads, few of them powers of two; as many
    programs as some device has units for. Caches are NaN wherever nothing was written."""
    torch.manual_seed(seed)
    most = data.draw(st.sampled_from([40, 40, 40 if is_one_pass else 600]))
    lengths = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=3))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    heads, dim = kv_heads * group, data.draw(st.sampled_from([16, 24, 32]))
    request = AttentionProjectionRequest(
        phase="decode",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        hidden_size=data.draw(st.integers(1, 150)),
        block_size=data.draw(st.integers(1, 24)),
        dtype="float16",
        kv_dtype="float16",
        window=data.draw(st.sampled_from([0, 0, 7, 30])),
    )
    q, k, v, meta = attention_cases.paged(
        lengths, [1] * len(lengths), (heads, kv_heads), dim, request.block_size, torch.float16
    )
    weight = (torch.randn(request.hidden_size, heads * dim) / (heads * dim) ** 0.5).half()
    arch = data.draw(st.sampled_from(["sm_90", "sm_120", "gfx942", "gfx1100"]))
    on = device(data.draw(st.integers(1, 40)), arch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "prefers_one_pass", lambda *_: is_one_pass)
        patch.setattr(fused, "has_one_pass", lambda *_: True)
        kernel = fused.bind(request, on, scale=dim**-0.5, weight=weight)
        found = kernel(q, k, v, meta)
    attended = attention_cases.exact(q, k, v, meta, scale=dim**-0.5, window=request.window)
    assert_exact("attention_projection", found, attended @ weight.double().T)


@WAYS
def test_what_has_no_keys_or_no_rows(
    attention_cases: SimpleNamespace, on: DeviceSpec, way: str
) -> None:
    """A sequence without keys adds nothing to its residual, one without a row writes none, and
    every row of the others is written: the result was NaN before."""
    q, k, v, meta = attention_cases.paged([5, 3, 9], [1, 1, 1], (9, 3), 64, 16, torch.float16)
    meta.seq_lens[1] = 0
    meta.query_start_loc = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32)
    meta.seq_lens = torch.cat((meta.seq_lens, torch.zeros(1, dtype=torch.int32)))
    meta.block_table = torch.cat((meta.block_table, meta.block_table[:1]))
    weight, residual = torch.randn(72, 576).half() / 24, torch.randn(3, 72).half()
    request = request_of("gqa3-d64", "float16", has_residual=True)
    kernel = fused.bind(request, on, scale=0.125, weight=weight)
    found = kernel(q, k, v, meta, residual)
    assert found.isfinite().all()
    assert torch.equal(found[1], residual[1])
    rest = AttentionMetadata(
        torch.tensor([0, 1, 2], dtype=torch.int32), meta.seq_lens[[0, 2]],
        meta.block_table[[0, 2]], 1, 9,
    )  # fmt: skip
    attended = attention_cases.exact(q[[0, 2]], k, v, rest, scale=0.125)
    exact = attended @ weight.double().T + residual[[0, 2]].double()
    assert (found[[0, 2]].double() - exact).abs().max() <= 2.0**-9 * exact.abs().max()


@WAYS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_magnitudes(attention_cases: SimpleNamespace, on: DeviceSpec, way: str, dtype: str) -> None:
    """Queries of 1e-4 to 1e3 and values of 1e-4 to 1e4, each row judged by its own size."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    q, k, v, meta = attention_cases.paged([20] * 4, [1] * 4, (9, 3), 64, 16, torch_dtype)
    q *= torch.logspace(-4, 3, 4)[:, None].to(torch_dtype)
    for blocks, size in zip(meta.block_table[:, :2].long(), (1.0, 1e-4, 1e4, 1e-2), strict=True):
        v[blocks] *= size
    weight = (torch.randn(72, 576) / 24).to(torch_dtype)
    kernel = fused.bind(request_of("gqa3-d64", dtype), on, scale=0.125, weight=weight)
    exact = attention_cases.exact(q, k, v, meta, scale=0.125) @ weight.double().T
    smallest = 2.0**-20 if dtype == "float16" else 0.0  # steps of numbers below the normal ones
    assert_exact("attention_projection", kernel(q, k, v, meta), exact, floor=smallest)


@WAYS
def test_a_sequence_alone_and_in_a_batch_is_the_same_to_the_bit(
    attention_cases: SimpleNamespace, on: DeviceSpec, way: str
) -> None:
    """Within each way: the order of every sum is that of the heads, whatever the batch."""
    q, k, v, meta = attention_cases.paged([30, 12], [1, 1], (9, 3), 64, 16, torch.bfloat16)
    weight = torch.randn(72, 576).bfloat16()
    kernel = fused.bind(request_of("gqa3-d64", "bfloat16"), on, scale=0.125, weight=weight)
    together = kernel(q, k, v, meta)
    assert torch.equal(kernel(q, k, v, meta), together)
    meta.query_start_loc, meta.seq_lens = meta.query_start_loc[1:], meta.seq_lens[1:]
    meta.block_table, meta.max_seq_len = meta.block_table[1:], 12
    assert torch.equal(kernel(q, k, v, meta)[1], together[1])


def test_no_sequences(attention_cases: SimpleNamespace) -> None:
    q, k, v, meta = attention_cases.paged([3], [1], (9, 3), 64, 16, torch.float16)
    meta.query_start_loc, meta.seq_lens = meta.query_start_loc[:1], meta.seq_lens[:0]
    weight = torch.randn(72, 576).half()
    kernel = fused.bind(request_of("gqa3-d64", "float16"), device(8), scale=1.0, weight=weight)
    assert kernel(q[:0], k, v, meta).shape == (0, 72)


def test_one_pass_is_for_short_contexts_of_few_sequences() -> None:
    """Numbers of Llama 3 8B on 188 multiprocessors."""
    request = request_of(
        "gqa3-d64", "bfloat16", num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128,
        hidden_size=4096,
    )  # fmt: skip
    assert pieces_of_one_pass(request, 188, 64, 1) == 24
    assert pieces_of_one_pass(request, 188, 64, 64) == 1
    assert pieces_of_one_pass(request, 188, 5, 1) == 5
    assert prefers_one_pass(request, 24, 1, 300)
    assert not prefers_one_pass(request, 24, 1, 1000)
    assert prefers_one_pass(dataclasses.replace(request, window=128), 24, 1, 1000)
    assert not prefers_one_pass(request, 3, 8, 16)  # the weight would be read eight times
    assert groups_of_heads(request, 188, 128) == 1
    assert groups_of_heads(request, 188, 32) == 5
    assert groups_of_heads(request_of("mha-d40", "bfloat16"), 188, 3) == 2  # no more than heads


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    request = request_of("gqa3-d64", "bfloat16")
    assert not_supported_reasons(request, gpu("sm_120")) == []
    (found,) = not_supported_reasons(dataclasses.replace(request, phase="prefill"), gpu("sm_120"))
    assert found.kind is ReasonKind.MISSING
    (found,) = not_supported_reasons(
        dataclasses.replace(request, tokens=TokenRange(1, 17)), gpu("sm_120")
    )
    assert (found.what, found.kind) == ("rows", ReasonKind.ARGUMENT)
    for wrong in ({"kv_dtype": "float32"}, {"dtype": "float32"}, {"head_dim": 512}):
        assert not_supported_reasons(dataclasses.replace(request, **wrong), gpu("sm_120"))
    (found, *_) = not_supported_reasons(request, gpu("sm_70"))
    assert found.kind is ReasonKind.UNVERIFIED
    with pytest.raises(BindingError, match="weight"):
        fused.bind(request, gpu("sm_120"), scale=1.0, weight=torch.randn(72, 64).bfloat16())
    with pytest.raises(BindingError, match="sinks"):
        fused.bind(
            request, gpu("sm_120"), scale=1.0, weight=torch.randn(72, 576).bfloat16(),
            sinks=torch.randn(9),
        )  # fmt: skip
    kernel = fused.bind(request, gpu("sm_120"), scale=1.0, weight=torch.randn(72, 576).bfloat16())
    with pytest.raises(ValueError, match="residual"):
        kernel(torch.randn(1, 576), None, None, None, torch.randn(1, 72))
