"""How each CPU GEMM implementation is imported and bound. Nothing is imported before `load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hal.candidates import Bind, Kernel
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest

if TYPE_CHECKING:
    import torch

    Weight = torch.Tensor | QuantizedWeight

_Binder = Callable[..., Callable[[Any], Any]]


def _bind_with(binder: _Binder, **fixed: Any) -> Bind:
    """`bind(request, weight=, bias=)` over a kernel's own `bind_…(weight, bias, epilogue)`."""

    def bind(request: GemmRequest, *, weight: Weight, bias: torch.Tensor | None = None) -> Kernel:
        kernel = binder(weight, bias, epilogue(request), **fixed)
        if request.out_dtype in ("", request.dtype):
            return kernel
        return _converting(kernel, request.out_dtype)

    return bind


def _converting(kernel: Kernel, out_dtype: str) -> Kernel:
    from hal.ops.formats import torch_dtype

    dtype = torch_dtype(out_dtype)

    def converted(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = kernel(x).to(dtype)
        return y

    return converted


def epilogue(request: GemmRequest) -> Literal["none", "silu_gated"]:
    """The epilogues that the CPU's candidates have; others are refused by their limits."""
    return "silu_gated" if request.epilogue == "silu_gated" else "none"


def load_generated() -> Bind:
    from hal_kernels.gemm.cpu_generated import bind_generated

    return _bind_with(bind_generated)


def load_generated_int8() -> Bind:
    from hal_kernels.gemm.cpu_generated_int8 import bind_generated_int8

    return _bind_with(bind_generated_int8)


def load_onednn() -> Bind:
    from hal_kernels.gemm.cpu_dense import bind_onednn

    return _bind_with(bind_onednn)


def load_linear() -> Bind:
    from hal_kernels.gemm.cpu_dense import bind_linear

    return _bind_with(bind_linear)


def load_int8pack() -> Bind:
    from hal_kernels.gemm.cpu_weight_only import bind_int8pack

    return _bind_with(bind_int8pack)


def load_int4pack() -> Bind:
    from hal_kernels.gemm.cpu_weight_only import bind_int4pack

    return _bind_with(bind_int4pack)


def load_onednn_int8() -> Bind:
    from hal_kernels.gemm.cpu_w8a8 import bind_onednn_int8

    return _bind_with(bind_onednn_int8)


def load_fbgemm(bits: int) -> Callable[[], Bind]:
    """Activations of that many bits."""

    def load() -> Bind:
        from hal_kernels.gemm.cpu_w8a8 import bind_fbgemm

        return _bind_with(bind_fbgemm, bits=bits)

    return load
