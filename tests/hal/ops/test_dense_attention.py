"""Dense attention and products of activations: references against torch in float64, and the CPU's
candidates against the references."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.errors import RequestError
from hal.host import LocalHost
from hal.ops import CATALOGUE
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.dense_attention import DenseAttentionRequest, flops, pairs
from hal.ops.formats import FORMATS
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.request import OpRequest, TokenRange
from hal.tiers import Tier
from hal_backends.cpu.candidates import candidates_for
from hal_backends.cpu.detection import describe_device, detect_devices

BASE = DenseAttentionRequest(
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    v_head_dim=24,
    dtype="float32",
    phase="prefill",
    tokens=TokenRange(1, 512),
)
FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "encoder": {"is_causal": False},
    "mask": {"mask": "bool"},
    "bias": {"mask": "bias", "is_causal": False},
    "sinks": {"has_sinks": True},
    "sinks and mask": {"has_sinks": True, "mask": "bool"},
    "window": {"mask": "bool", "window": 9},
    "window and sinks": {"mask": "bool", "window": 9, "has_sinks": True},
    "softcap": {"softcap": 3.0, "mask": "bool"},
    "wide keys": {"head_dim": 32, "v_head_dim": 16},
    "wide values": {"head_dim": 16, "v_head_dim": 32, "mask": "bool"},
    "lists": {"list_width": 5, "mask": "bool"},
    "lists alone": {"list_width": 5, "has_sinks": True},
    "lists and bias": {"list_width": 5, "mask": "bias", "head_dim": 32},
}
SHAPES = {"prefill": (2, 130, 130), "later": (2, 7, 40), "decode": (3, 1, 33)}


def arguments(
    request: DenseAttentionRequest, batch: int, queries: int, keys: int, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(inputs of a kernel, load-time arguments); some queries see nothing."""
    q = torch.randn(batch, request.num_heads, queries, request.head_dim, dtype=dtype)
    k = torch.randn(batch, keys, request.num_kv_heads, request.head_dim, dtype=dtype)
    v = torch.randn(batch, request.num_kv_heads, keys, request.v_head_dim, dtype=dtype)
    mask, lists = None, None
    at = torch.arange(keys - queries, keys)[:, None]
    key_at = torch.arange(keys)[None]
    if request.mask == "bool":
        seen = key_at <= at
        if request.window:
            seen &= key_at > at - request.window
        mask = seen.expand(batch, 1, -1, -1).clone()
        mask[0, ..., : min(4, keys // 2)] = False  # padding at the beginning
    elif request.mask == "bias":
        mask = torch.randn(1, request.num_heads, queries, keys, dtype=dtype)
    if request.list_width:
        drawn = torch.rand(batch, queries, keys + 3).argsort(dim=-1)  # distinct, -1 to keys + 1
        lists = drawn[..., : request.list_width].int() - 1
    static: dict[str, Any] = {"scale": 0.3}
    if request.has_sinks:
        static["sinks"] = torch.randn(request.num_heads, dtype=dtype)
    return (q, k.transpose(1, 2), v, mask, lists), static


def oracle(request: DenseAttentionRequest, args: Any, static: Any) -> torch.Tensor:
    """torch's own attention in float64, with a sink as a further key of value zero."""
    q, k, v, mask, lists = args
    q, k, v = (x.double() for x in (q, k, v))
    groups = request.num_heads // request.num_kv_heads
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    added = torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=torch.float64)
    if request.mask == "bias":
        added += mask.double()
    seen = torch.ones_like(added, dtype=torch.bool)
    if request.mask == "bool":
        seen &= mask
    elif request.mask == "none" and request.is_causal:
        seen &= torch.ones(seen.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    if lists is not None:
        named = torch.zeros_like(seen)
        for b in range(lists.shape[0]):
            for t in range(lists.shape[1]):
                for key in lists[b, t].tolist():
                    if 0 <= key < k.shape[2]:
                        named[b, :, t, key] = True
        seen &= named
    scores = q @ k.transpose(2, 3) * static["scale"]
    if request.softcap:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    scores = (scores + added).masked_fill(~seen, float("-inf"))
    sinks = static.get("sinks")
    extra = torch.full((*scores.shape[:3], 1), float("-inf"), dtype=torch.float64)
    if sinks is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand_as(extra)
    weights = torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    return (weights.nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.fixture(scope="module")
def device() -> DeviceSpec:
    host = LocalHost()
    return describe_device(detect_devices(host)[0], host)


def serving(device: DeviceSpec, request: OpRequest) -> list[KernelCandidate]:
    found = [c for c in candidates_for(request.op, device) if c.serves(request)]
    assert found, f"no candidate of this CPU serves {request}"
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_reference_and_candidates(device: DeviceSpec, form: str, shape: str) -> None:
    phase: Any = "decode" if shape == "decode" else "prefill"
    request = dataclasses.replace(BASE, phase=phase, **FORMS[form])
    args, static = arguments(request, *SHAPES[shape], torch.float64)
    want = oracle(request, args, static)
    exact = CATALOGUE["dense_attention"].reference(request, **static)(*args)
    torch.testing.assert_close(exact, want, rtol=1e-11, atol=1e-11)
    few = [x.float() if x is not None and x.is_floating_point() else x for x in args]
    sinks = {name: x.float() if name == "sinks" else x for name, x in static.items()}
    for candidate in serving(device, request):
        got = candidate.load()(request, **sinks)(*few)
        assert got.shape == want.shape, candidate.name
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5, msg=candidate.name)


def test_which_candidate_is_best(device: DeviceSpec) -> None:
    best = {}
    for form, changes in FORMS.items():
        found = serving(device, dataclasses.replace(BASE, **changes))
        first = min(found, key=lambda c: -c.tier)
        best[form] = (first.name.rpartition(".")[2], first.tier)
    assert best["causal"] == best["sinks"] == ("flash", Tier.NATIVE)
    assert best["window"] == ("flash_spans", Tier.NATIVE)
    assert best["wide keys"] == ("flash_padded", Tier.TUNED)
    assert best["softcap"] == ("products", Tier.PORTABLE)
    assert best["lists"] == ("flash_masked_lists", Tier.PORTABLE)
    decode = dataclasses.replace(BASE, phase="decode", list_width=5)
    assert max(c.tier for c in serving(device, decode)) is Tier.TUNED


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_heads": 4}, {"window": 3}, {"mask": "causal"}, {"softcap": -1.0}, {"head_dim": 0}],
)
def test_inconsistent_requests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        dataclasses.replace(BASE, **changes)


def test_calls_that_are_not_what_was_requested() -> None:
    args, static = arguments(BASE, 1, 4, 4, torch.float32)
    family = CATALOGUE["dense_attention"]
    with pytest.raises(ValueError, match="mask 'none'"):
        family.reference(BASE, **static)(*args[:3], torch.ones(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="sinks"):
        family.reference(BASE, scale=1.0, sinks=torch.ones(6))
    with pytest.raises(ValueError, match="lists of 0"):
        family.reference(BASE, **static)(*args[:4], torch.ones(1, 4, 2).int())


def test_work_is_that_of_the_pairs_that_are_seen() -> None:
    def count(tokens: int, **changes: Any) -> float:
        return pairs(dataclasses.replace(BASE, **changes), tokens)

    assert count(5) == 15
    assert count(5, is_causal=False) == 25
    assert count(5, mask="bool", window=2) == 1 + 2 * 4
    assert count(5, list_width=3) == 1 + 2 + 3 * 3
    assert count(4, phase="decode", context_tokens=100) == 400
    assert flops(BASE, 5) == 2 * 6 * 48 * 15


@pytest.mark.parametrize("equation", ["", "bmk,bkn->bmn", "bqhd,bkd->bqhk"])
def test_products_of_two_activations(device: DeviceSpec, equation: str) -> None:
    if equation == "bqhd,bkd->bqhk":
        a, b = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 8)
    else:
        a, b = torch.randn(2, 5, 8), torch.randn(2, 8, 7)
    want = torch.einsum(equation or "bmk,bkn->bmn", a.double(), b.double())
    request = BatchedGemmRequest(n=7, k=8, dtype="float32", equation=equation)
    family = CATALOGUE["batched_gemm"]
    torch.testing.assert_close(family.reference(request)(a.double(), b.double()), want)
    for candidate in serving(device, request):
        got = candidate.load()(request)(a, b)
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
    assert family.flops(request, 10) == 2 * 10 * 7 * 8


@pytest.mark.parametrize("epilogue", ["none", "silu", "silu_gated"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_per_expert_on_the_cpu(
    device: DeviceSpec, epilogue: Any, is_transposed: bool
) -> None:
    request = GroupedGemmRequest(
        num_experts=5,
        experts_per_token=2,
        n=12,
        k=16,
        dtype="float32",
        weight_format=FORMATS["float32"],
        epilogue=epilogue,
    )
    weight = torch.randn(5, 16, 12).transpose(1, 2) if is_transposed else torch.randn(5, 12, 16)
    offsets = torch.tensor([0, 3, 3, 7, 8, 8])
    x = torch.randn(8, 16)
    want = CATALOGUE["grouped_gemm"].reference(request, weight=weight)(x, offsets)
    for candidate in serving(device, request):
        got = candidate.load()(request, weight=weight)(x, offsets)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
