"""Products per expert and of two activations on the CPU: MKL through torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.gemm import GroupedGemmRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.limits import any_feature, gather, limit, scope, vector_unit

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16")
_EPILOGUES = ("none", "silu", "silu_gated")


def _unit(device: DeviceSpec, dtype: str) -> list[Reason]:
    """bfloat16 is only worth choosing where the CPU has a unit for it."""
    needed = any_feature(device, "amx_bf16", "avx512_bf16") if dtype == "bfloat16" else []
    return gather(scope("dtype", dtype, _DTYPES), vector_unit(device), needed)


def _load_per_expert() -> Bind:
    from hal_kernels.grouped_gemm.cpu import bind_per_expert

    def bind(request: GroupedGemmRequest, *, weight: torch.Tensor) -> Kernel:
        return bind_per_expert(weight, request.epilogue, request.clamp)

    return bind


def _load_matmul() -> Bind:
    import torch

    def bind(request: BatchedGemmRequest) -> Kernel:
        if not request.equation:
            return torch.matmul

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.einsum(request.equation, a, b)

        return product

    return bind


def grouped_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.grouped_gemm.per_expert",
            op="grouped_gemm",
            tier=Tier.TUNED,
            summary="MKL or oneDNN once per expert that has rows; weights as they are",
            not_supported_reasons=lambda r: gather(
                _unit(device, r.dtype),
                scope("weight format", r.weight_format.name, (r.dtype,)),
                limit(
                    "epilogue",
                    r.epilogue,
                    " or ".join(_EPILOGUES),
                    is_met=r.epilogue in _EPILOGUES,
                ),
            ),
            load=_load_per_expert,
            leaf=(Leaf(kind="aten_op", name="aten::mm"),),
        ),
    )


def batched_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.batched_gemm.matmul",
            op="batched_gemm",
            tier=Tier.NATIVE,
            summary="torch.matmul or einsum: MKL or oneDNN for each matrix of the batch",
            not_supported_reasons=lambda r: _unit(device, r.dtype),
            load=_load_matmul,
            leaf=(Leaf(kind="aten_op", name="aten::bmm"), Leaf(kind="aten_op", name="aten::mm")),
        ),
    )
