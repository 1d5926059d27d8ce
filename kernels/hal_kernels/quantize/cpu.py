"""Per-token symmetric int8 rounding of activations on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal_kernels.cpu_intrinsics import pointer_float32, pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import rows_to_read
from hal_kernels.cpu_simd import (
    LANES,
    element_kind,
    vector_abs,
    vector_div,
    vector_fma,
    vector_largest,
    vector_load,
    vector_max,
    vector_min,
    vector_of,
    vector_store_rounded_bytes,
    vector_sum,
)

_GRAIN_ELEMENTS = 24576


def bind_quantize_rows(
    *, features: int, dtype: torch.dtype, zero_point: int = 0
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Bind the rounding of rows: scale = max|x| / 127, q = round(x / scale), halves to even.

    The kernel takes x [T, features] (rows may be strided) and returns (q, scale): q int8 for
    ``zero_point`` 0, or uint8 holding q + 128 for 128; scale float32 [T, 1]. A row of zeros has
    scale 1; a row with a NaN or an infinity has scale NaN, so that the product shows it.

    Machine code: vdivps, vrndscaleps / vroundps on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    if features < LANES or features % LANES:
        raise ValueError(f"int8 rounding needs features % {LANES} == 0, got {features}")
    if zero_point not in (0, 128):
        raise ValueError(f"zero_point is 0 (int8) or 128 (uint8), got {zero_point}")
    launch = bind_worker(_compile_quantize(features, element_kind(dtype), zero_point), 4)
    grain = max(1, _GRAIN_ELEMENTS // features)
    byte_dtype = torch.uint8 if zero_point else torch.int8

    def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = rows_to_read("quantise", x, features, dtype)
        tokens = x.shape[0]
        q = torch.empty(tokens, features, dtype=byte_dtype)
        scale = torch.empty(tokens, 1, dtype=torch.float32)
        launch(tokens, grain, x.data_ptr(), x.stride(0), q.data_ptr(), scale.data_ptr())
        return q, scale

    return quantize_rows


@functools.cache
def _compile_quantize(features: int, kind: int, zero_point: int) -> CompiledWorker:
    zero = np.float32(0.0)
    one = np.float32(1.0)
    largest_byte = np.float32(127.0)

    def quantize_rows(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        x, stride, q, scales = args[0], args[1], args[2], args[3]
        for row in range(begin, end):
            peak = vector_of(zero)
            poison = vector_of(zero)
            for i in range(0, features, LANES):
                value = vector_load(x, row * stride + i, kind)
                peak = vector_max(peak, vector_abs(value))
                # Stays 0 while all is finite, else NaN: a maximum forgets a NaN.
                poison = vector_fma(value, vector_of(zero), poison)
            largest = vector_largest(peak)
            scale = largest / largest_byte if largest > zero else one
            scale += vector_sum(poison)
            pointer_float32(scales)[row] = scale
            for i in range(0, features, LANES):
                value = vector_div(vector_load(x, row * stride + i, kind), vector_of(scale))
                value = vector_min(value, vector_of(largest_byte))
                value = vector_max(value, vector_of(-largest_byte))
                vector_store_rounded_bytes(q, row * features + i, value, zero_point)

    return compile_worker(quantize_rows)
