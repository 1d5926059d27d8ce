"""Cases of kernels that do in one pass what several ops do: a norm with the rounding of its rows,
the norm, rotation and write of one row a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import Bench, Case, CaseMaker, reference_case
from gpu_cases.judging import error_of
from hal.ops.kv_formats import KV_FORMATS, read_rows
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.ops.low_precision import dequantize_groups
from hal.ops.norm_quantize import NormQuantizeRequest
from hal_kernels.latent_kv_write import triton as latent_kv_write
from hal_kernels.norm_quantize import triton as norm_quantize

# format -> values of a row, normed ones, values of a query head
_ROWS = {"fp8_656": (576, 512, 192), "v4_584": (512, 512, 512), "fp8_132": (128, 128, 128)}
_WHOLE_STEP = 2.0**-3  # of e4m3: the exact rows are not rounded to bfloat16 before
_ONE_STEP = 0.08  # of e4m3 at its largest value, for a tie that fell to the other side


def makers() -> Iterator[CaseMaker]:
    for scale, group in (("float32", 128), ("ue8m0", 32)):
        yield CaseMaker(
            name=f"norm with residual and rounding to FP8 in groups of {group}, scales {scale}",
            kernels=("norm_quantize.rows",),
            make=lambda b, s=scale, g=group: norm_quantize_case(b, s, g),
        )
    for name, style in (*((name, "interleaved") for name in _ROWS), ("fp8_132", "half_split")):
        yield CaseMaker(
            name=f"norm, rotation {style} and write of rows in {name}",
            kernels=("latent_kv_write.pass",),
            make=lambda b, n=name, s=style: latent_case(b, n, s),
        )


def norm_quantize_case(bench: Bench, scale: Any, group: int, hidden: int = 0) -> Case:
    hidden, rows = hidden or bench.size(7168, 256), bench.size(4096, 5)
    request = NormQuantizeRequest(
        hidden_size=hidden, dtype="bfloat16", out_dtype="fp8_e4m3fn", group_size=group,
        scale_dtype=scale, has_residual=True,
    )  # fmt: skip
    return reference_case(
        f"norm with residual and rounding {rows}x{hidden} in groups of {group}, scales {scale}",
        request,
        norm_quantize.bind,
        bench,
        (bench.bf16(rows, hidden), bench.bf16(rows, hidden)),
        tokens=rows,
        tolerance=_ONE_STEP,
        static={"weight": (bench.randn(hidden).abs() + 0.5).bfloat16(), "eps": 1e-6},
        # The residual is returned and written: what became of the one given is not of the op.
        judge=lambda found, exact: error_of(_rows_of(found[0], scale), _rows_of(exact[0], scale)),
        written=(1,),
    )


def _rows_of(result: Any, scale: str) -> torch.Tensor:
    """The rows that values and scales read back as."""
    values, scales = result[:2]
    return dequantize_groups(values, scales, element="fp8_e4m3fn", scale_kind=scale)


def latent_case(bench: Bench, name: Any, style: Any) -> Case:
    row_dim, norm_dim, head_dim = _ROWS[name]
    heads, rows, page = bench.size(16, 3), bench.size(4096, 5), 64
    form = KV_FORMATS[name]
    request = LatentKvWriteRequest(
        num_heads=heads, head_dim=head_dim, row_dim=row_dim, rotary_dim=64,
        q_rotary_start=head_dim - 64, row_rotary_start=row_dim - 64, norm_dim=norm_dim,
        block_size=page, dtype="bfloat16", kv_format=name, style=style,
    )  # fmt: skip
    pages = -(-rows // page) + 1
    shape = (pages, form.page_bytes(page))
    cache = torch.zeros(shape, dtype=torch.uint8, device=bench.device)
    angles = torch.rand(512, 32, device=bench.device) * 6.3
    positions = torch.randint(0, 512, (rows,), device=bench.device)
    slots = torch.randperm(pages * page, device=bench.device)[:rows]
    return reference_case(
        f"norm, rotation {style} and write of {rows} rows in {name}, {heads} query heads",
        request,
        latent_kv_write.bind,
        bench,
        (bench.bf16(rows, heads * head_dim), bench.bf16(rows, row_dim), positions, cache, slots),
        tokens=rows,
        tolerance=_WHOLE_STEP,
        written=(0, 3),
        static={
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=1),
            "row_weight": (bench.randn(norm_dim).abs() + 0.5).bfloat16(),
            "eps": 1e-6,
        },
        judge=lambda found, exact: _queries_and_rows(name, page, found, exact),
    )


def _queries_and_rows(name: str, page: int, found: Any, exact: Any) -> float:
    """Of the query that is returned and of what the cache reads back as."""
    rows = []
    for cache in (found[2], exact[2]):
        slots = torch.arange(len(cache) * page, device=cache.device)
        rows.append(read_rows(name, cache, page, slots, torch.float64))
    return max(error_of(found[0], exact[0]), error_of(*rows))
