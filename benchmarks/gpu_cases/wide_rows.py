"""Cases of rows that are too wide for the registers of one program and are read in steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as functional

from gpu_cases.case import Bench, Case, CaseMaker, reference_case
from gpu_cases.judging import decoded_error
from gpu_cases.one_pass import norm_quantize_case
from gpu_cases.rows import layer_norm_case
from hal.ops.norm import RmsNormRequest
from hal.ops.quantize import QuantizeRequest
from hal_kernels.norm import triton as norm
from hal_kernels.quantize import triton as quantize

_BF16 = 2.0**-7
_ONE_STEP = 1.0 / 127  # of int8 at its largest value, for a tie that fell to the other side


def makers() -> Iterator[CaseMaker]:
    yield CaseMaker(
        name="root-mean-square norm of wide rows", kernels=("norm.rms_looped",), make=norm_case
    )
    yield CaseMaker(
        name="layer norm of wide rows",
        kernels=("layer_norm.looped",),
        make=lambda bench: layer_norm_case(bench, _width(bench), many=4096),
    )
    yield CaseMaker(
        name="norm of wide rows with residual and rounding to FP8",
        kernels=("norm_quantize.looped",),
        make=lambda bench: norm_quantize_case(bench, "float32", 128, hidden=_width(bench)),
    )
    yield CaseMaker(
        name="rounding of wide rows to int8", kernels=("quantize.looped",), make=quantize_case
    )


def _width(bench: Bench) -> int:
    """Of a row: more than the 16,384 that norms keep."""
    return bench.size(20480, 16640)


def norm_case(bench: Bench) -> Case:
    hidden, rows = _width(bench), bench.size(4096, 2)
    weight, x = (bench.randn(hidden).abs() + 0.5).bfloat16(), bench.bf16(rows, hidden)
    return reference_case(
        f"root-mean-square norm of wide rows {rows}x{hidden}",
        RmsNormRequest(hidden_size=hidden, dtype="bfloat16"),
        norm.bind,
        bench,
        (x,),
        tokens=rows,
        tolerance=_BF16,
        static={"weight": weight, "eps": 1e-6},
        theirs=lambda: functional.rms_norm(x, (hidden,), weight, 1e-6),
        library="rms_norm",
    )


def quantize_case(bench: Bench) -> Case:
    """More than the 32,768 that rounding keeps of a row with one scale."""
    width, rows = bench.size(40960, 33024), bench.size(4096, 2)
    request = QuantizeRequest(
        group_size=0, out_dtype="int8", scale_dtype="float32", width=width, dtype="bfloat16"
    )
    return reference_case(
        f"rounding to int8 {rows}x{width} with a scale a row",
        request,
        quantize.bind,
        bench,
        (bench.bf16(rows, width),),
        tokens=rows,
        tolerance=_ONE_STEP,
        judge=decoded_error,
    )
