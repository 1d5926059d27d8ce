"""Rows that are all zeros, tiny or large, masked whole, or not there, for kernels whose own files
test them over ordinary ones: products, rows per expert, attention over window and entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hal_kernels.attention.triton as triton_attention
import hal_kernels.compressed_attention.triton as triton_compressed
import hal_kernels.gemm.triton as triton_gemm
import hal_kernels.grouped_gemm.triton as triton_grouped
import hal_kernels.rope.triton as triton_rope
from gpu_devices import gpu
from hal.ops import attention, compressed_attention, rope
from hal.ops.formats import FORMATS, quantize_weight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from kernel_errors import assert_exact
from sparse_cases import metadata, paged_rows

# One of zeros, and such as square to more or to less than 16 bits hold.
SIZES = torch.tensor([0.0, 1e-4, 1e-2, 1.0, 1e2, 1e4])[:, None]


def rows_as_multiplied(x: torch.Tensor, name: str, arch: str) -> torch.Tensor:
    """Rows as a product with weights of a format takes them: rounded by groups, or as they are."""
    form = FORMATS[name]
    if form.activation == "float":
        return x.double()
    element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    kind = "ue8m0" if form.activation.startswith("mxfp8") or "ue8m0" in name else "float32"
    group = int(form.group_size or 0)
    values, scales = quantize_groups(x, group_size=group, element=element, scale_kind=kind)
    return dequantize_groups(values, scales, element=element, scale_kind=kind).double()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("bfloat16", "sm_90"),
        ("bfloat16", "gfx1100"),
        ("fp8_block128_a8", "sm_90"),
        ("fp8_block128_a8", "gfx942"),
        ("fp8_block32_ue8m0_a8", "sm_120"),
        ("fp8_block32_ue8m0_a8", "gfx942"),
        ("fp8_block32_ue8m0", "sm_90"),
    ],
)
def test_products(name: str, arch: str) -> None:
    n, k = 48, 256
    weight = torch.randn(n, k) / k**0.5
    stored = weight.bfloat16() if name == "bfloat16" else quantize_weight(weight, FORMATS[name])
    request = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name])
    x = (torch.randn(len(SIZES), k) * SIZES).bfloat16()
    found = triton_gemm.bind(request, gpu(arch), weight=stored)(x)
    wide = stored if isinstance(stored, torch.Tensor) else stored.dequantize()
    assert not found[0].any()
    assert_exact("gemm", found, rows_as_multiplied(x, name, arch) @ wide.double().T)


def test_products_in_float16_up_to_its_largest_number() -> None:
    weight = (torch.randn(48, 80) / 80**0.5).half()
    request = GemmRequest(n=48, k=80, dtype="float16", weight_format=FORMATS["float16"])
    x = (torch.randn(len(SIZES), 80) * SIZES).half()
    found = triton_gemm.bind(request, gpu("sm_90"), weight=weight)(x)
    assert not found[0].any()
    assert_exact("gemm", found, x.double() @ weight.double().T)


@pytest.mark.parametrize(
    ("name", "arch"), [("bfloat16", "sm_90"), ("fp8_block128_a8", "sm_90"), ("mxfp4_a8", "sm_120")]
)
def test_rows_per_expert(name: str, arch: str) -> None:
    """Of the first expert all rows are zeros, the second has none."""
    n, k, count = 40, 128, len(SIZES)
    offsets = torch.tensor([0, 3, 3, 3 + count])
    request = GroupedGemmRequest(
        num_experts=3, experts_per_token=1, n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name]
    )
    wide = [torch.randn(n, k) / k**0.5 for _ in range(3)]
    stored = (
        torch.stack(wide).bfloat16()
        if name == "bfloat16"
        else [quantize_weight(weight, FORMATS[name]) for weight in wide]
    )
    x = torch.cat((torch.zeros(3, k), torch.randn(count, k) * SIZES)).bfloat16()
    found = triton_grouped.bind(request, gpu(arch), weight=stored)(x, offsets)
    last = stored[2] if isinstance(stored, torch.Tensor) else stored[2].dequantize()
    assert not found[:4].any()
    exact = rows_as_multiplied(x[3:], name, arch) @ last.double().T
    assert_exact("grouped_gemm", found[3:], exact)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_window_and_entries_of_sequences_without_tokens_and_lists_of_nothing(phase: str) -> None:
    """Sequences without keys or without queries beside others, and a query whose list is padding
    alone: it sees its window."""
    heads, dim, ratio, top_k = 5, 32, 4, 64
    request = compressed_attention.CompressedAttentionRequest(
        phase=phase,  # type: ignore[arg-type]
        num_heads=heads, head_dim=dim, rope_dim=16, window=9, top_k=top_k, compress_ratio=ratio,
        has_sinks=True, window_format="bf16", main_format="bf16", block_size=16, dtype="bfloat16",
    )  # fmt: skip
    lengths = [(30, 1), (0, 0), (1, 1), (40, 0), (50, 1 if phase == "decode" else 7)]
    window, window_table = paged_rows("bf16", [n for n, _ in lengths], dim, 16)
    main, main_table = paged_rows("bf16", [n // ratio for n, _ in lengths], dim, 16)
    plain = metadata(lengths, window_table)
    meta = compressed_attention.CompressedAttentionMetadata(
        query_start_loc=plain.query_start_loc, seq_lens=plain.seq_lens,
        window_block_table=window_table, main_block_table=main_table,
        max_query_len=plain.max_query_len, max_seq_len=plain.max_seq_len,
    )  # fmt: skip
    tokens = sum(new for _, new in lengths)
    q, sinks = torch.randn(tokens, heads * dim).bfloat16(), torch.randn(heads)
    q[0] = 0.0  # equal weights
    lists = torch.full((tokens, top_k), -1, dtype=torch.int32)
    lists[-1, ::3] = torch.arange(22, dtype=torch.int32) % 12
    lists[-1, 36:] = -1  # each entry once
    kernel = triton_compressed.bind(request, gpu("sm_90"), scale=0.2, sinks=sinks)
    golden = compressed_attention.reference(request, scale=0.2, sinks=sinks.double())
    exact = golden(q.double(), window.double(), main.double(), meta, lists)
    assert_exact("compressed_attention", kernel(q, window, main, meta, lists), exact)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_attention_to_nothing_but_a_sink(phase: str) -> None:
    """A sink that outweighs all keys leaves a row of zeros, as one that masks them would."""
    request = attention.AttentionRequest(
        phase=phase,  # type: ignore[arg-type]
        num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, block_size=16, has_sinks=True,
        dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    lengths = [(20, 1), (33, 1)] if phase == "decode" else [(20, 3), (33, 2)]
    k, table = paged_rows("bf16", [n for n, _ in lengths], 32, 16)
    v = torch.where(k.isnan(), k, torch.randn(k.shape).bfloat16())
    k, v = (cache.unflatten(-1, (2, 16)) for cache in (k, v))
    q = torch.randn(sum(new for _, new in lengths), 64).bfloat16()
    sinks = torch.tensor([1e4, -1e4, float("-inf"), 0.0])
    meta = metadata(lengths, table)
    found = triton_attention.bind(request, gpu("sm_90"), scale=0.25, sinks=sinks)(q, k, v, meta)
    golden = attention.reference(request, scale=0.25, sinks=sinks.double())
    assert_exact("attention", found, golden(q.double(), k.double(), v.double(), meta))
    assert not found.view(-1, 4, 16)[:, 0].any()
    # Without sinks the second and third head are what they are with those that weigh nothing.
    plain = replace(request, has_sinks=False)
    again = triton_attention.bind(plain, gpu("sm_90"), scale=0.25)(q, k, v, meta)
    assert torch.equal(found.view(-1, 4, 16)[:, 1:3], again.view(-1, 4, 16)[:, 1:3])


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_a_rotation_of_zeros_is_zeros(style: str) -> None:
    request = rope.RopeRequest(
        num_heads=2, num_kv_heads=1, head_dim=32, rotary_dim=32,
        style=style, dtype="bfloat16",  # type: ignore[arg-type]
    )  # fmt: skip
    table = torch.randn(9, 32)
    rows = torch.zeros(3, 96).bfloat16()
    kernel = triton_rope.bind(request, gpu("sm_90"), cos_sin_cache=table)
    kernel(rows[:, :64], rows[:, 64:], torch.tensor([0, 4, 8]))
    assert not rows.any()
