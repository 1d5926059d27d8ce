"""Cases of products per expert: in parts along K, and with integer weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import BF16, FP8_RATE, Bench, Case, CaseMaker, reference_case
from gpu_cases.products import integer_weight
from hal.ops.formats import FORMATS, quantize_weight
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.request import TokenRange
from hal_kernels.grouped_gemm import triton as grouped_gemm

_INTEGER_TOLERANCE = 2.0**-5  # weights are rounded to bfloat16, and a row may cancel to little
_TOLERANCE = 2.0**-7  # of the largest of a row: halves of a step of bfloat16, of gate and product


def makers() -> Iterator[CaseMaker]:
    for name, rounds in (
        ("bfloat16", ()),
        ("fp8_block128_a8", ("quantize.groups",)),
        ("mxfp4_a8", ("quantize.groups",)),
        ("fp8_block32_ue8m0", ()),
    ):
        yield CaseMaker(
            name=f"grouped gemm {name} in parts along K, gated, few rows",
            kernels=("grouped_gemm.split_k", "grouped_gemm.split_k_sum", *rounds),
            make=lambda b, name=name: split_case(b, name),
        )

    for name in ("int8_channel", "int4_g32"):
        for rows in ("few", "many"):
            yield CaseMaker(
                name=f"grouped gemm {name}, {rows} rows",
                kernels=("grouped_gemm.integer",),
                make=lambda b, name=name, rows=rows: integer_case(b, name, rows),
            )


def integer_case(bench: Bench, name: str, rows: str) -> Case:
    experts, n, k = bench.size(64, 4), bench.size(2048, 128), bench.size(4096, 256)
    count, form = bench.size(4096 if rows == "many" else 64, 12), FORMATS[name]
    bounds = torch.rand(experts - 1).mul(count).long().sort().values
    offsets = bench.on(torch.cat((torch.zeros(1).long(), bounds, torch.tensor([count]))))
    stored = [integer_weight(bench, name, n, k) for _ in range(experts)]
    request = GroupedGemmRequest(
        num_experts=experts, experts_per_token=1, n=n, k=k, dtype="bfloat16", weight_format=form,
        tokens=TokenRange(1, count),
    )  # fmt: skip
    return reference_case(
        f"grouped gemm {name} {experts} experts {count}x{n}x{k}",
        request,
        grouped_gemm.bind,
        bench,
        (bench.bf16(count, k), offsets),
        tokens=count,
        tolerance=_INTEGER_TOLERANCE,
        static={"weight": stored},
    )


def split_case(bench: Bench, name: str) -> Case:
    experts, n, k = bench.size(256, 4), bench.size(512, 128), bench.size(4096, 2048)
    form, rows = FORMATS[name], 6
    # Each row is another expert's, but for two that share one.
    owners = torch.randperm(experts - 1)[: rows - 1].tolist() if experts > rows else [0, 1, 3]
    counts = torch.zeros(experts, dtype=torch.int64)
    for row in range(rows):
        counts[owners[row % len(owners)]] += 1
    offsets = bench.on(torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))))
    stored: Any = (bench.randn(experts, n, k) / k**0.5).to(BF16)
    if not form.is_dense:
        stored = [quantize_weight(one.float(), form) for one in stored]
    request = GroupedGemmRequest(
        num_experts=experts, experts_per_token=min(rows, experts), n=n, k=k, dtype="bfloat16",
        weight_format=form, epilogue="silu_gated", clamp=7.0, tokens=TokenRange(1, 1),
    )  # fmt: skip
    return reference_case(
        f"grouped gemm {name} in parts along K {experts} experts {rows}x{n}x{k}",
        request,
        grouped_gemm.bind,
        bench,
        (bench.bf16(rows, k), offsets),
        tokens=1,
        tolerance=_TOLERANCE,
        static={"weight": stored},
        rate=1.0 if form.is_dense or form.activation == "float" else FP8_RATE,
    )
