"""Cases of products: dense, split, shared out over the device, quantised, per expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional

from gpu_cases.case import BF16, FP8_RATE, Bench, Call, Case, CaseMaker, reference_case
from hal.ops.formats import FORMATS, QuantizedWeight, quantize_weight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.request import TokenRange
from hal_kernels.gemm import triton as gemm
from hal_kernels.gemm.stream_k_schedule import stream_k
from hal_kernels.gemm.stream_k_variants import PROGRAMS_PER_UNIT, tiles_of
from hal_kernels.grouped_gemm import triton as grouped_gemm

_DENSE = 2.0**-6
_INT = 2.0**-5  # a row may cancel to little


def makers() -> Iterator[CaseMaker]:
    yield from _dense_makers()
    yield from _fp8_makers()
    yield from _integer_makers()
    yield from _split_makers()
    yield from _grouped_makers()


def _dense_makers() -> Iterator[CaseMaker]:
    for rows, kernels in (
        ("one", ("gemm.dense", "gemm.split_k_sum")),
        ("few", ("gemm.dense", "gemm.split_k_sum")),
        ("many", ("gemm.dense",)),
    ):
        for epilogue in ("none", "silu_gated"):
            yield CaseMaker(
                name=f"gemm bf16 {epilogue}, {rows} rows",
                kernels=kernels,
                make=lambda b, rows=rows, epilogue=epilogue: dense_case(b, rows, epilogue),
            )
    for epilogue, out_dtype in (("none", ""), ("silu_gated", ""), ("none", "float32")):
        yield CaseMaker(
            name=f"gemm bf16 {epilogue}, stream-K{' in float32' * bool(out_dtype)}",
            kernels=("gemm.stream_k", "gemm.stream_k_fix_up"),
            make=lambda b, epilogue=epilogue, out=out_dtype: stream_k_case(b, epilogue, out),
        )
    for name, kernels, rows in (
        ("bias", ("gemm.dense",), "many"),
        ("bias", ("gemm.dense", "gemm.split_k_sum"), "few"),
        ("bias in fp16", ("gemm.dense",), "many"),
    ):
        yield CaseMaker(
            name=f"gemm with {name}, {rows} rows",
            kernels=kernels,
            make=lambda b, n=name, r=rows: dense_case(
                b, r, "none", dtype="float16" if "fp16" in n else "bfloat16", has_bias=True
            ),
        )


def _fp8_makers() -> Iterator[CaseMaker]:
    for name in ("fp8_block128_a8", "fp8_block32_ue8m0_a8"):
        for rows in ("one", "many"):
            yield CaseMaker(
                name=f"gemm {name}, {rows} rows",
                kernels=("gemm.fp8_block", "quantize.groups"),
                make=lambda b, name=name, rows=rows: quantised_case(b, name, rows),
            )
    # Where the device has no instruction for it, Triton widens it: right, and no fast path.
    yield CaseMaker(
        name="gemm mxfp8 with the scales in the product, many rows",
        kernels=("gemm.mxfp8", "quantize.groups"),
        make=lambda b: quantised_case(b, "fp8_block32_ue8m0_a8", "many", arch="sm_120"),
    )
    # As for a device without FP8: operands decoded to float16, rows rounded in integers.
    for name in ("fp8_block128_a8", "fp8_block32_ue8m0_a8"):
        yield CaseMaker(
            name=f"gemm {name} decoded to float16, many rows",
            kernels=("gemm.fp8_widened", "quantize.codes"),
            make=lambda b, name=name: quantised_case(b, name, "many", arch="sm_80"),
        )
    for name in ("fp8_block128", "fp8_block32_ue8m0"):
        for rows in ("one", "many"):
            yield CaseMaker(
                name=f"gemm {name} with activations as they are, {rows} rows",
                kernels=("gemm.fp8_weight_only",),
                make=lambda b, name=name, rows=rows: quantised_case(b, name, rows),
            )


def _integer_makers() -> Iterator[CaseMaker]:
    for name in ("int4_g32", "int4_g128_zero", "int8_channel"):
        for rows in ("one", "many"):
            yield CaseMaker(
                name=f"gemm {name}, {rows} rows",
                kernels=("gemm.weight_only",),
                make=lambda b, name=name, rows=rows: integer_case(b, name, rows),
            )


def _split_makers() -> Iterator[CaseMaker]:
    for name, rounds in (
        ("fp8_block128_a8", ("quantize.groups",)),
        ("fp8_block32_ue8m0", ()),
        ("int4_g32", ()),
    ):
        yield CaseMaker(
            name=f"gemm {name} in parts along K, one row",
            kernels=("gemm.split_k", "gemm.split_k_sum", *rounds),
            make=lambda b, name=name: (
                integer_case(b, name, "one", is_split=True)
                if name.startswith("int")
                else quantised_case(b, name, "one", is_split=True)
            ),
        )


def _grouped_makers() -> Iterator[CaseMaker]:
    for name, kernels in (
        ("bfloat16", ("grouped_gemm.dense",)),
        ("fp8_block128_a8", ("grouped_gemm.fp8_block", "quantize.groups")),
        ("mxfp4_a8", ("grouped_gemm.mxfp4", "quantize.groups")),
        ("fp8_block32_ue8m0", ("grouped_gemm.weight_only",)),
        ("mxfp4", ("grouped_gemm.weight_only",)),
    ):
        for epilogue in ("none", "silu_gated"):
            yield CaseMaker(
                name=f"grouped gemm {name} {epilogue}",
                kernels=kernels,
                make=lambda b, name=name, epilogue=epilogue: grouped_case(b, name, epilogue),
            )
    for epilogue in ("none", "silu_gated"):
        yield CaseMaker(
            name=f"grouped gemm fp8_block128_a8 {epilogue}, decoded to float16",
            kernels=("grouped_gemm.fp8_widened", "quantize.codes"),
            make=lambda b, e=epilogue: grouped_case(b, "fp8_block128_a8", e, arch="sm_80"),
        )
        yield CaseMaker(
            name=f"grouped gemm mxfp4_a8 {epilogue}, in 16 bits",
            kernels=("grouped_gemm.round_rows", "grouped_gemm.weight_only"),
            make=lambda b, e=epilogue: grouped_case(b, "mxfp4_a8", e, arch="sm_80"),
        )


def rows_of(bench: Bench, rows: str) -> int:
    """What a case calls one, few and many rows."""
    return {"one": 1, "few": bench.size(16, 5), "many": bench.size(4096, 20)}[rows]


def _request(n: int, k: int, tokens: int, name: str, **more: Any) -> GemmRequest:
    fields = {"dtype": "bfloat16", "tokens": TokenRange(1, tokens), **more}
    return GemmRequest(n=n, k=k, weight_format=FORMATS[name], **fields)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, epilogue: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = functional.linear(x, weight, bias)
    if epilogue == "none":
        return y
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate) * up


def dense_case(
    bench: Bench, rows: str, epilogue: str, *, dtype: str = "bfloat16", has_bias: bool = False
) -> Case:
    """Of whole tiles or split ones, even where the device would share them out by stream-K."""
    tokens, n = rows_of(bench, rows), bench.size(8192, 64)
    k = bench.size(4096, 2048 if rows != "many" else 96)  # split where it is long
    of_dtype = getattr(torch, dtype)
    weight = (bench.randn(n, k) / k**0.5).to(of_dtype)
    x = bench.randn(tokens, k).to(of_dtype)
    bias = bench.randn(n).to(of_dtype) if has_bias else None
    request = _request(n, k, tokens, dtype, dtype=dtype, epilogue=epilogue, has_bias=has_bias)
    return reference_case(
        f"gemm {dtype} {epilogue}{' with bias' if has_bias else ''} {tokens}x{n}x{k}",
        request,
        gemm.bind,
        bench,
        (x,),
        tokens=tokens,
        tolerance=_DENSE,
        spec=bench.without_units(),
        static={"weight": weight, "bias": bias},
        theirs=lambda: _linear(x, weight, epilogue, bias),
        library="cuBLAS",
    )


def stream_k_case(bench: Bench, epilogue: str, out_dtype: str = "") -> Case:
    """Of a size that whole tiles would share out badly, as the model of waves sees it."""
    tokens, k = bench.size(4096, 8), bench.size(4096, 1024)
    spec = bench.with_units(3) if bench.is_dry else bench.spec
    units = int(spec.attributes["compute_units"])
    table = "gemm_gated" if epilogue == "silu_gated" else "gemm"
    size = "large" if tokens > 16 else "small"
    tile = tiles_of(gemm.target_of(spec), table, size)
    slots = units * PROGRAMS_PER_UNIT[size]
    blocks, steps = -(-tokens // tile["BLOCK_M"]), -(-k // tile["BLOCK_K"])
    wanted = [c for c in range(1, 4 * slots) if stream_k(blocks * c, steps, slots) is not None]
    if not wanted:
        raise ValueError(f"stream-K: required a size that it suits on {units} units, found none")
    width = wanted[-1] * tile["BLOCK_N"]
    n = 2 * width if epilogue == "silu_gated" else width
    weight = (bench.randn(n, k) / k**0.5).to(BF16)
    x = bench.bf16(tokens, k)
    return reference_case(
        f"gemm bf16 {epilogue} stream-K {out_dtype} {tokens}x{n}x{k}".replace("  ", " "),
        _request(n, k, tokens, "bfloat16", epilogue=epilogue, out_dtype=out_dtype),
        gemm.bind,
        bench,
        (x,),
        tokens=tokens,
        tolerance=_DENSE,
        spec=spec,
        static={"weight": weight},
        theirs=lambda: _linear(x, weight, epilogue),
        library="cuBLAS",
    )


def quantised_case(
    bench: Bench, name: str, rows: str, arch: str = "", *, is_split: bool = False
) -> Case:
    """FP8 weights in square blocks, beside the library's FP8 product with a scale a row. is_split:
    in parts along K, of few columns, as one rank of several has; else whole on any device."""
    tokens, n = rows_of(bench, rows), bench.size(1536 if is_split else 7168, 128)
    k = bench.size(4096, 2048 if is_split else 256)
    form = FORMATS[name]
    weight = quantize_weight(bench.randn(n, k) / k**0.5, form)
    x = bench.bf16(tokens, k)
    wide = weight.dequantize().to(BF16)
    is_fp8 = form.activation != "float"
    theirs: Call = lambda: functional.linear(x, wide)  # noqa: E731
    if is_fp8 and not bench.is_dry:
        theirs = _scaled_product(x, wide)
    return reference_case(
        f"gemm {name} {tokens}x{n}x{k}",
        _request(n, k, tokens, name),
        gemm.bind,
        bench,
        (x,),
        tokens=tokens,
        tolerance=_DENSE,
        spec=bench.as_arch(arch) if arch else None if is_split else bench.without_units(),
        static={"weight": weight},
        theirs=theirs,
        library="_scaled_mm by rows" if is_fp8 else "cuBLAS on bf16",
        rate=FP8_RATE if is_fp8 else 1.0,
    )


def _scaled_product(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """torch's FP8 product with one scale a row of each, the rounding of x included as in ours."""
    largest = 448.0
    w_scale = (weight.float().abs().amax(dim=1) / largest)[None, :]
    packed = (weight.float() / w_scale.T).to(torch.float8_e4m3fn).T

    def product() -> torch.Tensor:
        x_scale = x.abs().amax(dim=1, keepdim=True).float() / largest
        values = (x / x_scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(values, packed, x_scale, w_scale, out_dtype=BF16)

    return product


def integer_weight(bench: Bench, name: str, n: int, k: int) -> QuantizedWeight:
    """A random weight of integers in four or eight bits."""
    form = FORMATS[name]
    if form.bits == 4:
        data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scale = (torch.rand(form.scale_shape(n, k)) / 8 / k**0.5).half()
    else:
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scale = torch.rand(n) / 64 / k**0.5
    zeros = torch.randint(0, 16, scale.shape).half() if form.has_zeros else None
    return QuantizedWeight(
        format=form,
        data=bench.on(data),
        scale=bench.on(scale),
        minimum=None if zeros is None else bench.on(zeros),
    )


def integer_case(bench: Bench, name: str, rows: str, *, is_split: bool = False) -> Case:
    tokens, n = rows_of(bench, rows), bench.size(2048 if is_split else 8192, 64)
    k = bench.size(4096, 2048 if is_split else 128)
    weight = integer_weight(bench, name, n, k)
    x = bench.bf16(tokens, k)
    wide = weight.dequantize().to(BF16)
    return reference_case(
        f"gemm {name} {tokens}x{n}x{k}",
        _request(n, k, tokens, name),
        gemm.bind,
        bench,
        (x,),
        tokens=tokens,
        tolerance=_INT,
        spec=None if is_split else bench.without_units(),
        static={"weight": weight},
        theirs=lambda: functional.linear(x, wide),
        library="cuBLAS on bf16",
    )


def grouped_case(bench: Bench, name: str, epilogue: Any, arch: str = "") -> Case:
    experts, n, k = bench.size(64, 4), bench.size(2048, 128), bench.size(4096, 256)
    rows = bench.size(4096, 12)
    # Uneven, and one expert that nobody chose.
    bounds = torch.rand(experts - 2).mul(rows).long().sort().values
    offsets = torch.cat((torch.zeros(2).long(), bounds, torch.tensor([rows])))
    offsets = bench.on(offsets)
    x, form = bench.bf16(rows, k), FORMATS[name]
    dense = bench.randn(experts, n, k) / k**0.5
    stored: Any = dense.to(BF16)
    if not form.is_dense:
        stored = [quantize_weight(one, form) for one in dense]
    theirs = None
    if form.is_dense and epilogue == "none" and not bench.is_dry:
        ends = offsets[1:].int()
        theirs = lambda: torch._grouped_mm(x, stored.transpose(1, 2), offs=ends)  # noqa: E731
    request = GroupedGemmRequest(
        num_experts=experts, experts_per_token=1, n=n, k=k, dtype="bfloat16", weight_format=form,
        epilogue=epilogue, clamp=7.0 if epilogue == "silu_gated" else 0.0,
        tokens=TokenRange(1, rows),
    )  # fmt: skip
    return reference_case(
        f"grouped gemm {name} {epilogue} {experts} experts {rows}x{n}x{k}",
        request,
        grouped_gemm.bind,
        bench,
        (x, offsets),
        tokens=rows,
        tolerance=_DENSE,
        spec=bench.as_arch(arch) if arch else None,
        static={"weight": stored},
        theirs=theirs,
        library="_grouped_mm",
        rate=1.0 if form.is_dense or form.activation == "float" else FP8_RATE,
    )
