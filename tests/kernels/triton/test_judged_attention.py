"""What limits judge is what is launched, of attention: tiles, warps and types of the compiled form,
of caches of 16 bits and of FP8, and of V4's attention whether one program sees a query's keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import hal_kernels.attention.triton as attention
import hal_kernels.compressed_attention.triton as compressed
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.compressed_attention import CompressedAttentionMetadata, CompressedAttentionRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.request import TokenRange
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS
from hal_kernels.aot.variant import KernelVariant
from hal_kernels.attention import triton_limits as attention_limits
from hal_kernels.attention.triton_tuning import TUNABLE, shape_of
from hal_kernels.compressed_attention import triton_limits as compressed_limits
from hal_kernels.compressed_attention import triton_tuning as compressed_tuning
from hal_kernels.gemm.triton import target_of
from hal_kernels.kv_write.cache_dtypes import fp8_of
from recorded_launches import assert_compiled, assert_types, compiled, recorded

ARCHES = [target.arch for target in TARGETS]
PHASES = ("prefill", "decode")


def attention_requests(arch: str) -> Iterator[AttentionRequest]:
    """Of every compiled size and of some below; of many query heads of a cached head too."""
    sizes = ((32, 32), (64, 64), (64, 128), (96, 64), (128, 128), (256, 256))
    for phase, dtype, is_fp8, (dim, v_dim), heads, window, has_sinks, softcap in itertools.product(
        PHASES, ("bfloat16", "float16"), (False, True), sizes, (8, 60), (0, 100), (False, True),
        (0.0, 30.0),
    ):  # fmt: skip
        if heads > 8 and (phase == "prefill" or window or softcap):
            continue
        yield AttentionRequest(
            phase=phase, num_heads=heads, num_kv_heads=2, head_dim=dim, v_head_dim=v_dim,  # type: ignore[arg-type]
            block_size=16, dtype=dtype, kv_dtype=fp8_of(arch) if is_fp8 else dtype, window=window,
            has_sinks=has_sinks, softcap=softcap, tokens=TokenRange(1, 4),
        )  # fmt: skip


def attend(request: AttentionRequest, device: DeviceSpec) -> None:
    dtype, heads = getattr(torch, request.dtype), request.num_heads
    cached = getattr(torch, request.kv_dtype)
    sinks = torch.zeros(heads, dtype=dtype) if request.has_sinks else None
    starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    meta = AttentionMetadata(starts, lengths, torch.zeros(1, 1).int(), 1, 1)
    caches = [torch.zeros(1, 16, 2, d).to(cached) for d in (request.head_dim, request.v_head_dim)]
    q = torch.zeros(1, heads * request.head_dim, dtype=dtype)
    attention.bind(request, device, scale=1.0, sinks=sinks)(q, *caches, meta)


@pytest.mark.parametrize("arch", ARCHES)
def test_attention(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {phase: f"_attention_{phase}_kernel" for phase in PHASES}
    found = recorded(monkeypatch, (attention,), *functions.values(), "_attention_merge_kernel")
    limits, device = attention_limits.not_supported_reasons, gpu(arch)
    seen: set[tuple[bool, str]] = set()
    for request in attention_requests(arch):
        if limits(request, device):
            continue
        query, *merging = evidence_asked(limits, request, device)
        is_fp8 = request.kv_dtype != request.dtype
        seen.add((is_fp8, request.phase))
        attend(request, device)
        (launched,) = found[functions[request.phase]]
        variant = compiled(query.kernel, arch, query.dtype, query.config)
        check_attention(launched, variant, request)
        assert len(merging) == len(found["_attention_merge_kernel"]) == (request.phase == "decode")
        for asked, merged in zip(merging, found["_attention_merge_kernel"], strict=True):
            variant = compiled(asked.kernel, arch, asked.dtype, asked.config)
            assert_compiled(merged, variant, "HAS_SINKS")
            assert_types(merged, variant, *(() if request.has_sinks else ("sinks_H_ptr",)))
            assert merged["BLOCK_DV"] <= variant.constants["BLOCK_DV"]
        check_class(request, device, launched, query.config)
        for launches in found.values():
            launches.clear()
    assert seen == set(itertools.product((False, True), PHASES))


def check_attention(
    launched: Mapping[str, Any], variant: KernelVariant, request: AttentionRequest
) -> None:
    names = ("BLOCK_H", "BLOCK_M", "BLOCK_N", "SPLIT", "IS_CAUSAL")
    assert_compiled(launched, variant, *(n for n in variant.constants if n in names))
    unused = () if request.has_sinks else ("sinks_H_ptr",)
    assert_types(launched, variant, *unused)
    for name in ("WINDOW", "SOFTCAP", "HAS_SINKS"):  # what is asked for is compiled
        assert not launched.get(name) or variant.constants[name], name
    for name in ("BLOCK_D", "BLOCK_DV"):
        assert launched[name] <= variant.constants[name]


def check_class(
    request: AttentionRequest, device: DeviceSpec, launched: Mapping[str, Any], config: str
) -> None:
    """The class of a request has the judged form's constants as its default; those over caches of
    FP8 and of many heads have none."""
    shape = shape_of(request, device)
    if shape is None:
        assert request.kv_dtype != request.dtype or request.num_heads > 8
        return
    (tunable,) = (t for t in TUNABLE if t.kernel == shape[0])
    default = tunable.default(target_of(device), shape[1])
    assert default.config == config
    assert all(launched[name] == value for name, value in default.configuration.items())


def compressed_requests() -> Iterator[CompressedAttentionRequest]:
    """Of lists of one split and of more, of all entries and of the window alone."""
    rows = (("bf16", "bf16"), ("fp16", "fp16"), ("v4_584", "v4_584"))
    v41 = (("v41_528", "v41_528"), ("v41_528", "fp4_288"))
    mixed = (("bf16", "v4_584"), ("v4_584", "bf16"))  # served where there are no entries
    lists = ((512, 4), (1, 4), (513, 4), (2048, 1), (0, 128), (0, 0))
    for phase, (window, main), (top_k, ratio), has_sinks in itertools.product(
        PHASES, (*rows, *v41, *mixed), lists, (False, True)
    ):
        yield CompressedAttentionRequest(
            phase=phase, num_heads=64, head_dim=512, rope_dim=64, window=128, top_k=top_k,  # type: ignore[arg-type]
            compress_ratio=ratio, has_sinks=has_sinks, window_format=window, main_format=main,  # type: ignore[arg-type]
            block_size=64, dtype="float16" if window == "fp16" else "bfloat16",
            tokens=TokenRange(1, 1),
        )  # fmt: skip


def attend_compressed(request: CompressedAttentionRequest, device: DeviceSpec) -> None:
    dtype, ratio = getattr(torch, request.dtype), request.compress_ratio
    window, main = (
        torch.zeros(1, 64, 512, dtype=dtype)
        if KV_FORMATS[name].is_plain
        else torch.zeros(1, KV_FORMATS[name].page_bytes(64), dtype=torch.uint8)
        for name in (request.window_format, request.main_format)
    )
    table = torch.zeros(1, 1).int()
    meta = CompressedAttentionMetadata(
        query_start_loc=torch.tensor([0, 1]).int(), seq_lens=torch.tensor([1]).int(),
        window_block_table=table, main_block_table=table if ratio else None, max_query_len=1,
        max_seq_len=1,
    )  # fmt: skip
    sinks = torch.zeros(64, dtype=dtype) if request.has_sinks else None
    lists = torch.zeros(1, request.top_k).int() if request.top_k else None
    kernel = compressed.bind(request, device, scale=1.0, sinks=sinks)
    kernel(torch.zeros(1, 64 * 512, dtype=dtype), window, main if ratio else None, meta, lists)


@pytest.mark.parametrize("arch", ARCHES)
def test_compressed_attention(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "compressed_attention.paged": "_compressed_attention_kernel",
        "compressed_attention.v41": "_compressed_attention_v41_kernel",
        "compressed_attention.merge": "_merge_splits_kernel",
    }
    found = recorded(monkeypatch, (compressed,), *functions.values())
    limits, device, seen = compressed_limits.not_supported_reasons, gpu(arch), set()
    for request in compressed_requests():
        if limits(request, device):
            continue
        judged = evidence_asked(limits, request, device)
        attend_compressed(request, device)
        assert sum(map(len, found.values())) == len(judged)
        unused = ("sinks_H_ptr",) if not request.has_sinks else ()
        for query in judged:
            if query.kernel.endswith(".merge") and request.dtype == "float16":
                unused = ("sinks_H_ptr", "out_TD_ptr")  # bfloat16 stands for both
            (launched,) = found[functions[query.kernel]]
            variant = compiled(query.kernel, arch, query.dtype, query.config)
            seen.add((query.kernel, query.config))
            check_compressed(launched, variant, unused)
        shape = compressed_tuning.shape_of(request, device)
        assert (shape is None) == (request.dtype == "float16")
        if shape is not None:
            (tunable,) = (t for t in compressed_tuning.TUNABLE if t.kernel == shape[0])
            assert tunable.default(target_of(device), shape[1]).config == judged[0].config
        for launches in found.values():
            launches.clear()
    assert ("compressed_attention.paged", "bf16-sparse-decode") in seen
    assert ("compressed_attention.v41", "fp4_288-sparse-prefill") in seen


def check_compressed(
    launched: Mapping[str, Any], variant: KernelVariant, unused: tuple[str, ...]
) -> None:
    """All constants but the numbers of an entry's list, of its tokens and of a program's splits."""
    anyhow = ("HEADS", "TOP_K", "RATIO")
    assert_compiled(launched, variant, *(n for n in variant.constants if n not in anyhow))
    if "TOP_K" in variant.constants:
        assert bool(launched["TOP_K"]) == bool(variant.constants["TOP_K"])
    assert_types(launched, variant, *unused)
