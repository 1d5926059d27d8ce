"""Matrix products on the CPU: generated kernels and torch's own, each with its exact limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.limits import any_feature, gather, limit, scope, vector_unit
from hal_backends.cpu.profile import load_profile

if TYPE_CHECKING:
    import torch

_EPILOGUES = ("none", "silu_gated")
_FLOAT_FORMATS = ("float32", "int8_channel", "int8_g32", "int4_g32", "int4_g32_asym")
_INT8_FORMATS = ("int8_channel_a8", "int4_g32_a8", "int4_g32_asym_a8")
_MAX_INT8_K = 131071

Check = Callable[[GemmRequest], Sequence[Reason]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    name: str
    tier: Tier
    summary: str
    check: Check
    load: Callable[[], Bind]
    leaf: tuple[Leaf, ...]


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    profile = load_profile(device.arch)

    def estimate(name: str) -> Callable[[GemmRequest, int], float | None]:
        def estimate_us(request: GemmRequest, tokens: int) -> float | None:
            if profile is None:
                return None
            key = f"{name}/{request.weight_format.name}"
            return profile.estimate_us(key, request.n, request.k, tokens)

        return estimate_us

    return tuple(
        KernelCandidate(
            name=offer.name,
            op="gemm",
            tier=offer.tier,
            summary=offer.summary,
            not_supported_reasons=offer.check,
            load=offer.load,
            estimate_us=estimate(offer.name),
            leaf=offer.leaf,
            weight_layout=offer.name,
        )
        for offer in _offers(device)
    )


def _shape(r: GemmRequest, dtypes: Collection[str], formats: Collection[str]) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, dtypes),
        scope("weight format", r.weight_format.name, formats),
        limit("epilogue", r.epilogue, " or ".join(_EPILOGUES), is_met=r.epilogue in _EPILOGUES),
    )


def _groups(r: GemmRequest) -> list[Reason]:
    group = r.weight_format.group_size
    return limit("K", r.k, f"a multiple of {group}", is_met=not group or r.k % group == 0)


def _load_generated() -> Bind:
    from hal_kernels.gemm.cpu_generated import bind_generated

    def bind(
        request: GemmRequest,
        *,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
    ) -> Kernel:
        return bind_generated(weight, bias, _epilogue(request))

    return bind


def _load_generated_int8() -> Bind:
    from hal_kernels.gemm.cpu_generated_int8 import bind_generated_int8

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        return bind_generated_int8(weight, bias, _epilogue(request))

    return bind


def _epilogue(request: GemmRequest) -> Literal["none", "silu_gated"]:
    return "silu_gated" if request.epilogue == "silu_gated" else "none"


def _load_linear() -> Bind:
    import torch.nn.functional as functional

    from hal.ops.formats import torch_dtype
    from hal_kernels.activation.cpu import bind_gated_activation

    def bind(
        request: GemmRequest, *, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Kernel:
        out_dtype = torch_dtype(request.out_dtype or request.dtype)
        gate = None
        if request.epilogue == "silu_gated":
            gate = bind_gated_activation(width=request.n // 2, dtype=torch_dtype(request.dtype))

        def product(x: torch.Tensor) -> torch.Tensor:
            y = functional.linear(x, weight, bias)
            return (y if gate is None else gate(y)).to(out_dtype)

        return product

    return bind


def _offers(device: DeviceSpec) -> Sequence[_Offer]:
    return (
        _Offer(
            name="cpu.gemm.jit",
            tier=Tier.NATIVE,
            summary="generated for this instruction set; weights widened in registers",
            check=lambda r: gather(
                _shape(r, ("float32",), _FLOAT_FORMATS), vector_unit(device), _groups(r)
            ),
            load=_load_generated,
            leaf=(Leaf(kind="instruction", name="vfmadd231ps"),),
        ),
        _Offer(
            name="cpu.gemm.jit_int8",
            tier=Tier.NATIVE,
            summary="generated integer dot products, activations rounded per token",
            check=lambda r: gather(
                _shape(r, ("float32",), _INT8_FORMATS),
                vector_unit(device),
                _groups(r),
                limit("K", r.k, f"at most {_MAX_INT8_K}", is_met=r.k <= _MAX_INT8_K),
            ),
            load=_load_generated_int8,
            leaf=(Leaf(kind="instruction", name="vpdpbusd or vpmaddubsw"),),
        ),
        _Offer(
            name="cpu.gemm.linear_fp32",
            tier=Tier.NATIVE,
            summary="torch's F.linear in float32 (MKL)",
            check=lambda r: gather(_shape(r, ("float32",), ("float32",)), vector_unit(device)),
            load=_load_linear,
            leaf=(Leaf(kind="aten_op", name="aten::mm"), Leaf(kind="aten_op", name="aten::addmm")),
        ),
        _Offer(
            name="cpu.gemm.linear_bf16",
            tier=Tier.NATIVE,
            summary="torch's F.linear in bfloat16 (oneDNN) on the CPU's bfloat16 unit",
            check=lambda r: gather(
                _shape(r, ("bfloat16",), ("bfloat16",)),
                any_feature(device, "amx_bf16", "avx512_bf16"),
            ),
            load=_load_linear,
            leaf=(Leaf(kind="aten_op", name="aten::mm"), Leaf(kind="aten_op", name="aten::addmm")),
        ),
    )
