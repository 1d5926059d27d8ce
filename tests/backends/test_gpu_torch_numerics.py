"""Accelerators' candidates that need nothing but torch, on torch's CPU device, against float64.

Everything that loads here is run with fresh random input for the shapes that it says it serves;
what computes is the library's code path of a GPU, only on another torch device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import FORMATS, QuantizedWeight, torch_dtype
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, TokenRange
from hal_backends.gpu import torch_elementwise, torch_gemm, torch_latent, torch_sdpa

TOKENS = TokenRange(1, 64)
# Of 8 bits of mantissa, a few roundings, relative to the largest value of the result.
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5}


def device_of(backend: str, arch: str, *features: str) -> DeviceSpec:
    return DeviceSpec(
        device_id="x",
        vendor=backend,
        backend=backend,
        name=arch,
        arch=arch,
        torch_device="cuda",
        features=frozenset(features),
    )


# A platform whose torch is used as it dispatches itself, and one with torch's own variants.
OTHER = device_of("metax", "xcore1000", "matrix.bfloat16")
HOPPER = device_of("nvidia", "sm_90", "matrix.bfloat16", "matrix.fp8_e4m3fn", "matrix.int8")


def serving(candidates: Sequence[KernelCandidate], request: OpRequest) -> list[KernelCandidate]:
    found = [c for c in candidates if c.serves(request)]
    assert found, [(c.name, c.not_supported_reasons(request)) for c in candidates]
    return found


def check(got: torch.Tensor, want: torch.Tensor, dtype: str, what: str) -> None:
    error = (got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1e-6)
    assert error <= TOLERANCE[dtype], (what, float(error))


def paged(lengths: list[int], queries: list[int], size: int) -> tuple[int, AttentionMetadata]:
    blocks = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(blocks) + 3).int()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        start = sum(blocks[:i])
        table[i, :count] = order[start : start + count]
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    return len(order), AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("window", [0, 20])
def test_sdpa_over_pages(dtype: str, phase: Any, window: int) -> None:
    request = AttentionRequest(
        phase=phase,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype=dtype,
        kv_dtype=dtype,
        window=window,
        tokens=TOKENS,
    )
    lengths = [1, 16, 47, 130]
    queries = [1] * 4 if phase == "decode" else [1, 16, 5, 77]
    pages, meta = paged(lengths, queries, 16)
    caches = [torch.randn(pages, 16, 2, 32).to(torch_dtype(dtype)) for _ in range(2)]
    q = torch.randn(sum(queries), 6 * 32).to(torch_dtype(dtype))
    want = CATALOGUE["attention"].reference(request, scale=0.2)(
        q.double(), *(c.double() for c in caches), meta
    )
    candidates = [
        *torch_sdpa.candidates("attention", OTHER),
        # The variants of which torch has one for the CPU.
        *(c for c in torch_sdpa.candidates("attention", HOPPER) if c.name.endswith("math")),
    ]
    for candidate in serving(candidates, request):
        got = candidate.load()(request, scale=0.2)(q, *caches, meta)
        check(got, want, dtype, candidate.name)


def test_limits_of_the_flash_variant() -> None:
    request = AttentionRequest(
        phase="prefill",
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        tokens=TOKENS,
    )
    (flash,) = (c for c in torch_sdpa.candidates("attention", HOPPER) if c.name.endswith("flash"))
    assert flash.serves(request)
    assert [r.what for r in flash.not_supported_reasons(_with(request, window=8))] == ["window"]
    assert [r.what for r in flash.not_supported_reasons(_with(request, head_dim=260))] == [
        "v_head_dim",
        "head_dim",
        "head_dim",
    ]


def _with(request: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(request, **changes)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_656"])
@pytest.mark.parametrize("top_k", [0, 24])
def test_latent_attention(kv_format: Any, top_k: int) -> None:
    from hal.ops.kv_formats import KV_FORMATS, write_rows

    request = MlaAttentionRequest(
        phase="prefill",
        num_heads=4,
        kv_lora_rank=512,
        rope_dim=64,
        block_size=16,
        dtype="bfloat16",
        kv_format=kv_format,
        top_k=top_k,
        tokens=TOKENS,
    )
    lengths, queries = [3, 40, 90], [3, 9, 17]
    pages, meta = paged(lengths, queries, 16)
    rows = torch.randn(pages * 16, 576)
    if kv_format == "bf16":
        cache = rows.view(pages, 16, 576).bfloat16()
        exact: torch.Tensor = cache.double()
    else:
        cache = torch.zeros(pages, KV_FORMATS[kv_format].page_bytes(16), dtype=torch.uint8)
        write_rows(kv_format, cache, 16, torch.arange(pages * 16), rows)
        exact = cache
    q = torch.randn(sum(queries), 4 * 576).bfloat16()
    indices = None
    if top_k:
        indices = torch.stack([torch.randperm(90)[:top_k] for _ in range(len(q))]).int()
        indices[:, -2:] = -1
    reference = CATALOGUE["mla_attention"].reference(request, scale=0.04)
    want = reference(q.double(), exact, meta, indices)
    for candidate in serving(torch_latent.candidates("mla_attention", OTHER), request):
        if candidate.semantic_notes(request):
            assert top_k
            continue
        got = candidate.load()(request, scale=0.04)(q, cache, meta, indices)
        check(got, want, "bfloat16", candidate.name)


def test_dense_for_sparse_is_a_change_of_meaning() -> None:
    notes = {}
    for top_k in (0, 512):
        request = MlaAttentionRequest(
            num_heads=4,
            kv_lora_rank=512,
            rope_dim=64,
            block_size=64,
            dtype="bfloat16",
            kv_format="bf16",
            top_k=top_k,
        )
        for candidate in torch_latent.candidates("mla_attention", OTHER):
            notes[candidate.name.rsplit(".", 1)[1], top_k] = [
                n.name for n in candidate.semantic_notes(request)
            ]
    assert notes["torch_dense", 0] == []
    assert notes["torch_dense", 512] == ["dense_attention_for_sparse"]
    assert notes["torch_listed", 512] == []


@pytest.mark.parametrize("ratio", [0, 4])
def test_compressed_attention(ratio: int) -> None:
    from hal.ops.compressed_attention import (
        CompressedAttentionMetadata,
        CompressedAttentionRequest,
    )

    request = CompressedAttentionRequest(
        phase="prefill",
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        window=24,
        top_k=8 if ratio else 0,
        compress_ratio=ratio,
        has_sinks=True,
        window_format="bf16",
        main_format="bf16",
        block_size=16,
        dtype="bfloat16",
        tokens=TOKENS,
    )
    lengths, queries = [5, 60, 100], [5, 7, 20]
    pages, window = paged(lengths, queries, 16)
    main_pages, main = paged([max(1, n // 4) for n in lengths], queries, 16)
    meta = CompressedAttentionMetadata(
        query_start_loc=window.query_start_loc,
        seq_lens=window.seq_lens,
        window_block_table=window.block_table,
        main_block_table=main.block_table if ratio else None,
        max_query_len=20,
        max_seq_len=100,
    )
    caches = [torch.randn(n, 16, 64).bfloat16() for n in (pages, main_pages)]
    q = torch.randn(sum(queries), 4 * 64).bfloat16()
    sinks = torch.randn(4)
    indices = None
    if ratio:
        indices = torch.stack([torch.randperm(26)[:8] for _ in range(len(q))]).int()
    reference = CATALOGUE["compressed_attention"].reference(request, scale=0.1, sinks=sinks)
    main_cache = caches[1] if ratio else None
    want = reference(
        q.double(),
        caches[0].double(),
        None if main_cache is None else main_cache.double(),
        meta,
        indices,
    )
    for candidate in serving(torch_latent.candidates("compressed_attention", OTHER), request):
        got = candidate.load()(request, scale=0.1, sinks=sinks)(
            q, caches[0], main_cache, meta, indices
        )
        check(got, want, "bfloat16", candidate.name)


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


@pytest.mark.parametrize("name", ["bfloat16", "mxfp4_a8", "fp8_block128_ue8m0_a8"])
def test_products_per_expert(name: str) -> None:
    request = GroupedGemmRequest(
        num_experts=4,
        experts_per_token=2,
        n=128,
        k=128,
        dtype="bfloat16",
        weight_format=FORMATS[name],
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
