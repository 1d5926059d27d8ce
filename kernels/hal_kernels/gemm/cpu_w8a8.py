"""w8a8 GEMM on the CPU by torch's libraries: FBGEMM and oneDNN. Format int8_channel_a8.

Activations are quantised by row, so a row never depends on its neighbours (FBGEMM's own
linear_dynamic has one scale for the batch). FBGEMM takes one fixed scale: each row is divided by
its largest magnitude before and multiplied after.

FBGEMM without VNNI adds byte products in int16, which saturate with 8-bit activations; there 7
bits are used (`INT7_ACTIVATIONS`), a different precision that must be asked for (bits=7).
"""

from __future__ import annotations

import warnings

import torch

from hal.ops.formats import QuantizedWeight
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import rows_to_read
from hal_kernels.gemm.cpu_dense import Kernel, Requirements, activate
from hal_kernels.gemm.isa import cpu_flags, jit_requirements, vector_isa
from hal_kernels.gemm.jit_panel import PanelEpilogue
from hal_kernels.gemm.jit_quantize import QUANTIZE_ARGUMENTS, compile_quantize_worker

FORMATS = ("int8_channel_a8",)


def fbgemm_requirements(bits: int = 8) -> Requirements:
    """Why FBGEMM cannot serve activations of ``bits`` (8 or 7); empty if it can."""
    reasons: Requirements = []
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        found = ", ".join(torch.backends.quantized.supported_engines)
        reasons.append(("torch quantized engine", "fbgemm", found))
    if bits == 8 and "avx512vnni" not in cpu_flags():
        reasons.append(("cpu flags", "avx512vnni, for byte products that do not saturate", "none"))
    return reasons


def onednn_requirements() -> Requirements:
    """Why oneDNN's int8 product cannot run here; empty if it can."""
    reasons = jit_requirements()
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        reasons.append(("torch operator", "onednn::qlinear_pointwise", "not registered"))
    if not {"avx512vnni", "avxvnni", "amx-int8"} & cpu_flags():
        required = "avx512vnni, avxvnni or amx-int8, for byte products that do not saturate"
        reasons.append(("cpu flags", required, "none of them"))
    return reasons


def bind_fbgemm(
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    epilogue: PanelEpilogue = "none",
    *,
    bits: int = 8,
) -> Kernel:
    """kernel(x[T, K] float32) -> y[T, N] (gated: [T, N/2]); activations rounded to ``bits``.

    Raises:
        ValueError: another format, or bits other than 7 and 8.
    """
    _check(weight)
    if bits not in (7, 8):
        raise ValueError(f"FBGEMM w8a8: required bits 7 or 8, found {bits}")
    n = weight.shape[0]
    scale = weight.scale.double().view(-1)
    zero_points = torch.zeros(n, dtype=torch.long)
    with warnings.catch_warnings():
        # The tensor only lives until FBGEMM has packed it; there is no other way to its packer.
        warnings.filterwarnings(
            "ignore", message=".*quantized tensor creation", category=UserWarning
        )
        stored = torch._make_per_channel_quantized_tensor(weight.data, scale, zero_points, 0)
    packed = torch.ops.quantized.linear_prepack(stored, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    zero_point = 1 << (bits - 1)
    step = 1.0 / (zero_point - 1)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        # The smallest normal number stands in for the peak of a zero row.
        peak = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=1.2e-38)
        y = multiply(x / peak, step, zero_point, packed).mul_(peak)
        return activate(epilogue, y if bias is None else y.add_(bias))

    return kernel


def bind_onednn_int8(
    weight: QuantizedWeight, bias: torch.Tensor | None = None, epilogue: PanelEpilogue = "none"
) -> Kernel:
    """kernel(x[T, K] float32) -> y[T, N] (gated: [T, N/2]); rounding as `quantize_rows`.

    Raises:
        ValueError: another format.
        RuntimeError: the CPU lacks AVX2.
    """
    _check(weight)
    n, k = weight.shape
    packed = torch.ops.onednn.qlinear_prepack(weight.data.contiguous(), None)
    scale = weight.scale.float().view(-1).contiguous()
    zero_points = torch.zeros(n, dtype=torch.int32)
    multiply = torch.ops.onednn.qlinear_pointwise
    worker = compile_quantize_worker(vector_isa(), 128, "none")
    quantize = bind_worker(worker, len(QUANTIZE_ARGUMENTS), (k, k, 4, 0))

    def kernel(x: torch.Tensor) -> torch.Tensor:
        x = rows_to_read("int8 product", x, k, torch.float32)
        rows = x.shape[0]
        values = torch.empty((rows, k), dtype=torch.uint8)
        scales = torch.empty((rows, 1))
        quantize(
            rows,
            8,
            x.data_ptr(),
            4 * x.stride(0),
            values.data_ptr(),
            scales.data_ptr(),
            0,
        )
        y = multiply(
            values,
            1.0,
            128,
            packed,
            scale,
            zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        ).mul_(scales)
        return activate(epilogue, y if bias is None else y.add_(bias))

    return kernel


def _check(weight: QuantizedWeight) -> None:
    if weight.format.name not in FORMATS:
        raise ValueError(f"w8a8 GEMM: required a format of {FORMATS}, found {weight.format.name!r}")
