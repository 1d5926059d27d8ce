"""Triton writes of packed rows in the interpreter: the very bytes of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hal_kernels.kv_write.triton as triton_kv_write
from gpu_devices import gpu
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS, read_rows
from hal.ops.kv_write import KvWriteRequest, reference
from hal.ops.low_precision import decode_e2m1
from hal.reasons import ReasonKind
from hal_kernels.aot.limits import EvidenceQuery, evidence_asked
from hal_kernels.kv_write.triton_limits import not_supported_reasons

PAGES, BLOCK_SIZE = 3, 16
FORMATS = pytest.mark.parametrize(
    "name", ["fp8_656", "v4_584", "v41_528", "fp8_132", "fp4_288", "fp4_68"]
)


def request_of(name: str, dtype: str = "bfloat16") -> KvWriteRequest:
    return KvWriteRequest(
        phase="decode",
        num_kv_heads=1,
        head_dim=KV_FORMATS[name].dim or 48,
        v_head_dim=0,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        kv_dtype=KV_FORMATS[name].element if KV_FORMATS[name].is_plain else "uint8",
        kv_format=name,
    )


def written(request: KvWriteRequest, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, exact) caches of random bytes, after rows went into shuffled slots of both."""
    size = KV_FORMATS[request.kv_format].page_bytes(BLOCK_SIZE)
    exact = torch.randint(256, (PAGES, size), dtype=torch.uint8)
    found = exact.clone()
    slots = torch.randperm(PAGES * BLOCK_SIZE)[: len(rows)]
    triton_kv_write.bind(request, gpu("sm_80"))(rows, found, slots)
    reference(request)(rows, exact, slots)
    return found, exact


@FORMATS
@pytest.mark.parametrize("magnitude", [1e-38, 1e-6, 1.0, 1e30])
def test_every_byte(name: str, magnitude: float) -> None:
    request = request_of(name)
    rows = torch.randn(7, request.head_dim + 16)[:, : request.head_dim] * magnitude
    # Values of all sizes below the largest of a group, among them ties and denormals.
    rows *= 2.0 ** -torch.randint(24, rows.shape)
    rows[3] = 0.0
    rows[4, ::2] = -0.0
    found, exact = written(request, rows.bfloat16())
    assert torch.equal(found, exact)


@FORMATS
def test_every_code_and_every_middle(name: str) -> None:
    """Groups whose scale is 1: all codes, the middles between them and their neighbours."""
    codes, largest = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), 448.0
    if KV_FORMATS[name].element == "fp4_e2m1":
        codes, largest = decode_e2m1(torch.arange(8, dtype=torch.uint8)), 6.0
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1]), codes))
    request = request_of(name, "float32")
    rows = near[torch.randint(len(near), (7, request.head_dim))]
    rows *= torch.randint(2, rows.shape) * 2 - 1
    group = KV_FORMATS[name].group_size
    rows[:, : KV_FORMATS[name].quantized_dim : group] = largest
    found, exact = written(request, rows)
    assert torch.equal(found, exact)


@FORMATS
def test_a_group_that_is_not_finite_reads_back_as_nan(name: str) -> None:
    request = request_of(name)
    rows = torch.randn(3, request.head_dim)
    rows[0, 5], rows[1, 70] = float("nan"), float("-inf")
    found, exact = written(request, rows.bfloat16())
    slots = torch.arange(PAGES * BLOCK_SIZE)
    read, wanted = (read_rows(name, cache, BLOCK_SIZE, slots) for cache in (found, exact))
    assert torch.equal(read.isnan(), wanted.isnan())
    assert torch.equal(read.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("name", PLAIN_FORMATS)
def test_plain_rows_touch_their_slots_only(name: str) -> None:
    element = KV_FORMATS[name].element
    request, dtype = request_of(name, element), getattr(torch, element)
    exact = torch.randn(PAGES, BLOCK_SIZE, 48).to(dtype)
    found, rows, slots = exact.clone(), torch.randn(5, 48).to(dtype), torch.randperm(40)[:5]
    triton_kv_write.bind(request, gpu("sm_80"))(rows, found, slots)
    reference(request)(rows, exact, slots)
    assert torch.equal(found, exact)


def test_plain_rows_are_judged_by_the_code_of_their_format() -> None:
    """Whatever dtype is named beside the format."""
    for kv_dtype in ("uint8", "float16"):
        request = replace(request_of("fp16", "float16"), kv_dtype=kv_dtype)
        assert evidence_asked(not_supported_reasons, request, gpu("sm_80")) == (
            EvidenceQuery("kv_write.dense", "float16", "row1024"),
        )
    request = replace(request_of("bf16"), kv_dtype="uint8")
    (asked,) = evidence_asked(not_supported_reasons, request, gpu("sm_80"))
    assert asked == EvidenceQuery("kv_write.dense", "bfloat16", "row1024")
    # A cast that nothing was compiled of.
    request = replace(request, kv_format="", kv_dtype="float16")
    (reason,) = not_supported_reasons(request, gpu("sm_80"))
    assert (reason.kind, reason.found) == (ReasonKind.MISSING, "float16")


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype", "is_served"),
    [
        ("sm_90", "bfloat16", "float8_e4m3fn", True),
        ("sm_90", "float16", "float8_e4m3fn", True),
        ("sm_90", "float32", "float8_e4m3fn", False),
        ("sm_90", "bfloat16", "float8_e4m3fnuz", False),
        ("gfx942", "bfloat16", "float8_e4m3fnuz", True),
        ("sm_80", "bfloat16", "float8_e4m3fn", True),
        ("gfx1100", "float16", "float8_e4m3fn", True),
        ("gfx90a", "bfloat16", "float8_e4m3fnuz", False),
        ("sm_80", "float32", "float32", True),
    ],
)
def test_caches_that_were_compiled(
    arch: str, dtype: str, kv_dtype: str, *, is_served: bool
) -> None:
    request = replace(request_of("fp16", dtype), kv_format="", kv_dtype=kv_dtype)
    assert (not not_supported_reasons(request, gpu(arch))) == is_served


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx90a", "gfx1100"])
def test_dense_caches_of_fp8(arch: str, *, has_scales: bool) -> None:
    """To the bit what the reference writes, with the architecture's type or without: codes, the
    middles between them, their neighbours in float16, what is too large, and NaN."""
    request = replace(
        request_of("fp16", "float16"), kv_format="", kv_dtype="float8_e4m3fn",
        num_kv_heads=2, head_dim=24, v_head_dim=24, has_scales=has_scales,
    )  # fmt: skip
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).half()
    middles = (codes[1:] + codes[:-1]) / 2
    infinite = torch.tensor([float("inf")], dtype=torch.float16)
    near = torch.cat((middles, middles.nextafter(infinite), middles.nextafter(-infinite), codes))
    near = torch.cat((near, torch.tensor([460.0, 6e4, float("nan")], dtype=torch.float16)))
    k, v = (near[torch.randint(len(near), (7, 48))] for _ in range(2))
    k *= torch.randint(2, k.shape) * 2 - 1
    slots = torch.randperm(PAGES * BLOCK_SIZE)[:7]
    found = [torch.zeros(PAGES, BLOCK_SIZE, 2, 24).to(torch.float8_e4m3fn) for _ in range(2)]
    exact = [cache.clone() for cache in found]
    scales = {"k_scale": 0.37, "v_scale": 1.9} if has_scales else {}
    triton_kv_write.bind(request, gpu(arch), **scales)(k, v, *found, slots)
    reference(request, **scales)(k, v, *exact, slots)
    for got, want in zip(found, exact, strict=True):
        assert torch.equal(got.view(torch.uint8) & 0x7F, want.view(torch.uint8) & 0x7F)
        assert torch.equal(got.float().nan_to_num(), want.float().nan_to_num())
