"""Gated activations on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from hal_kernels.cpu_intrinsics import pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import rows_to_read
from hal_kernels.cpu_simd import (
    LANES,
    element_kind,
    vector_add,
    vector_div,
    vector_exp,
    vector_fma,
    vector_load,
    vector_load_first,
    vector_max,
    vector_min,
    vector_mul,
    vector_of,
    vector_store,
    vector_store_first,
)

_GRAIN_ELEMENTS = 8192
# tanh form of GELU: x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3)).
_GELU_SLOPE = 2.0 * 0.7978845608028654
_GELU_CUBIC = 0.044715


def bind_gated_activation(
    *,
    width: int,
    dtype: torch.dtype,
    activation: Literal["silu", "gelu_tanh"] = "silu",
    clamp: float = 0.0,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Bind y[T, width] = act(x[:, :width]) * x[:, width:].

    The kernel takes x [T, 2 * width] (rows may be strided). With ``clamp`` c > 0 the gate is
    capped at c and the other half limited to -c .. c first. Both activations are written with one
    exponential, x / (1 + exp(-z)), whose error is below 1 ulp.

    Machine code: vfmadd231ps, vdivps on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    if width < 1:
        raise ValueError(f"a gated activation needs a width, got {width}")
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"the activation is silu or gelu_tanh, got {activation!r}")
    if clamp < 0:
        raise ValueError(f"clamp cannot be negative, got {clamp}")
    compiled = _compile_activation(
        width, element_kind(dtype), activation == "gelu_tanh", float(clamp)
    )
    launch = bind_worker(compiled, 3, addresses=(0, 2))
    grain = max(1, _GRAIN_ELEMENTS // width)

    def gated_activation(x: torch.Tensor) -> torch.Tensor:
        x = rows_to_read("gated activation", x, 2 * width, dtype)
        tokens = x.shape[0]
        y = torch.empty(tokens, width, dtype=dtype)
        launch(tokens, grain, x.data_ptr(), x.stride(0), y.data_ptr())
        return y

    return gated_activation


@functools.cache
def _compile_activation(width: int, kind: int, is_gelu: bool, clamp: float) -> CompiledWorker:
    zero = np.float32(0.0)
    one = np.float32(1.0)
    slope = np.float32(-_GELU_SLOPE)
    cubic = np.float32(-_GELU_SLOPE * _GELU_CUBIC)
    minus_one = np.float32(-1.0)
    has_clamp = clamp > 0
    upper = np.float32(clamp)
    lower = np.float32(-clamp)

    def gated_activation(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        x, stride, y = args[0], args[1], args[2]
        for row in range(begin, end):
            for i in range(0, width, LANES):
                count = min(width - i, LANES)
                source = row * stride + i
                if count == LANES:
                    gate = vector_load(x, source, kind)
                    up = vector_load(x, source + width, kind)
                else:
                    gate = vector_load_first(x, source, kind, count, zero)
                    up = vector_load_first(x, source + width, kind, count, zero)
                if has_clamp:
                    # The bound first: a NaN value stays a NaN.
                    gate = vector_min(vector_of(upper), gate)
                    up = vector_max(vector_of(lower), vector_min(vector_of(upper), up))
                if is_gelu:
                    square = vector_mul(gate, gate)
                    negated = vector_mul(
                        gate, vector_fma(square, vector_of(cubic), vector_of(slope))
                    )
                else:
                    negated = vector_mul(gate, vector_of(minus_one))
                divisor = vector_add(vector_exp(negated), vector_of(one))
                value = vector_mul(vector_div(gate, divisor), up)
                if count == LANES:
                    vector_store(y, row * width + i, value, kind)
                else:
                    vector_store_first(y, row * width + i, value, kind, count)

    return compile_worker(gated_activation)
