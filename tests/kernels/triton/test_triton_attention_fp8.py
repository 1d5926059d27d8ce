"""Triton attention over dense caches of e4m3 in the interpreter, with the architecture's type and
with its bits as integers, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hal_kernels.attention.triton as triton_attention
import hal_kernels.attention_projection.triton_limits as projection_limits
import hal_kernels.kv_write.triton as triton_kv_write
from gpu_devices import gpu
from hal.ops.attention import AttentionMetadata, AttentionRequest, reference
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.kv_write import KvWriteRequest
from hal.reasons import ReasonKind
from hal_kernels.attention.triton_limits import not_supported_reasons
from hal_kernels.attention.triton_tuning import shape_of
from hal_kernels.kv_write.cache_dtypes import fp8_of
from kernel_errors import assert_exact

ARCHES = pytest.mark.parametrize("arch", ["sm_90", "gfx942", "sm_80", "gfx1100"])
SCALES = {"k_scale": 0.37, "v_scale": 2.1}


def request_of(arch: str, phase: str, **fields: Any) -> AttentionRequest:
    defaults: dict[str, Any] = {
        "phase": phase,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "block_size": 16,
        "dtype": "bfloat16",
        "kv_dtype": fp8_of(arch),
    }
    return AttentionRequest(**(defaults | fields))


@ARCHES
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "fields",
    [
        {"has_kv_scales": True},
        {"dtype": "float16"},
        {"has_kv_scales": True, "window": 20, "has_sinks": True},
        {"has_kv_scales": True, "softcap": 5.0, "dtype": "float16"},
        {"window": 33, "softcap": 5.0},
        {"num_heads": 40},
    ],
    ids=["plain", "unscaled", "window", "softcap", "window-softcap", "20-heads"],
)
def test_caches_of_fp8(
    attention_cases: SimpleNamespace, arch: str, phase: str, fields: dict[str, Any]
) -> None:
    request = request_of(arch, phase, **fields)
    lengths, new = ([1, 17, 530], [1] * 3) if phase == "decode" else ([5, 70, 33], [5, 67, 2])
    dtype, heads = getattr(torch, request.dtype), request.num_heads
    q, k, v, meta = attention_cases.paged(lengths, new, (heads, 2), 64, 16, dtype)
    k, v = (cache.to(getattr(torch, request.kv_dtype)) for cache in (k, v))
    static: dict[str, Any] = dict(SCALES) if request.has_kv_scales else {}
    sinks = torch.randn(heads).to(dtype) if request.has_sinks else None
    kernel = triton_attention.bind(request, gpu(arch), scale=0.125, sinks=sinks, **static)
    found = kernel(q, k, v, meta)
    golden = reference(
        request, scale=0.125, sinks=None if sinks is None else sinks.double(), **static
    )
    assert found.dtype == dtype
    assert_exact("attention", found, golden(q.double(), k.double(), v.double(), meta))


@ARCHES
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code_is_read_as_it_is(arch: str, phase: str, dtype: str) -> None:
    """Of one key a query's result is its value, whatever the score: also NaN."""
    request = request_of(arch, phase, num_heads=4, num_kv_heads=4, dtype=dtype)
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256)].view(1, 1, 4, 64)
    values = torch.zeros(1, 16, 4, 64, dtype=torch.uint8)
    values[:, :1] = codes
    cache = values.view(getattr(torch, request.kv_dtype))
    starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    meta = AttentionMetadata(starts, lengths, torch.zeros(1, 1).int(), 1, 1)
    kernel = triton_attention.bind(request, gpu(arch), scale=0.125)
    keys = torch.zeros(1, 16, 4, 64).to(cache.dtype)
    found = kernel(torch.randn(1, 256).to(getattr(torch, dtype)), keys, cache, meta)
    want = cache[0, 0].reshape(256).float()
    assert torch.equal(found[0].float().isnan(), want.isnan())
    assert torch.equal(found[0].float().nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_what_was_written_is_read(arch: str) -> None:
    """Keys and values of a prompt, rounded into their slots and attended over: as far from those
    that were not rounded as e4m3's half step."""
    tokens, device = 40, gpu(arch)
    k, v = (torch.randn(tokens, 2 * 64).bfloat16() for _ in range(2))
    write = KvWriteRequest(
        phase="prefill", num_kv_heads=2, head_dim=64, v_head_dim=64, block_size=16,
        dtype="bfloat16", kv_dtype=fp8_of(arch), has_scales=True,
    )  # fmt: skip
    table = torch.randperm(3).to(torch.int32)
    at = torch.arange(tokens)
    slots = table.long()[at // 16] * 16 + at % 16
    empty = torch.full((3, 16, 2, 64), float("nan"))
    caches = [empty.to(getattr(torch, write.kv_dtype)) for _ in range(2)]
    scales: dict[str, Any] = {"k_scale": 0.01, "v_scale": 0.02}
    k_cache, v_cache = caches
    triton_kv_write.bind(write, device, **scales)(k, v, k_cache, v_cache, slots)
    request = request_of(arch, "prefill", has_kv_scales=True)
    q = torch.randn(tokens, 6 * 64).bfloat16()
    starts, lengths = torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
    meta = AttentionMetadata(starts, lengths, table[None], tokens, tokens)
    attend = triton_attention.bind(request, device, scale=0.125, **scales)
    found = attend(q, k_cache, v_cache, meta)
    plain = [torch.zeros(48, 2, 64, dtype=torch.float64) for _ in range(2)]
    for cache, rows in zip(plain, (k, v), strict=True):
        cache[slots] = rows.double().view(tokens, 2, 64)
    exact = reference(request_of(arch, "prefill", kv_dtype="bfloat16"), scale=0.125)(
        q.double(), *(cache.view(3, 16, 2, 64) for cache in plain), meta
    )
    error = (found.double() - exact).norm() / exact.norm()
    assert 0.0 < error < 2.0**-4


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "is_served"),
    [
        ("sm_80", "float8_e4m3fn", True),
        ("gfx90a", "float8_e4m3fn", True),
        ("gfx1201", "float8_e4m3fn", True),
        ("gfx942", "float8_e4m3fnuz", True),
        ("gfx942", "float8_e4m3fn", False),
        ("sm_90", "float8_e5m2", False),
        ("sm_90", "float16", False),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_is_offered(phase: str, arch: str, kv_dtype: str, *, is_served: bool) -> None:
    request = request_of(arch, phase, kv_dtype=kv_dtype)
    reasons = not_supported_reasons(request, gpu(arch))
    assert [r.kind for r in reasons] == ([] if is_served else [ReasonKind.MISSING])


def test_many_heads_in_other_forms_are_refused() -> None:
    for fields in ({"window": 64}, {"has_sinks": True}, {"softcap": 30.0}):
        request = request_of("sm_90", "decode", num_heads=34, **fields)
        (reason,) = not_supported_reasons(request, gpu("sm_90"))
        assert (reason.found, reason.kind) == ("17", ReasonKind.ARGUMENT)
        few = request_of("sm_90", "decode", num_heads=32, **fields)
        assert not not_supported_reasons(few, gpu("sm_90"))


def test_tiles_of_fp8_are_not_chosen_by_measurements_of_16_bits() -> None:
    assert shape_of(request_of("sm_90", "decode"), gpu("sm_90")) is None


def test_the_projection_behind_attention_reads_no_fp8() -> None:
    request = AttentionProjectionRequest(
        phase="decode", num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, block_size=16,
        dtype="bfloat16", kv_dtype="float8_e4m3fn", hidden_size=256,
    )  # fmt: skip
    (reason,) = projection_limits.not_supported_reasons(request, gpu("sm_90"))
    assert (reason.what, reason.kind) == ("attention_projection: kv_dtype", ReasonKind.MISSING)


def test_scales_that_the_request_does_not_have() -> None:
    with pytest.raises(ValueError, match="attention: required"):
        triton_attention.bind(request_of("sm_90", "decode"), gpu("sm_90"), scale=1.0, k_scale=2.0)
