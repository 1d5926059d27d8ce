"""Accelerators' products and elementwise candidates that need nothing but torch, on torch's CPU
device, against float64, with fresh random input for the shapes that they say they serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.ops import CATALOGUE
from hal.ops.activation import GatedActivationRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import FORMATS, QuantizedWeight, torch_dtype
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest
from hal_backends.gpu import torch_elementwise, torch_gemm
from torch_cases import HOPPER, OTHER, TOKENS, check, serving


def weight_of(name: str, n: int, k: int) -> torch.Tensor | QuantizedWeight:
    """A random weight in a format, rounded by the op's own rules where it is FP8 or FP4."""
    from hal.ops.low_precision import quantize_groups

    stored = FORMATS[name]
    if stored.is_dense:
        return torch.randn(n, k).to(torch_dtype(name))
    if stored.element == "int":
        group = stored.group_size or k
        scale = (torch.rand(n, k // group) * 0.02 + 0.001).to(torch_dtype(stored.scale_dtype))
        scale = scale if stored.group_size else scale.view(n)
        data = (
            torch.randint(-127, 128, (n, k), dtype=torch.int8)
            if stored.bits == 8
            else torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        )
        minimum = None if stored.is_symmetric else torch.randn(scale.shape).to(scale) * 0.05
        return QuantizedWeight(format=stored, data=data, scale=scale, minimum=minimum)
    data, scale = quantize_groups(
        torch.randn(n, k),
        group_size=stored.group_size or 0,
        element=stored.element,
        scale_kind=stored.scale_dtype,
    )
    # One scale for the rows of a block; the values are what data and scale say together.
    scale = scale[:: stored.block_n] if stored.group_size else scale.view(n)
    return QuantizedWeight(format=stored, data=data, scale=scale)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
def test_products(name: str, epilogue: Any) -> None:
    dtype = name if FORMATS[name].is_dense else "bfloat16"
    request = GemmRequest(
        n=128, k=256, dtype=dtype, weight_format=FORMATS[name], epilogue=epilogue, tokens=TOKENS
    )
    weight = weight_of(name, 128, 256)
    reference = CATALOGUE["gemm"].reference(request, weight=weight)
    for candidate in serving(torch_gemm.candidates("gemm", OTHER), request):
        kernel = candidate.load()(request, weight=weight)
        for rows in (1, 5, 40):
            x = torch.randn(rows, 256).to(torch_dtype(dtype))
            check(kernel(x), reference(x.double()), dtype, candidate.name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["dense", "fp8_block128_ue8m0_a8"])
def test_a_float32_result_is_not_rounded_before(dtype: str, name: str) -> None:
    """A router's scores in bfloat16 choose other experts: no candidate may round them."""
    name = dtype if name == "dense" else name
    request = GemmRequest(
        n=128, k=256, dtype=dtype, weight_format=FORMATS[name], out_dtype="float32", tokens=TOKENS
    )
    weight = weight_of(name, 128, 256)
    x = torch.randn(9, 256).to(torch_dtype(dtype))
    exact = CATALOGUE["gemm"].reference(request, weight=weight)(x.double())
    served = serving(torch_gemm.candidates("gemm", OTHER), request)
    assert served
    for candidate in served:
        found = candidate.load()(request, weight=weight)(x)
        assert found.dtype == torch.float32
        error = ((found - exact).abs() / exact.abs().clamp(min=1.0)).max()
        assert error < 1e-4, (candidate.name, error)  # bfloat16 alone would be at 4e-3


def test_cublas_is_asked_for_a_float32_result(monkeypatch: pytest.MonkeyPatch) -> None:
    request = GemmRequest(
        n=128,
        k=256,
        dtype="bfloat16",
        weight_format=FORMATS["bfloat16"],
        out_dtype="float32",
        tokens=TOKENS,
    )
    device = dataclasses.replace(OTHER, backend="nvidia", software={"torch": "2.13.0"})
    served = serving(torch_gemm.candidates("gemm", device), request)
    (candidate,) = [c for c in served if c.name.endswith("torch_mm_float32")]
    asked: dict[str, Any] = {}

    def mm(x: torch.Tensor, columns: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.update(options)
        return x.float() @ columns.float()

    monkeypatch.setattr(torch, "mm", mm)
    weight = weight_of("bfloat16", 128, 256)
    assert isinstance(weight, torch.Tensor)
    x = torch.randn(3, 256).bfloat16()
    found = candidate.load()(request, weight=weight)(x)
    assert asked == {"out_dtype": torch.float32}
    torch.testing.assert_close(found, x.float() @ weight.float().t())
    older = dataclasses.replace(device, software={"torch": "2.7.1"})
    names = [c.name for c in serving(torch_gemm.candidates("gemm", older), request)]
    assert "nvidia.gemm.torch_linear_in_float32" in names
    assert not [name for name in names if "torch_mm" in name or name.endswith("torch_linear")]


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if not f.is_dense])
def test_widened_operands_are_exact_where_nothing_is_noted(name: str) -> None:
    """Without a note, both operands in bfloat16 are the very values that the format says."""
    from hal.ops.gemm import quantize_rows
    from hal.ops.low_precision import round_activations

    stored = FORMATS[name]
    request = GemmRequest(n=128, k=256, dtype="bfloat16", weight_format=stored, tokens=TOKENS)
    weight = weight_of(name, 128, 256)
    assert isinstance(weight, QuantizedWeight)
    exact = weight.dequantize()
    x = torch.randn(9, 256).bfloat16() * 3
    rows = x.float()
    if stored.activation == "int8_per_token":
        values, scale = quantize_rows(rows)
        rows = values * scale
    elif stored.activation != "float":
        rows = round_activations(rows, stored.activation)
    notes = {n.name for n in torch_gemm.dequantize_notes(request)}
    is_kept = {
        "rounded_weights": torch.equal(exact.bfloat16().float(), exact),
        "rounded_activations": torch.equal(rows.bfloat16().float(), rows),
    }
    for note, kept in is_kept.items():
        assert kept or note in notes, (name, note)


def test_row_wise_fp8_product() -> None:
    request = GemmRequest(
        n=64, k=128, dtype="bfloat16", weight_format=FORMATS["fp8_channel_a8"], tokens=TOKENS
    )
    weight = weight_of("fp8_channel_a8", 64, 128)
    (candidate,) = (c for c in torch_gemm.candidates("gemm", HOPPER) if c.name.endswith("rowwise"))
    assert candidate.serves(request)
    kernel = candidate.load()(request, weight=weight)
    reference = CATALOGUE["gemm"].reference(request, weight=weight)
    x = torch.randn(33, 128).bfloat16()
    check(kernel(x), reference(x.double()), "bfloat16", candidate.name)


@pytest.mark.parametrize("clamp", [0.0, 0.5], ids=["plain", "gated-clamped"])
@pytest.mark.parametrize("name", ["bfloat16", "mxfp4_a8", "fp8_block128_ue8m0_a8"])
def test_products_per_expert(name: str, clamp: float) -> None:
    request = GroupedGemmRequest(
        num_experts=4,
        experts_per_token=2,
        n=128,
        k=128,
        dtype="bfloat16",
        weight_format=FORMATS[name],
        epilogue="silu_gated" if clamp else "none",
        clamp=clamp,
        tokens=TOKENS,
    )
    weights = [weight_of(name, 128, 128) for _ in range(4)]
    given = torch.stack(weights) if FORMATS[name].is_dense else weights  # type: ignore[arg-type]
    offsets = torch.tensor([0, 3, 3, 10, 17])
    x = torch.randn(17, 128).bfloat16()
    reference = CATALOGUE["grouped_gemm"].reference(request, weight=given)
    want = reference(x.double(), offsets)
    for candidate in serving(torch_gemm.candidates("grouped_gemm", OTHER), request):
        got = candidate.load()(request, weight=given)(x, offsets)
        check(got, want, "bfloat16", candidate.name)


ELEMENTWISE: list[tuple[OpRequest, dict[str, Any], Callable[[], tuple[Any, ...]]]] = [
    (
        RmsNormRequest(hidden_size=96, dtype="bfloat16", tokens=TOKENS),
        {"weight": torch.rand(96).bfloat16() + 0.5, "eps": 1e-5},
        lambda: (torch.randn(7, 96).bfloat16(),),
    ),
    (
        RmsNormRequest(hidden_size=32, dtype="bfloat16", rows_per_token=3, tokens=TOKENS),
        {"weight": torch.rand(32).bfloat16() + 0.5, "eps": 1e-5},
        lambda: (torch.randn(7, 96).bfloat16(),),
    ),
    (
        RmsNormRequest(hidden_size=96, dtype="bfloat16", has_residual=True, tokens=TOKENS),
        {"weight": torch.rand(96).bfloat16() + 0.5, "eps": 1e-5},
        lambda: (torch.randn(7, 96).bfloat16(), torch.randn(7, 96).bfloat16()),
    ),
    (
        LayerNormRequest(hidden_size=64, has_bias=True, dtype="bfloat16", tokens=TOKENS),
        {
            "weight": torch.rand(64).bfloat16() + 0.5,
            "bias": torch.randn(64).bfloat16(),
            "eps": 1e-5,
        },
        lambda: (torch.randn(7, 64).bfloat16(),),
    ),
    (
        GatedActivationRequest(width=48, dtype="bfloat16", clamp=1.5, tokens=TOKENS),
        {},
        lambda: (torch.randn(7, 96).bfloat16() * 3,),
    ),
    (
        EmbeddingRequest(vocab_size=31, hidden_size=48, dtype="bfloat16", tokens=TOKENS),
        {"weight": torch.randn(31, 48).bfloat16()},
        lambda: (torch.randint(0, 31, (9,)),),
    ),
]


@pytest.mark.parametrize(
    ("request_", "static", "inputs"), ELEMENTWISE, ids=lambda v: getattr(v, "op", "")
)
def test_elementwise(request_: Any, static: Any, inputs: Any) -> None:
    given = inputs()
    want = CATALOGUE[request_.op].reference(request_, **static)(
        *(x.double() if x.is_floating_point() else x for x in given)
    )
    for candidate in serving(torch_elementwise.candidates(request_.op, OTHER), request_):
        got = candidate.load()(request_, **static)(*(x.clone() for x in given))
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for mine, theirs in pairs:
            check(mine, theirs, "bfloat16", candidate.name)


def test_kv_write_touches_its_slots_only() -> None:
    request = KvWriteRequest(
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=16,
        block_size=16,
        dtype="bfloat16",
        kv_dtype="float16",
        tokens=TOKENS,
    )
    rows, slots = torch.randn(7, 200).bfloat16(), torch.randperm(64)[:7]
    before = [torch.randn(4, 16, 2, d).half() for d in (32, 16)]
    results = []
    candidates = serving(torch_elementwise.candidates("kv_write", OTHER), request)
    binds: list[Callable[..., Any]] = [c.load() for c in candidates]
    for bind in (*binds, CATALOGUE["kv_write"].reference):
        caches = [cache.clone() for cache in before]
        bind(request)(rows[:, :64], rows[:, 64:96], *caches, slots)
        results.append(caches)
    for mine in results[:-1]:
        for got, want in zip(mine, results[-1], strict=True):
            assert torch.equal(got, want)
