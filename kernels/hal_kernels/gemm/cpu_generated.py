"""GEMM on the CPU by kernels generated for its ISA, with float32 activations.

Limits: CPU flags avx2, fma, f16c (`isa.jit_requirements`); x float32 with unit stride along K;
weight float32, bfloat16 or float16 [N, K] with any N and K, or a `QuantizedWeight` of format
int8_channel, int8_g32, int4_g32 or int4_g32_asym (K a multiple of 32 for groups, scales float16).
The result is that of the stored weight: no value is requantised and activations are not rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hal.ops.formats import QuantizedWeight
from hal_kernels.cpu_launch import StagedLaunch, bind_stages
from hal_kernels.cpu_launch_memory import Stage
from hal_kernels.gemm.isa import VectorIsa, jit_requirements, vector_isa
from hal_kernels.gemm.jit_float import (
    batch_block_rows,
    compile_batch_worker,
    compile_direct_worker,
    direct_block_rows,
)
from hal_kernels.gemm.jit_float_weights import FloatKernel
from hal_kernels.gemm.jit_ir import GeneratedWorker
from hal_kernels.gemm.jit_panel import PANEL_ADDRESSES, PANEL_ARGUMENTS, PanelEpilogue
from hal_kernels.gemm.pack_rows import pack_rows_worker
from hal_kernels.gemm.packing import PanelLayout, refuse_rows
from hal_kernels.thread_scratch import thread_scratch

Kernel = Callable[[torch.Tensor], torch.Tensor]

DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ("int8_channel", "int8_g32", "int4_g32", "int4_g32_asym")

requirements = jit_requirements

# Blocks of rows up to which converting the weights once a block beats expanding each panel.
_DIRECT_BLOCKS = 2


def bind_generated(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    epilogue: PanelEpilogue = "none",
) -> Kernel:
    """Pack ``weight`` [N, K] and return ``kernel(x[T, K] float32) -> y[T, N]`` (gated: [T, N/2]).

    Raises:
        RuntimeError: the CPU lacks the flags of `requirements`.
        ValueError: a weight that is not in the limits above.
    """
    if isinstance(weight, QuantizedWeight):
        return _bind_quantized(weight, bias, epilogue)
    if weight.dtype not in DENSE_DTYPES:
        raise ValueError(
            f"generated GEMM: required a weight of {DENSE_DTYPES}, found {weight.dtype}"
        )
    isa = vector_isa()
    n, k = weight.shape
    layout = PanelLayout(n, isa.lanes, epilogue)
    name = str(weight.dtype).removeprefix("torch.")
    kernel = FloatKernel(name, epilogue)  # type: ignore[arg-type]  # checked against DENSE_DTYPES
    return _bind_panels(isa, kernel, layout, k, [layout.columns_first(weight)], bias)


def is_exact_in(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every value of ``weight`` survives storage as ``dtype``.

    A checkpoint saved in bfloat16 and loaded as float32 does: kept as bfloat16 it is half the
    memory traffic for the same result.
    """
    return bool(torch.equal(weight, weight.to(dtype).to(weight.dtype)))


def _bind_quantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, epilogue: PanelEpilogue
) -> Kernel:
    name = weight.format.name
    if name not in FORMATS:
        raise ValueError(f"generated GEMM: required a weight format of {FORMATS}, found {name!r}")
    isa = vector_isa()
    n, k = weight.shape
    layout = PanelLayout(n, isa.lanes, epilogue)
    group = weight.format.group_size or 0
    if group and weight.scale.dtype != torch.float16:
        raise ValueError(f"generated GEMM: required float16 scales, found {weight.scale.dtype}")
    kernel = FloatKernel(
        "int4" if weight.format.bits == 4 else "int8",
        epilogue,
        group_size=group,
        has_minimum=weight.minimum is not None,
    )
    tensors = [layout.columns_first(weight.data)]
    for part in (weight.scale, weight.minimum):
        if part is not None:
            tensors.append(layout.columns_first(part if group else part.float().view(n, 1)))
    return _bind_panels(isa, kernel, layout, k, tensors, bias)


def _bind_panels(
    isa: VectorIsa,
    kernel: FloatKernel,
    layout: PanelLayout,
    k: int,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
) -> Kernel:
    """``tensors``: panels, then scales, then minima."""
    direct_rows, batch_rows = direct_block_rows(isa, kernel), batch_block_rows(isa)
    is_expanded = kernel.weight != "float32"
    scratch_bytes = k * 2 * layout.lanes * 4 if is_expanded else 0
    constants = _panel_constants(layout, k, tensors, bias, scratch_bytes)
    direct = _bind_packed(_direct_worker(isa, kernel), k, constants)
    batch = _bind_packed(_batch_worker(isa, kernel), k, constants) if is_expanded else direct
    out_features, num_panels = layout.out_features, layout.num_panels
    get_num_threads = torch.get_num_threads

    def run(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        stride, column_stride = x.stride()
        if columns != k or x.dtype is not torch.float32 or column_stride != 1:
            refuse_rows(x, k)
        y = x.new_empty((rows, out_features))
        threads = get_num_threads()
        is_direct = rows <= _DIRECT_BLOCKS * direct_rows
        launch, block_rows = (direct, direct_rows) if is_direct else (batch, batch_rows)
        source, target = x.data_ptr(), y.data_ptr()
        panels = (num_panels, -(-num_panels // (4 * threads)))
        if rows == 1:
            launch((0, 0, 0, 0, 0, 0, 0), (*panels, source, target, 1, 0))
            return y
        packed_bytes = 4 * rows * k
        # Held until the launch is over: another thread's call must not get this memory.
        scratch = thread_scratch(packed_bytes + 64 + threads * scratch_bytes)
        packed = scratch.data_ptr()
        expanded = packed + packed_bytes + -packed_bytes % 64
        num_blocks = -(-rows // block_rows)
        launch(
            (num_blocks, 1, source, packed, rows, stride, num_blocks),
            (*panels, packed, target, rows, expanded),
        )
        return y

    return run


def _bind_packed(worker: GeneratedWorker, k: int, constants: tuple[Any, ...]) -> StagedLaunch:
    """Packing of the rows, then ``worker``."""
    pack = Stage(pack_rows_worker(), 5, (k,), addresses=(0, 1))
    return bind_stages(pack, Stage(worker, len(PANEL_ARGUMENTS), constants, PANEL_ADDRESSES))


def _panel_constants(
    layout: PanelLayout,
    k: int,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    scratch_bytes: int,
) -> tuple[int | torch.Tensor, ...]:
    """`PANEL_CONSTANTS` of a weight; x is packed without gaps."""
    bias_values = torch.zeros(layout.n, dtype=torch.float32) if bias is None else bias.float()
    panel_bytes, scale_bytes = (
        tensors[i].nbytes // layout.num_panels if i < len(tensors) else 0 for i in range(2)
    )
    return (
        *tensors,
        *[0] * (3 - len(tensors)),
        layout.arrange(bias_values).contiguous(),
        k,
        4 * k,
        4 * layout.out_features,
        panel_bytes,
        scale_bytes,
        layout.num_panels,
        layout.tail,
        scratch_bytes,
    )


_direct_worker: Callable[[VectorIsa, FloatKernel], GeneratedWorker] = functools.cache(
    compile_direct_worker
)
_batch_worker: Callable[[VectorIsa, FloatKernel], GeneratedWorker] = functools.cache(
    compile_batch_worker
)
