"""Triton latent attention in the interpreter against float64, over shuffled pages with NaN."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hal_kernels.mla_attention.triton as triton_mla
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import PLAIN_FORMATS
from hal.ops.mla_attention import MlaAttentionRequest, reference
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.compute_units import compute_units
from hal_kernels.mla_attention.triton_limits import not_supported_reasons
from hal_kernels.mla_attention.triton_variants import count_splits, is_wide, tiles, wide_tiles
from hal_kernels.tuning.tune_device import with_compute_units
from kernel_errors import assert_exact
from sparse_cases import index_lists, metadata, paged_rows

# Heads, latent and rotary values of a row, rows of a page.
SHAPES = {
    "small": (5, 32, 16, 16),
    "no-rope": (17, 24, 0, 16),
    "v3": (3, 512, 64, 64),
    "two-of-32": (40, 48, 16, 16),  # 32 heads a program, and 8 in the last one
    "v3-of-32": (33, 512, 64, 64),
}
WIDE = {
    "wide": (64, 512, 64, 64),
    "wide-48": (64, 48, 16, 16),
    "wide-of-two": (128, 24, 16, 16),
}  # 64 heads a program
SM_90 = find_target("sm_90")


def request_of(shape: str, phase: str, **fields: Any) -> MlaAttentionRequest:
    heads, rank, rope, block_size = (SHAPES | WIDE)[shape]
    defaults: dict[str, Any] = {
        "phase": phase,
        "num_heads": heads,
        "kv_lora_rank": rank,
        "rope_dim": rope,
        "block_size": block_size,
        "dtype": "bfloat16",
        "kv_format": "bf16",
    }
    return MlaAttentionRequest(**(defaults | fields))


def check(
    request: MlaAttentionRequest,
    lengths: list[tuple[int, int]],
    on: str | DeviceSpec = "sm_90",
    **options: Any,
) -> None:
    """Compares one batch of (context with the new tokens, new tokens)."""
    cache, table = paged_rows(
        request.kv_format, [n for n, _ in lengths], request.row_dim, request.block_size, **options
    )
    meta = metadata(lengths, table)
    tokens = sum(new for _, new in lengths)
    dtype = getattr(torch, request.dtype)
    q = torch.randn(tokens, request.num_heads * request.row_dim + 32).to(dtype)[:, 16:-16]
    lists = index_lists(lengths, request.top_k) if request.top_k else None
    device = gpu(on) if isinstance(on, str) else on
    found = triton_mla.bind(request, device, scale=0.1)(q, cache, meta, lists)
    wide = cache.double() if request.kv_format in PLAIN_FORMATS else cache
    exact = reference(request, scale=0.1)(q.double(), wide, meta, lists)
    assert found.dtype == dtype
    # Packed rows are rounded to bfloat16 once more, behind their scales.
    times = 1.0 if request.kv_format in PLAIN_FORMATS else 2.0
    assert_exact("mla_attention", found, exact, times=times)


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize(
    ("shape", "kv_format"),
    [("small", "bf16"), ("no-rope", "bf16"), ("two-of-32", "bf16"), ("v3", "fp8_656")],
)
def test_decode_and_prefill(shape: str, kv_format: str, top_k: int) -> None:
    fields = {"kv_format": kv_format, "top_k": top_k}
    check(request_of(shape, "decode", **fields), [(1, 1), (67, 1), (200, 1)])
    check(request_of(shape, "prefill", **fields), [(5, 5), (70, 2), (4, 0), (1, 1)])


@pytest.mark.parametrize("top_k", [0, 64, 96])
@pytest.mark.parametrize(
    ("shape", "kv_format"), [("wide", "bf16"), ("wide", "fp8_656"), ("wide-48", "bf16")]
)
def test_programs_of_64_heads(shape: str, kv_format: str, top_k: int) -> None:
    fields = {"kv_format": kv_format, "top_k": top_k}
    check(request_of(shape, "decode", **fields), [(1, 1), (67, 1)])
    check(request_of(shape, "prefill", **fields), [(70, 2), (4, 0)])


def test_programs_of_64_heads_in_more_than_one_split() -> None:
    check(request_of("wide-of-two", "decode"), [(530, 1), (3, 1)])
    check(request_of("wide-of-two", "decode", top_k=576), [(550, 1)])


def test_more_than_one_split() -> None:
    check(request_of("small", "decode"), [(1030, 1), (3, 1), (512, 1)])
    check(request_of("small", "decode", top_k=576), [(700, 1), (30, 1)])
    check(request_of("two-of-32", "decode"), [(515, 1), (3, 1)])


@pytest.mark.parametrize("shape", ["small", "wide-of-two"])
def test_splits_that_fill_a_device_are_not_exceeded(shape: str) -> None:
    """Two splits at most, here: the longest sequence has splits of more than 512 keys."""
    small = small_device(shape, splits=2)
    check(request_of(shape, "decode"), [(1237, 1), (3, 1), (1100, 2), (520, 1)], small)
    check(request_of(shape, "decode", top_k=1088), [(1200, 1), (30, 1)], small)


def small_device(shape: str, splits: int) -> DeviceSpec:
    """Of as many multiprocessors as one sequence of the shape fills with so many splits."""
    heads, _, rope, _ = (SHAPES | WIDE)[shape]
    options = wide_tiles("bf16") if is_wide("sm_90", heads, rope) else tiles(SM_90, "bf16", heads)
    blocks = -(-heads // options["BLOCK_H"])
    units = splits * blocks * options["num_warps"] // 8
    assert count_splits(1 << 20, heads, options, units) == splits
    return replace(gpu("sm_90"), attributes={"compute_units": units})


def test_splits_are_as_many_as_fill_a_device_with_one_sequence() -> None:
    options = {"BLOCK_H": 32, "num_warps": 8}
    assert count_splits(0, 128, options, 132) == 1
    assert count_splits(513, 128, options, 132) == 2
    assert count_splits(1 << 20, 128, options, 132) == 33  # 4 blocks of heads
    assert count_splits(1 << 20, 128, options, 0) == 32  # nobody says how large it is
    assert count_splits(1 << 20, 16, {"BLOCK_H": 16, "num_warps": 4}, 132) == 264
    assert count_splits(1 << 20, 128, options, 1) == 1


def test_a_decode_is_tuned_with_the_splits_that_it_is_launched_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a device that states no number of multiprocessors, torch is asked: serving, too."""
    reported = SimpleNamespace(multi_processor_count=20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: reported)
    served = replace(gpu("sm_90"), torch_device="cuda")
    tuned = with_compute_units(served)
    assert tuned.attributes["compute_units"] == 20
    asked: list[int] = []

    def counted(keys: int, heads: int, options: Any, units: int) -> int:
        asked.append(units)
        return count_splits(keys, heads, options, units)

    monkeypatch.setattr(triton_mla, "count_splits", counted)
    for device in (served, tuned, replace(served, attributes={"compute_units": 7})):
        check(request_of("small", "decode"), [(600, 1), (3, 1)], device)
    assert asked == [20, 20, 7]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compute_units(served) == 0
    with pytest.raises(SettingsError, match="without a usable device"):
        with_compute_units(served)


def test_several_new_tokens_in_a_decode() -> None:
    check(request_of("small", "decode", top_k=64), [(40, 3), (9, 1)], "gfx1100")


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_rows_in_chunks_of_columns(arch: str) -> None:
    for kv_format in ("fp8_656", "bf16"):
        check(request_of("v3", "decode", kv_format=kv_format), [(37, 1), (2, 1)], arch)
    check(request_of("v3-of-32", "decode"), [(37, 1), (2, 1)], arch)


@pytest.mark.parametrize("arch", ["sm_120", "gfx942"])
def test_whole_rows_by_programs_of_32_heads(arch: str) -> None:
    check(request_of("v3-of-32", "decode"), [(37, 1), (2, 1)], arch)
    check(request_of("v3-of-32", "prefill", top_k=64), [(70, 2)], arch)


@pytest.mark.parametrize(
    ("kv_format", "heads", "rows"), [("bf16", 16, 16), ("bf16", 17, 32), ("fp8_656", 128, 16)]
)
def test_what_runs_is_what_was_compiled(kv_format: str, heads: int, rows: int) -> None:
    """For every architecture, the limits ask for the variant whose tiles the binding takes."""
    request = request_of("v3", "decode", kv_format=kv_format, num_heads=heads)
    for target in TARGETS:
        query, merge = evidence_asked(not_supported_reasons, request, gpu(target.arch))
        assert merge.kernel == "mla_attention.merge"
        variants = find_kernel("mla_attention.paged").variants(target)
        (variant,) = [v for v in variants if v.config == query.config]
        options = tiles(target, kv_format, heads)
        assert options["BLOCK_H"] == rows
        assert (variant.num_warps, variant.num_stages) == (
            options.pop("num_warps"),
            options.pop("num_stages"),
        )
        assert options.items() <= variant.constants.items()


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize("shape", ["small", "two-of-32", "wide-48"])
def test_float16_rows(shape: str, top_k: int) -> None:
    fields = {"kv_format": "fp16", "dtype": "float16", "top_k": top_k}
    check(request_of(shape, "decode", **fields), [(1, 1), (67, 1)])
    check(request_of(shape, "prefill", **fields), [(70, 2), (4, 0), (1, 1)], "gfx1100")


def test_float16_rows_up_to_the_largest_number() -> None:
    """The sums are in float32, and a mean of values is no larger than they are."""
    request = request_of("small", "decode", kv_format="fp16", dtype="float16")
    cache, table = paged_rows("fp16", [40], request.row_dim, request.block_size)
    cache[..., 0] = torch.finfo(torch.float16).max
    q = torch.randn(1, 5 * request.row_dim).half()
    q.view(5, request.row_dim)[:, 0] = 0.0  # or it decides every weight
    meta = metadata([(40, 1)], table)
    found = triton_mla.bind(request, gpu("sm_90"), scale=0.1)(q, cache, meta)
    exact = reference(request, scale=0.1)(q.double(), cache.double(), meta)
    for columns in (slice(0, 1), slice(1, None)):
        parts = (values.view(5, -1)[:, columns] for values in (found, exact))
        assert_exact("mla_attention", *parts)


@pytest.mark.parametrize(
    ("dtype", "kv_format"), [("float16", "fp8_656"), ("float16", "bf16"), ("bfloat16", "fp16")]
)
def test_rows_of_another_dtype_are_refused(dtype: str, kv_format: str) -> None:
    request = request_of("v3", "decode", dtype=dtype, kv_format=kv_format)
    (reason,) = not_supported_reasons(request, gpu("sm_90"))
    assert reason.what == f"mla_attention.paged: rows for {dtype} queries"
    assert reason.found == kv_format


def test_attention_that_is_not_causal() -> None:
    check(request_of("small", "prefill", is_causal=False), [(20, 4)])
    check(request_of("small", "prefill", is_causal=False, top_k=64), [(20, 4)])


@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
def test_large_and_tiny_rows(magnitude: float) -> None:
    check(request_of("v3", "decode", kv_format="fp8_656"), [(40, 1)], magnitude=magnitude)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_query_that_sees_nothing_is_zero(phase: str) -> None:
    request = request_of("small", phase, top_k=64)
    cache, table = paged_rows("bf16", [9, 9], request.row_dim, 16)
    q = torch.randn(2, 5 * request.row_dim).bfloat16()
    lists = torch.full((2, 64), -1, dtype=torch.int32)
    lists[1, 7], lists[1, 9] = 9, 1 << 20  # beyond the sequence
    kernel = triton_mla.bind(request, gpu("sm_90"), scale=1.0)
    assert not kernel(q, cache, metadata([(9, 1), (9, 1)], table), lists).any()


@pytest.mark.parametrize("shape", ["small", "two-of-32"])
def test_a_sequence_alone_and_in_a_batch_is_the_same_to_the_bit(shape: str) -> None:
    """Also where the batch has more keys than the splits of a device hold 512 of."""
    request = request_of(shape, "decode")
    lengths = [(1500, 1), (40, 1), (1025, 1), (1024, 1), (900, 1)]
    cache, table = paged_rows("bf16", [n for n, _ in lengths], request.row_dim, 16)
    q = torch.randn(5, request.num_heads * request.row_dim).bfloat16()
    kernel = triton_mla.bind(request, small_device(shape, splits=2), scale=0.1)
    together = kernel(q, cache, metadata(lengths, table))
    for i in range(5):
        alone = kernel(q[i : i + 1], cache, metadata(lengths[i : i + 1], table[i : i + 1]))
        assert torch.equal(alone[0], together[i])


def test_no_sequences() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    meta = AttentionMetadata(none, none[:0], none[:0, None], 0, 0)
    for phase in ("decode", "prefill"):
        request = request_of("small", phase)
        kernel = triton_mla.bind(request, gpu("sm_90"), scale=0.1)
        cache = torch.zeros(1, 16, request.row_dim).bfloat16()
        assert kernel(torch.empty(0, 5 * request.row_dim).bfloat16(), cache, meta).shape == (0, 160)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("top_k", [0, 64])
def test_packed_rows_on_rdna_3_spill_nothing(phase: str, top_k: int) -> None:
    """A row is unpacked once for both products there."""
    request = request_of("v3", phase, kv_format="fp8_656", top_k=top_k, num_heads=128)
    assert not not_supported_reasons(request, gpu("gfx1100"))
