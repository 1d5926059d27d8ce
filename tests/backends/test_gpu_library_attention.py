"""How candidates call attention libraries, against stand-ins with the libraries' signatures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fake_libraries as fake
from hal.candidates import KernelCandidate
from hal.ops.attention import AttentionMetadata, AttentionRequest, reference
from hal.ops.kv_write import rounded_to_cache
from hal.ops.request import TokenRange
from hal_backends.ascend import npu_attention
from hal_backends.cambricon import mlu_ops
from hal_backends.gpu import flash_attention, flashinfer_attention
from library_cases import close, device, one


def request_of(phase: Any, size: int, **more: Any) -> AttentionRequest:
    sizes = {"num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    given: dict[str, Any] = {**sizes, "kv_dtype": "bfloat16", **more}
    return AttentionRequest(
        phase=phase,
        num_heads=4,
        block_size=size,
        dtype="bfloat16",
        tokens=TokenRange(1, 64),
        **given,
    )


def step(phase: str, size: int) -> tuple[AttentionMetadata, int, int]:
    """(metadata, tokens, pages) of three sequences over shuffled pages."""
    lengths = [5, size, 2 * size + 7]
    queries = [1, 1, 1] if phase == "decode" else [5, 9, 33]
    blocks = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(blocks) + 2).int()
    table = torch.zeros(3, max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        table[i, :count] = order[sum(blocks[:i]) :][:count]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    return meta, sum(queries), len(order)


def compare(candidate: KernelCandidate, request: AttentionRequest) -> None:
    assert candidate.serves(request), candidate.not_supported_reasons(request)
    kernel = candidate.load()(request, scale=0.17)
    for _ in range(2):  # a second step with other pages
        meta, tokens, pages = step(request.phase, request.block_size)
        q = torch.randn(tokens, request.num_heads * request.head_dim).bfloat16()
        shape = (pages, request.block_size, request.num_kv_heads, request.head_dim)
        caches = [torch.randn(shape).bfloat16() for _ in range(2)]
        got = kernel(q, *caches, meta)
        want = reference(request, scale=0.17)(q.double(), *(c.double() for c in caches), meta)
        close(got, want, candidate.name)


FORMS = [{}, {"window": 17}, {"softcap": 20.0}]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_flash_attention(phase: str, form: dict[str, Any]) -> None:
    found = flash_attention.candidates("attention", device("nvidia", "sm_90"))
    with fake.installed(
        flash_attn={"flash_attn_varlen_func": fake.flash_attn_varlen_func},
        flash_attn_interface={"flash_attn_with_kvcache": fake.flash_attn_with_kvcache},
    ):
        compare(one(found, "flash_attention_2"), request_of(phase, 256, **form))
        compare(one(found, "flash_attention_3"), request_of(phase, 16, **form))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("interface", ["fa2", "vllm", "fa3"])
def test_a_vendors_build(phase: str, interface: Any) -> None:
    def vllm_form(q: Any, k: Any, v: Any, *, seqused_k: torch.Tensor, **more: Any) -> torch.Tensor:
        ends = torch.tensor([0, *seqused_k.cumsum(0).tolist()])
        return fake.flash_attn_varlen_func(q, k, v, cu_seqlens_k=ends, **more)

    build = flash_attention.VendorBuild(
        distribution="flash-attn",
        tag="+metax",
        install="the vendor's wheel",
        module="vendor_flash",
        interface=interface,
    )
    metax = device("metax", "xcore1000")
    (plain,) = flash_attention.vendor_build(build)("attention", metax)
    wanted = request_of(phase, 256)
    assert [r.what for r in plain.not_supported_reasons(wanted)] == ["software"]
    own = dataclasses.replace(metax, software={"flash-attn": "2.6.3+metax3.8.1"})
    (candidate,) = flash_attention.vendor_build(build)("attention", own)
    varlen = vllm_form if interface == "vllm" else fake.flash_attn_varlen_func
    with fake.installed(
        vendor_flash={
            "flash_attn_varlen_func": varlen,
            "flash_attn_with_kvcache": fake.flash_attn_with_kvcache,
        }
    ):
        compare(candidate, wanted)
    reasons = candidate.not_supported_reasons(request_of(phase, 64))
    assert [r.kind.value for r in reasons] == ["unverified"]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_flashinfer(form: dict[str, Any]) -> None:
    found = flashinfer_attention.candidates("attention", device("nvidia", "sm_120"))
    with fake.installed(
        flashinfer__decode={"BatchDecodeWithPagedKVCacheWrapper": fake.DecodeWrapper},
        flashinfer__prefill={"BatchPrefillWithPagedKVCacheWrapper": fake.PrefillWrapper},
    ):
        for phase in ("prefill", "decode"):
            compare(one(found, f"flashinfer_{phase}"), request_of(phase, 16, **form))


def test_flashinfer_over_a_cache_with_scales() -> None:
    """The cache holds keys and values divided by a scale each, as `kv_write` writes them."""
    found = flashinfer_attention.candidates("attention", device("nvidia", "sm_120"))
    scales = {"k_scale": 0.03, "v_scale": 0.4}
    fields = {"kv_dtype": "float8_e4m3fn", "has_kv_scales": True}
    with fake.installed(
        flashinfer__decode={"BatchDecodeWithPagedKVCacheWrapper": fake.DecodeWrapper},
        flashinfer__prefill={"BatchPrefillWithPagedKVCacheWrapper": fake.PrefillWrapper},
    ):
        for phase in ("prefill", "decode"):
            request = request_of(phase, 16, **fields)
            candidate = one(found, f"flashinfer_{phase}")
            assert candidate.serves(request)
            kernel = candidate.load()(request, scale=0.17, **scales)
            meta, tokens, pages = step(phase, request.block_size)
            q = torch.randn(tokens, request.num_heads * request.head_dim).bfloat16()
            shape = (pages, request.block_size, request.num_kv_heads, request.head_dim)
            exact = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
            caches = [
                rounded_to_cache(x, torch.float8_e4m3fn, scale)
                for x, scale in zip(exact, scales.values(), strict=True)
            ]
            want = reference(request, scale=0.17, **scales)(q.double(), *caches, meta)
            close(kernel(q, *caches, meta), want, candidate.name)
            # And what was written, to within the steps of the cache.
            plain = dataclasses.replace(request, kv_dtype="float64", has_kv_scales=False)
            read = [c.double() * s for c, s in zip(caches, scales.values(), strict=True)]
            same = reference(plain, scale=0.17)(q.double(), *read, meta)
            assert torch.allclose(want, same, atol=1e-9)
            with pytest.raises(ValueError, match="k_scale a positive number"):
                candidate.load()(request, scale=0.17, k_scale=-1.0)


def test_ascend() -> None:
    found = npu_attention.candidates("attention", device("ascend", "ascend-910b"))
    functions = {"npu_fused_infer_attention_score": fake.npu_fused_infer_attention_score}
    with fake.installed(torch_npu=functions):
        compare(one(found, "npu_fused_infer_attention_score"), request_of("decode", 128))
        compare(one(found, "npu_fused_infer_attention_score_tnd"), request_of("prefill", 128))


def test_cambricon_in_decode() -> None:
    def attention(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        k_scale: None,
        v_scale: None,
        alibi_slopes: None,
        max_context: int,
        left: int,
        right: int,
        scale: float,
    ) -> None:
        """torch_mlu_ops: caches [blocks, heads, block_size, head_dim], the result in `out`."""
        assert max_context == int(context_lens.max())
        for i, length in enumerate(context_lens.tolist()):
            k, v = (
                fake.pages_of(c.transpose(1, 2), block_tables[i], length)
                for c in (k_cache, v_cache)
            )
            out[i] = fake.attend(q[i], k, v, scale, causal=False)

    found = mlu_ops.candidates("attention", device("cambricon", "mtp_592"))
    candidate = one(found, "single_query_cached_kv_attn")
    with fake.installed(torch_mlu_ops={"single_query_cached_kv_attn": attention}):
        compare(candidate, request_of("decode", 16, num_kv_heads=1))
    reasons = candidate.not_supported_reasons(request_of("decode", 16))
    assert [r.what for r in reasons] == ["cache layout"]


def test_a_library_that_is_not_there_is_named() -> None:
    found = flash_attention.candidates("attention", device("nvidia", "sm_90"))
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        one(found, "flash_attention_2").load()
