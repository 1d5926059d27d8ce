"""How candidates call libraries of quantised products, against stand-ins; layouts of weights."""

from __future__ import annotations

import pytest
import torch

import fake_latent as latent
import fake_libraries as fake
from hal.ops import CATALOGUE
from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.low_precision import quantize_groups
from hal.ops.request import TokenRange
from hal_backends.ascend import npu_ops
from hal_backends.gpu import aiter, deep_gemm, sgl_kernel_ops
from hal_backends.gpu.torch_gemm_loaders import as_kind, swizzled_scales
from library_cases import CDNA4, HOPPER, close, device, one

TOKENS = TokenRange(1, 64)


def fp8_weight(name: str, n: int, k: int) -> QuantizedWeight:
    stored = FORMATS[name]
    data, scale = quantize_groups(
        torch.randn(n, k), group_size=128, element="fp8_e4m3fn", scale_kind=stored.scale_dtype
    )
    return QuantizedWeight(format=stored, data=data, scale=scale[::128])


@pytest.mark.parametrize("name", ["fp8_block128_a8", "fp8_block128_ue8m0_a8"])
def test_block_scaled_products(name: str) -> None:
    request = GemmRequest(
        n=256, k=384, dtype="bfloat16", weight_format=FORMATS[name], tokens=TOKENS
    )
    weight = fp8_weight(name, 256, 384)
    x = torch.randn(9, 384).bfloat16()
    want = CATALOGUE["gemm"].reference(request, weight=weight)(x.double())
    candidate = one(deep_gemm.candidates("gemm", HOPPER), "deep_gemm")
    assert candidate.serves(request)
    assert not candidate.semantic_notes(request)
    with fake.installed(deep_gemm={"fp8_gemm_nt": latent.fp8_gemm_nt}):
        close(candidate.load()(request, weight=weight)(x), want, candidate.name)


def test_scales_are_powers_of_two_on_blackwell() -> None:
    blackwell = device("nvidia", "sm_100", "matrix.fp8_e4m3fn")
    for name, notes in (
        ("fp8_block128_a8", ["scales_to_powers_of_two"]),
        ("fp8_block128_ue8m0_a8", []),
    ):
        request = GemmRequest(
            n=256, k=384, dtype="bfloat16", weight_format=FORMATS[name], tokens=TOKENS
        )
        candidate = one(deep_gemm.candidates("gemm", blackwell), "deep_gemm")
        assert [n.name for n in candidate.semantic_notes(request)] == notes


def test_products_per_expert_are_padded_to_tiles() -> None:
    request = GroupedGemmRequest(
        num_experts=5,
        experts_per_token=2,
        n=128,
        k=256,
        dtype="bfloat16",
        weight_format=FORMATS["fp8_block128_a8"],
        tokens=TOKENS,
    )
    weights = [fp8_weight("fp8_block128_a8", 128, 256) for _ in range(5)]
    offsets = torch.tensor([0, 3, 3, 140, 141, 300])
    x = torch.randn(300, 256).bfloat16()
    reference = CATALOGUE["grouped_gemm"].reference(request, weight=weights)
    candidate = one(deep_gemm.candidates("grouped_gemm", HOPPER), "deep_gemm")
    with fake.installed(
        deep_gemm={
            "m_grouped_fp8_gemm_nt_contiguous": latent.m_grouped_fp8_gemm_nt_contiguous,
            "get_mk_alignment_for_contiguous_layout": lambda: 128,
        }
    ):
        got = candidate.load()(request, weight=weights)(x, offsets)
    close(got, reference(x.double(), offsets), candidate.name)


def test_aiter_on_both_encodings() -> None:
    """The same weight on gfx942 (fnuz) and gfx950 (fn): the same product."""
    request = GemmRequest(
        n=128, k=256, dtype="bfloat16", weight_format=FORMATS["fp8_block128_a8"], tokens=TOKENS
    )
    weight = fp8_weight("fp8_block128_a8", 128, 256)
    x = torch.randn(7, 256).bfloat16()
    want = CATALOGUE["gemm"].reference(request, weight=weight)(x.double())
    cdna3 = device("amd", "gfx942", "matrix.fp8_e4m3fnuz")
    for on, dtype in ((CDNA4, torch.float8_e4m3fn), (cdna3, torch.float8_e4m3fnuz)):

        def product(
            x: torch.Tensor,
            w: torch.Tensor,
            x_scale: torch.Tensor,
            w_scale: torch.Tensor,
            out: torch.dtype,
            dtype: torch.dtype = dtype,
        ) -> torch.Tensor:
            assert x.dtype == w.dtype == dtype
            wide = latent._wide(x, x_scale, 1) @ latent._wide(w, w_scale, 128).T
            return wide.to(out)

        candidate = one(aiter.candidates("gemm", on), "aiter")
        assert candidate.serves(request)
        with fake.installed(aiter={"gemm_a8w8_blockscale": product}):
            close(candidate.load()(request, weight=weight)(x), want, on.arch)


def test_e4m3_is_kept_exactly_in_both_encodings() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 0x7F) != 0x7F]
    values = finite.view(torch.float8_e4m3fn)
    for kind in ("fp8_e4m3fn", "fp8_e4m3fnuz"):
        stored, factor = as_kind(values, kind)
        assert torch.equal(stored.double() * factor, values.double())


def test_scales_in_tiles() -> None:
    """cuBLAS's layout: (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4 in tiles of 128 rows by 4."""
    scales = torch.randperm(200 * 6).view(200, 6)
    flat = swizzled_scales(scales)
    for row in (0, 31, 32, 127, 128, 199):
        for column in range(6):
            tile = (row // 128) * 2 + column // 4
            at = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
            assert flat[at] == scales[row, column]


def test_four_bit_weights_as_marlin_reads_them() -> None:
    """Words of eight neighbours along K, and scales in the order of its documented permutation."""
    weight = QuantizedWeight(
        format=FORMATS["int4_g32"],
        data=torch.randint(0, 256, (64, 64), dtype=torch.uint8),
        scale=torch.rand(64, 4).half(),
    )
    words = sgl_kernel_ops.gptq_packed(weight)
    assert words.shape == (16, 64)
    exact = weight.dequantize() / weight.scale.float().repeat_interleave(32, 1)
    for k, n in ((0, 0), (7, 5), (8, 63), (127, 17)):
        nibble = (int(words[k // 8, n]) >> (4 * (k % 8))) & 0xF
        assert nibble - 8 == round(float(exact[n, k]))
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scales = torch.randn(4, 128)
    want = scales.reshape(-1, 64)[:, order].reshape(4, 128)
    assert torch.equal(sgl_kernel_ops.marlin_scales(scales), want)


def test_ascends_int8_products() -> None:
    def dynamic_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = quantize_groups(x, group_size=0, element="int8", scale_kind="float32")
        return values, scale[:, 0]

    def quant_matmul(
        x1: torch.Tensor,
        x2: torch.Tensor,
        scale: torch.Tensor,
        *,
        pertoken_scale: torch.Tensor,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        wide = x1.double() @ x2.double() * scale * pertoken_scale[:, None]
        return wide.to(output_dtype)

    request = GemmRequest(
        n=64, k=128, dtype="bfloat16", weight_format=FORMATS["int8_channel_a8"], tokens=TOKENS
    )
    weight = QuantizedWeight(
        format=FORMATS["int8_channel_a8"],
        data=torch.randint(-127, 128, (64, 128), dtype=torch.int8),
        scale=torch.rand(64) + 0.1,
    )
    x = torch.randn(9, 128).bfloat16()
    candidate = one(npu_ops.candidates("gemm", device("ascend", "ascend-910b")), "npu_quant_matmul")
    assert candidate.serves(request)
    functions = {"npu_dynamic_quant": dynamic_quant, "npu_quant_matmul": quant_matmul}
    with fake.installed(torch_npu=functions):
        got = candidate.load()(request, weight=weight)(x)
    close(got, CATALOGUE["gemm"].reference(request, weight=weight)(x.double()), candidate.name)
