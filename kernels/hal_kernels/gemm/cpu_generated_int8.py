"""GEMM on the CPU by generated kernels with int8 activations: w8a8 and w4a8.

Each row of x is rounded to int8 with one symmetric scale, max|x| / 127: what the formats with
activation "int8_per_token" ask for, exactly as `hal.ops.gemm.quantize_rows`. Integer sums are
exact, so a row does not depend on its neighbours.

Limits: CPU flags avx2, fma, f16c (faster with avx512vnni or avxvnni); x float32 with unit stride
along K, finite; formats int8_channel_a8 (any K up to `MAX_K`, so that int32 holds the sum),
int8_g32_a8, int4_g32_a8 and int4_g32_asym_a8 (K a multiple of 32, float16 scales).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hal.ops.formats import QuantizedWeight
from hal_kernels.cpu_launch import bind_stages
from hal_kernels.cpu_launch_memory import Stage
from hal_kernels.gemm.isa import VectorIsa, jit_requirements, vector_isa
from hal_kernels.gemm.jit_int8 import (
    activation_offset,
    compile_int8_worker,
    dot_isa,
    group_sums,
)
from hal_kernels.gemm.jit_int8_block import Int8Kernel, Int8Weight
from hal_kernels.gemm.jit_ir import GeneratedWorker
from hal_kernels.gemm.jit_panel import PANEL_ADDRESSES, PANEL_ARGUMENTS, PanelEpilogue
from hal_kernels.gemm.jit_quantize import (
    QUANTIZE_ADDRESSES,
    QUANTIZE_ARGUMENTS,
    compile_quantize_worker,
)
from hal_kernels.gemm.packing import PanelLayout, pack_dot_int4, pack_dot_int8, refuse_rows
from hal_kernels.thread_scratch import thread_scratch

Kernel = Callable[[torch.Tensor], torch.Tensor]

FORMATS = ("int8_channel_a8", "int8_g32_a8", "int4_g32_a8", "int4_g32_asym_a8")
MAX_K = 65535  # 255 * 128 * K < 2**31: unsigned activations times int8 weights

requirements = jit_requirements


def bind_generated_int8(
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    epilogue: PanelEpilogue = "none",
) -> Kernel:
    """Pack ``weight`` [N, K] and return ``kernel(x[T, K] float32) -> y[T, N]`` (gated: [T, N/2]).

    Raises:
        RuntimeError: the CPU lacks the flags of `requirements`.
        ValueError: a format, scale dtype or K that is not in the limits above.
    """
    _check(weight)
    isa = dot_isa(vector_isa())
    n, k = weight.shape
    layout = PanelLayout(n, isa.lanes, epilogue)
    stored: Int8Weight = "int8_g32" if weight.format.group_size else "int8"
    if weight.format.bits == 4:
        stored = "int4"
    kernel = Int8Kernel(stored, epilogue, has_minimum=weight.minimum is not None)
    tensors = _pack(layout, isa, kernel, weight)
    bias_values = torch.zeros(n, dtype=torch.float32) if bias is None else bias.float()
    num_panels, out_features = layout.num_panels, layout.out_features
    sums_offset = 64 + -(-k // 64) * 64
    row_bytes = sums_offset + -(-k // 2048) * 256
    quantizer = compile_quantize_worker(
        isa, activation_offset(isa, kernel), group_sums(isa, kernel)
    )
    quantize = Stage(
        quantizer, len(QUANTIZE_ARGUMENTS), (k, row_bytes, row_bytes, row_bytes), QUANTIZE_ADDRESSES
    )
    multiply = Stage(
        _worker(isa, kernel),
        len(PANEL_ARGUMENTS),
        (
            *tensors,
            *[0] * (3 - len(tensors)),
            layout.arrange(bias_values).contiguous(),
            k,
            row_bytes,
            4 * out_features,
            *(tensor.nbytes // num_panels for tensor in tensors[:2]),
            num_panels,
            layout.tail,
            0,
        ),
        PANEL_ADDRESSES,
    )
    launch = bind_stages(quantize, multiply)
    get_num_threads = torch.get_num_threads

    def run(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        stride, column_stride = x.stride()
        if columns != k or x.dtype is not torch.float32 or column_stride != 1:
            refuse_rows(x, k)
        y = x.new_empty((rows, out_features))
        # Held until the launch is over: another thread's call must not get this memory.
        scratch = thread_scratch(rows * row_bytes)
        values = scratch.data_ptr()
        grain = -(-num_panels // (4 * get_num_threads()))
        launch(
            (rows, 8, x.data_ptr(), 4 * stride, values + 64, values, values + sums_offset),
            (num_panels, grain, values, y.data_ptr(), rows, 0),
        )
        return y

    return run


def _check(weight: QuantizedWeight) -> None:
    name, k = weight.format.name, weight.shape[1]
    if name not in FORMATS:
        raise ValueError(f"int8 GEMM: required a weight format of {FORMATS}, found {name!r}")
    if k > MAX_K:
        raise ValueError(f"int8 GEMM: required K <= {MAX_K} for int32 sums, found {k}")
    if weight.format.group_size and weight.scale.dtype != torch.float16:
        raise ValueError(f"int8 GEMM: required float16 scales, found {weight.scale.dtype}")


def _pack(
    layout: PanelLayout, isa: VectorIsa, kernel: Int8Kernel, weight: QuantizedWeight
) -> list[torch.Tensor]:
    """Panels, scales and, where there are any, minima or corrections."""
    if kernel.weight == "int4":
        tensors = [pack_dot_int4(layout, weight.data), layout.columns_first(weight.scale)]
        if weight.minimum is not None:
            tensors.append(layout.columns_first(weight.minimum))
        return tensors
    if kernel.weight == "int8_g32":
        # Adding 128 to a byte is turning its highest bit over.
        data = weight.data ^ -128 if isa.has_vnni else weight.data
        return [pack_dot_int8(layout, data), layout.columns_first(weight.scale)]
    scale = layout.arrange(weight.scale.float().view(-1)).contiguous()
    tensors = [pack_dot_int8(layout, weight.data), scale]
    if isa.has_vnni:
        correction = 128 * weight.data.sum(dim=1, dtype=torch.int32)
        tensors.append(layout.arrange(correction).contiguous())
    return tensors


_worker: Callable[[VectorIsa, Int8Kernel], GeneratedWorker] = functools.cache(compile_int8_worker)
