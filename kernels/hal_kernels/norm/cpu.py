"""Root-mean-square norm on the CPU, with residual add and int8 rounding in the same pass.

A row is read from memory once; the later passes over it hit the first-level cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from hal_kernels.cpu_intrinsics import pointer_float32, pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import dense_in_place, rows_to_read
from hal_kernels.cpu_simd import (
    FP32,
    LANES,
    element_kind,
    vector_abs,
    vector_add,
    vector_div,
    vector_fma,
    vector_largest,
    vector_load,
    vector_load_first,
    vector_max,
    vector_min,
    vector_mul,
    vector_of,
    vector_store,
    vector_store_first,
    vector_store_rounded_bytes,
    vector_sum,
)

# Elements below which waking the other threads costs more than it saves.
_GRAIN_ELEMENTS = 24576


def bind_rms_norm(
    *,
    hidden_size: int,
    dtype: torch.dtype,
    weight: torch.Tensor,
    eps: float,
    has_residual: bool = False,
    rows_per_token: int = 1,
    quantize: Literal["none", "int8_per_token"] = "none",
) -> Callable[..., Any]:
    """Bind y = x / sqrt(mean(x^2) + eps) * weight over each ``hidden_size`` values.

    The kernel takes x [T, rows_per_token * hidden_size] (rows may be strided) and, with a
    residual, residual [T, hidden_size] (contiguous), into which x is added in place; it returns
    y, or (y, residual). With ``quantize`` y is (int8 [T, hidden_size], scale float32 [T, 1]) as
    from ``bind_quantize_rows``. weight is [hidden_size], held as float32. Sums are float32.

    Machine code: vfmadd231ps on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    if tuple(weight.shape) != (hidden_size,):
        raise ValueError(f"norm weight needs shape ({hidden_size},), got {tuple(weight.shape)}")
    if rows_per_token > 1 and (has_residual or quantize != "none"):
        raise ValueError("a norm over heads takes neither a residual nor int8 rounding")
    if quantize != "none" and hidden_size % LANES:
        raise ValueError(f"int8 rounding needs hidden_size % {LANES} == 0, got {hidden_size}")
    weight_values = weight.detach().to(torch.float32).contiguous()
    compiled = _compile_rms_norm(
        hidden_size,
        rows_per_token,
        element_kind(dtype),
        float(eps),
        has_residual,
        quantize != "none",
    )
    launch = bind_worker(compiled, 5, (weight_values,), addresses=(0, 2, 3, 4))
    grain = max(1, _GRAIN_ELEMENTS // hidden_size)
    features = rows_per_token * hidden_size

    def norm(x: torch.Tensor) -> torch.Tensor:
        x = rows_to_read("norm", x, features, dtype)
        tokens = x.shape[0]
        y = torch.empty(tokens, features, dtype=dtype)
        launch(tokens * rows_per_token, grain, x.data_ptr(), x.stride(0), y.data_ptr(), 0, 0)
        return y

    def norm_residual(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = rows_to_read("norm", x, features, dtype)
        dense_in_place("residual of a norm", residual, dtype, x.shape)
        tokens = x.shape[0]
        y = torch.empty(tokens, features, dtype=dtype)
        launch(tokens, grain, x.data_ptr(), x.stride(0), y.data_ptr(), residual.data_ptr(), 0)
        return y, residual

    def norm_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantized(x, 0)

    def norm_residual_quantize(
        x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        dense_in_place("residual of a norm", residual, dtype, x.shape)
        return quantized(x, residual.data_ptr()), residual

    def quantized(x: torch.Tensor, residual_address: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = rows_to_read("norm", x, features, dtype)
        tokens = x.shape[0]
        y = torch.empty(tokens, features, dtype=torch.int8)
        scale = torch.empty(tokens, 1, dtype=torch.float32)
        launch(
            tokens,
            grain,
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            residual_address,
            scale.data_ptr(),
        )
        return y, scale

    if quantize != "none":
        return norm_residual_quantize if has_residual else norm_quantize
    return norm_residual if has_residual else norm


@functools.cache
def _compile_rms_norm(
    hidden_size: int,
    rows_per_token: int,
    kind: int,
    eps: float,
    has_residual: bool,
    is_quantized: bool,
) -> CompiledWorker:
    tail = hidden_size % LANES
    full = hidden_size - tail
    eps32 = np.float32(eps)
    zero = np.float32(0.0)
    one = np.float32(1.0)
    largest_byte = np.float32(127.0)
    count = np.float32(hidden_size)

    def rms_norm(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        x, stride, y, residual, scales, weight = (
            args[0],
            args[1],
            args[2],
            args[3],
            args[4],
            args[5],
        )
        for row in range(begin, end):
            source = x
            start = row // rows_per_token * stride + row % rows_per_token * hidden_size
            squares = vector_of(zero)
            for i in range(0, full, LANES):
                value = vector_load(x, start + i, kind)
                if has_residual:
                    value = vector_add(value, vector_load(residual, row * hidden_size + i, kind))
                    vector_store(residual, row * hidden_size + i, value, kind)
                    # What the residual holds is what is normed: rounded, if it is bf16.
                    value = vector_load(residual, row * hidden_size + i, kind)
                squares = vector_fma(value, value, squares)
            if tail > 0:
                value = vector_load_first(x, start + full, kind, tail, zero)
                if has_residual:
                    index = row * hidden_size + full
                    value = vector_add(value, vector_load_first(residual, index, kind, tail, zero))
                    vector_store_first(residual, index, value, kind, tail)
                    value = vector_load_first(residual, index, kind, tail, zero)
                squares = vector_fma(value, value, squares)
            if has_residual:
                source = residual
                start = row * hidden_size
            mean = vector_sum(squares) / count
            factor = vector_of(one / np.float32(math.sqrt(mean + eps32)))
            if is_quantized:
                peak = vector_of(zero)
                poison = vector_of(zero)
                for i in range(0, full, LANES):
                    value = vector_mul(vector_load(source, start + i, kind), factor)
                    value = vector_mul(value, vector_load(weight, i, FP32))
                    peak = vector_max(peak, vector_abs(value))
                    # Stays 0 while all is finite, else NaN: a maximum forgets a NaN.
                    poison = vector_fma(value, vector_of(zero), poison)
                largest = vector_largest(peak)
                scale = largest / largest_byte if largest > zero else one
                scale += vector_sum(poison)
                pointer_float32(scales)[row] = scale
                for i in range(0, full, LANES):
                    value = vector_mul(vector_load(source, start + i, kind), factor)
                    value = vector_mul(value, vector_load(weight, i, FP32))
                    value = vector_div(value, vector_of(scale))
                    value = vector_max(
                        vector_min(value, vector_of(largest_byte)), vector_of(-largest_byte)
                    )
                    vector_store_rounded_bytes(y, row * hidden_size + i, value, 0)
            else:
                for i in range(0, full, LANES):
                    value = vector_mul(vector_load(source, start + i, kind), factor)
                    value = vector_mul(value, vector_load(weight, i, FP32))
                    vector_store(y, row * hidden_size + i, value, kind)
                if tail > 0:
                    value = vector_load_first(source, start + full, kind, tail, zero)
                    scaled_weight = vector_load_first(weight, full, FP32, tail, zero)
                    value = vector_mul(vector_mul(value, factor), scaled_weight)
                    vector_store_first(y, row * hidden_size + full, value, kind, tail)

    return compile_worker(rms_norm)
