"""Every CPU candidate that says it can serve a request computes what the reference does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.host import LocalHost
from hal.ops import CATALOGUE
from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import FORMATS, QuantizedWeight, torch_dtype
from hal.ops.gemm import GemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, TokenRange
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal_backends.cpu.candidates import candidates_for
from hal_backends.cpu.detection import describe_device, detect_devices

# Largest difference as a share of the largest value, by the dtype of the activations. A candidate
# that rounds to bfloat16 (its semantic notes say so) is held to bfloat16's.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
TOKENS = TokenRange(1, 64)


@pytest.fixture(scope="module")
def device() -> DeviceSpec:
    host = LocalHost()
    return describe_device(detect_devices(host)[0], host)


def _serving(device: DeviceSpec, request: OpRequest) -> list[KernelCandidate]:
    found = [c for c in candidates_for(request.op, device) if c.serves(request)]
    assert found, f"no candidate of this CPU serves {request}"
    return found


def _check(
    got: torch.Tensor,
    want: torch.Tensor,
    tolerance: float,
    name: str,
    largest: torch.Tensor | None = None,
) -> None:
    """largest: what errors are relative to, where it is not the largest wanted value."""
    assert got.shape == want.shape, name
    assert torch.isfinite(got).all(), f"{name}: something was not written"
    largest = want.double().abs().max() if largest is None else largest
    error = float((got.double() - want.double()).abs().max() / largest)
    assert error <= tolerance, f"{name}: error {error:.1e} over {tolerance:.1e}"


def _tolerance(candidate: KernelCandidate, request: Any) -> float:
    notes = [note.name for note in candidate.semantic_notes(request)]
    if "int7_activations" in notes:  # a step is 1/63; gated outputs multiply two such values
        return 8e-2
    if notes:
        return TOLERANCE["bfloat16"]
    # Rounding a row to int8 may fall to either side of a tie: one step of 1/127 of one value.
    if request.op == "gemm" and request.weight_format.activation == "int8_per_token":
        return 2e-3
    return TOLERANCE[request.dtype]


def _weight(format_name: str, n: int, k: int) -> torch.Tensor | QuantizedWeight:
    weight_format = FORMATS[format_name]
    if weight_format.is_dense:
        return torch.randn(n, k).to(torch_dtype(format_name))
    group = weight_format.group_size or k
    scale = torch.rand(n, k // group) * 0.02 + 0.001
    if weight_format.bits == 8:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    else:
        data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    minimum = None
    if weight_format.has_zeros:
        minimum = torch.randint(0, 16, scale.shape).half()
    elif not weight_format.is_symmetric:
        minimum = (torch.randn(n, k // group) * 0.05).half()
    if weight_format.group_size:
        scale = scale.half()
    else:
        scale = scale.view(n)
    return QuantizedWeight(format=weight_format, data=data, scale=scale, minimum=minimum)


_GEMM_CASES = [
    (name, dtype, n, -(-k // whole) * whole, bias, epilogue)
    for (name, dtype), (n, k), bias, epilogue in itertools.product(
        [(name, "float32") for name, f in FORMATS.items() if f.element == "int"]
        + [("bfloat16", "bfloat16")],
        [(96, 64), (160, 576)],
        [False, True],
        ["none", "silu_gated"],
    )
    for whole in (FORMATS[name].group_size or 1,)
]


@pytest.mark.parametrize(("name", "dtype", "n", "k", "bias", "epilogue"), _GEMM_CASES)
def test_gemm(
    device: DeviceSpec, name: str, dtype: str, n: int, k: int, bias: bool, epilogue: Any
) -> None:
    request = GemmRequest(
        n=n,
        k=k,
        dtype=dtype,
        weight_format=FORMATS[name],
        has_bias=bias,
        epilogue=epilogue,
        tokens=TOKENS,
    )
    if dtype == "bfloat16" and not device.features & {"amx_bf16", "avx512_bf16"}:
        assert not [c for c in candidates_for("gemm", device) if c.serves(request)]
        return
    weight = _weight(name, n, k)
    bias_values = torch.randn(n).to(torch_dtype(dtype)) if bias else None
    want_kernel = CATALOGUE["gemm"].reference(request, weight=weight, bias=bias_values)
    plain = dataclasses.replace(request, epilogue="none")
    plain_kernel = CATALOGUE["gemm"].reference(plain, weight=weight, bias=bias_values)
    for candidate in _serving(device, request):
        kernel = candidate.load()(request, weight=weight, bias=bias_values)
        for rows in (1, 3, 17, 64):
            x = torch.randn(rows, k).to(torch_dtype(dtype))
            got = kernel(x)
            tolerance, largest = _tolerance(candidate, request), None
            if epilogue == "silu_gated":
                # The error of a product of two factors: each's own, times the other. The largest
                # product may be far smaller than that of the largest factors.
                gate, up = plain_kernel(x).double().chunk(2, dim=-1)
                tolerance *= 2
                largest = torch.nn.functional.silu(gate).abs().max() * up.abs().max()
            _check(got, want_kernel(x), tolerance, candidate.name, largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("hidden", [64, 576, 100])
def test_norm(device: DeviceSpec, dtype: str, has_residual: bool, hidden: int) -> None:
    request = RmsNormRequest(
        hidden_size=hidden, dtype=dtype, has_residual=has_residual, tokens=TOKENS
    )
    weight = torch.randn(hidden).to(torch_dtype(dtype))
    want_kernel = CATALOGUE["norm.rms"].reference(request, weight=weight, eps=1e-5)
    for candidate in _serving(device, request):
        kernel = candidate.load()(request, weight=weight, eps=1e-5)
        inputs = [torch.randn(9, hidden).to(torch_dtype(dtype)) for _ in range(1 + has_residual)]
        want = want_kernel(*(x.clone() for x in inputs))
        got = kernel(*(x.clone() for x in inputs))
        pairs = zip(got, want, strict=True) if has_residual else [(got, want)]
        for mine, theirs in pairs:
            _check(mine, theirs, TOLERANCE[dtype], candidate.name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("hidden", [64, 100])
def test_layer_norm(device: DeviceSpec, dtype: str, has_bias: bool, hidden: int) -> None:
    """Against float64, rows off zero."""
    request = LayerNormRequest(
        hidden_size=hidden, has_bias=has_bias, dtype=dtype, tokens=TokenRange(1, 64)
    )
    kind = torch_dtype(dtype)
    weight, bias = (torch.randn(hidden).to(kind) for _ in range(2))
    given = bias if has_bias else None
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    (candidate,) = candidates_for("layer_norm", device)
    assert not candidate.not_supported_reasons(request)
    kernel = candidate.load()(request, weight=weight, eps=1e-5, bias=given)
    for rows in (1, 3, 17):
        x = (torch.randn(rows, hidden) + 2).to(kind)
        wide = None if given is None else given.double()
        want = torch.nn.functional.layer_norm(x.double(), (hidden,), weight.double(), wide, 1e-5)
        got = kernel(x)
        assert got.dtype == kind
        assert float((got.double() - want).abs().max() / want.abs().max()) <= tolerance


def test_layer_norm_of_another_dtype_is_refused_with_both(device: DeviceSpec) -> None:
    request = LayerNormRequest(
        hidden_size=64, has_bias=False, dtype="float64", tokens=TokenRange(1, 64)
    )
    (candidate,) = candidates_for("layer_norm", device)
    (reason,) = candidate.not_supported_reasons(request)
    assert (reason.what, reason.found) == ("dtype", "float64")


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_on_strided_rows(device: DeviceSpec, style: Any, rotary_dim: int) -> None:
    request = RopeRequest(
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=rotary_dim,
        dtype="float32",
        style=style,
        tokens=TOKENS,
    )
    table = torch.randn(50, rotary_dim)
    positions = torch.randint(0, 50, (11,))
    for candidate in _serving(device, request):
        rows = torch.randn(11, 640)
        results = []
        for bind in (candidate.load(), CATALOGUE["rope"].reference):
            copy = rows.clone()
            bind(request, cos_sin_cache=table)(copy[:, :384], copy[:, 384:512], positions)
            results.append(copy)
        _check(results[0], results[1], TOLERANCE["float32"], candidate.name)
        assert torch.equal(results[0][:, 512:], rows[:, 512:])


def test_activation_and_embedding(device: DeviceSpec) -> None:
    gated = GatedActivationRequest(width=97, dtype="float32", tokens=TOKENS)
    x = torch.randn(5, 194) * 4
    want = CATALOGUE["activation.gated"].reference(gated)(x.double())
    for candidate in _serving(device, gated):
        _check(candidate.load()(gated)(x), want, TOLERANCE["float32"], candidate.name)
    gather = EmbeddingRequest(vocab_size=31, hidden_size=48, dtype="float32", tokens=TOKENS)
    table, ids = torch.randn(31, 48), torch.randint(0, 31, (12,))
    for candidate in _serving(device, gather):
        assert torch.equal(candidate.load()(gather, weight=table)(ids), table[ids])


def _paged(lengths: list[int], queries: list[int]) -> tuple[torch.Tensor, AttentionMetadata]:
    blocks = [-(-length // 16) for length in lengths]
    free = torch.randperm(sum(blocks) + 5).int()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        start = sum(blocks[:i])
        table[i, :count] = free[start : start + count]
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    return free, meta


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention(
    device: DeviceSpec, phase: Any, window: int, softcap: float, sinks: bool
) -> None:
    request = AttentionRequest(
        phase=phase,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype="float32",
        kv_dtype="float32",
        window=window,
        softcap=softcap,
        has_sinks=sinks,
        tokens=TOKENS,
    )
    lengths = [1, 16, 47, 130]
    queries = [1] * 4 if phase == "decode" else [1, 16, 5, 77]
    free, meta = _paged(lengths, queries)
    caches = [torch.randn(len(free), 16, 2, 32) for _ in range(2)]
    q = torch.randn(sum(queries), 6 * 32 + 64)[:, : 6 * 32]
    logits = torch.randn(6) if sinks else None
    want = CATALOGUE["attention"].reference(request, scale=0.2, sinks=logits)(q, *caches, meta)
    for candidate in _serving(device, request):
        kernel = candidate.load()(request, scale=0.2, sinks=logits)
        _check(kernel(q, *caches, meta), want, TOLERANCE["float32"], candidate.name)


def test_kv_write_touches_its_slots_only(device: DeviceSpec) -> None:
    request = KvWriteRequest(
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype="float32",
        kv_dtype="float32",
        tokens=TOKENS,
    )
    rows, slots = torch.randn(7, 200), torch.randperm(64)[:7]
    for candidate in _serving(device, request):
        binds: list[Callable[..., Any]] = [candidate.load(), CATALOGUE["kv_write"].reference]
        before = [torch.randn(4, 16, 2, 32) for _ in range(2)]
        results = []
        for bind in binds:
            caches = [cache.clone() for cache in before]
            bind(request)(rows[:, :64], rows[:, 64:128], *caches, slots)
            results.append(caches)
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs), candidate.name


def test_top_k_top_p(device: DeviceSpec) -> None:
    request = TopKTopPRequest(vocab_size=1000, tokens=TOKENS)
    logits = torch.randn(6, 1000) * 3
    top_k = torch.tensor([1, 5, 1000, 40, 1000, 999])
    top_p = torch.tensor([1.0, 0.5, 0.9, 0.2, 1.0, 0.99])
    want = CATALOGUE["sample.top_k_top_p"].reference(request)(logits, top_k, top_p)
    for candidate in _serving(device, request):
        got = candidate.load()(request)(logits, top_k, top_p)
        assert torch.equal(got.isinf(), want.isinf()), candidate.name
        assert torch.equal(got[~got.isinf()], want[~want.isinf()]), candidate.name
