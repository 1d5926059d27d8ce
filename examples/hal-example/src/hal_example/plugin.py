"""The whole backend: what it is, what it finds, what it offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal import hookimpl
from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import Confidence, DetectedDevice, DeviceSpec, Evidence
from hal.hookspecs import BackendInfo
from hal.host import HostProbe
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier

SWITCH = "EXAMPLE_ACCELERATOR"


@hookimpl
def hal_backend_info() -> BackendInfo:
    return BackendInfo(name="example", vendor="example", api_range=">=1.0,<2")


@hookimpl
def hal_detect_devices(host: HostProbe) -> Sequence[DetectedDevice]:
    value = host.environ(SWITCH)
    if not value:
        return ()
    evidence = Evidence(source=f"environment {SWITCH}", found=value)
    return (
        DetectedDevice(
            device_id="example:0",
            vendor="example",
            name="Example Accelerator",
            arch="example1",
            evidence=(evidence,),
        ),
    )


@hookimpl
def hal_describe_device(device: DetectedDevice, host: HostProbe) -> DeviceSpec:
    return DeviceSpec(
        device_id=device.device_id,
        vendor=device.vendor,
        backend="example",
        name=device.name,
        arch=device.arch,
        torch_device="cpu",
        num_cores=1,
        evidence={
            "num_cores": Evidence(source="hal-example", found="1", confidence=Confidence.DECLARED)
        },
    )


@hookimpl
def hal_kernel_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    offers = {"gemm": _gemm, "norm.rms": _norm}
    return (offers[op](),) if op in offers else ()


@hookimpl
def hal_create_runtime(device: DeviceSpec) -> ExampleRuntime:
    return ExampleRuntime()


class ExampleRuntime:
    """One thread of the CPU."""

    num_threads = 1

    @property
    def torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def create_group(self, rank: int, world_size: int, rendezvous: str) -> Any:
        raise RuntimeError(f"hal-example: one rank is required, found {world_size}; drop --tp")

    def free_memory_bytes(self) -> int:
        return 4 << 30

    def synchronize(self) -> None:
        """Nothing is asynchronous."""


def _only_float32(request: GemmRequest | RmsNormRequest) -> list[Reason]:
    """Limits are data: each unmet one says what was required and what was found."""
    if request.dtype == "float32":
        return []
    return [Reason(what="dtype", required="float32", found=request.dtype, kind=ReasonKind.SCOPE)]


def _gemm() -> KernelCandidate:
    def reasons(request: GemmRequest) -> list[Reason]:
        unmet = _only_float32(request)
        if not request.weight_format.is_dense:
            found = request.weight_format.name
            unmet.append(Reason(what="weight format", required="float32", found=found))
        return unmet

    def load() -> Bind:
        import torch

        def bind(request: GemmRequest, *, weight: Any, bias: Any = None) -> Kernel:
            if isinstance(weight, QuantizedWeight):
                raise ValueError("hal-example gemm: a dense weight is required")
            transposed = weight.T.contiguous()  # packed once, at load

            def product(x: Any) -> Any:
                y = x @ transposed if bias is None else torch.addmm(bias, x, transposed)
                if request.epilogue == "silu_gated":
                    gate, up = y.chunk(2, dim=-1)
                    y = torch.nn.functional.silu(gate) * up
                return y

            return product

        return bind

    return KernelCandidate(
        name="example.gemm.matmul",
        op="gemm",
        tier=Tier.TUNED,
        summary="the example's matrix product",
        not_supported_reasons=reasons,
        load=load,
        leaf=(Leaf(kind="aten_op", name="aten::mm"),),
        distribution="hal-example",
    )


def _norm() -> KernelCandidate:
    def load() -> Bind:
        import torch

        def bind(request: RmsNormRequest, *, weight: Any, eps: float) -> Kernel:
            def norm(x: Any) -> Any:
                return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

            def norm_residual(x: Any, residual: Any) -> Any:
                residual = residual.add_(x)
                return norm(residual), residual

            return norm_residual if request.has_residual else norm

        return bind

    return KernelCandidate(
        name="example.norm.rms",
        op="norm.rms",
        tier=Tier.TUNED,
        summary="the example's norm",
        not_supported_reasons=_only_float32,
        load=load,
        leaf=(Leaf(kind="aten_op", name="aten::rms_norm"),),
        distribution="hal-example",
    )
