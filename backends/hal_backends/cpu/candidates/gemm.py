"""Matrix products on the CPU: which implementations there are, each with its exact limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hal.candidates import Bind, KernelCandidate, Leaf, SemanticNote
from hal.device import DeviceSpec
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.candidates import gemm_loaders as loaders
from hal_backends.cpu.limits import any_feature, gather, limit, scope, vector_unit
from hal_backends.cpu.profile import load_profile
from hal_kernels.gemm.semantics import (
    BFLOAT16_ACTIVATIONS,
    BFLOAT16_SCALES,
    FOLDED_MINIMUM,
    INT7_ACTIVATIONS,
)

# Formats by what they do to the activations and whether the weight is dense.
DENSE = ("float32", "bfloat16", "float16")
WEIGHT_ONLY = ("int8_channel", "int8_g32", "int4_g32", "int4_g32_asym")
# Groups of 64 and 128 have no generated kernel: torch's rounds, or the reference widens them.
FOUR_BITS = (
    "int4_g32", "int4_g32_asym", "int4_g64", "int4_g64_zero", "int4_g128", "int4_g128_zero",
)  # fmt: skip
INT8_ACTIVATIONS = ("int8_channel_a8", "int8_g32_a8", "int4_g32_a8", "int4_g32_asym_a8")
_EPILOGUES = ("none", "silu_gated")
_MAX_INT8_K = 65535  # beyond it an int32 sum of u8 x s8 products can overflow

Check = Callable[[GemmRequest], Sequence[Reason]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    name: str
    tier: Tier
    summary: str
    check: Check
    load: Callable[[], Bind]
    leaf: tuple[Leaf, ...]
    notes: tuple[SemanticNote, ...] = ()
    is_graph_safe: bool = False  # launches of our own, which the runtime records


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
            semantic_notes=_noting(offer),
            weight_layout=offer.name,
            is_graph_safe=offer.is_graph_safe,
        )
        for offer in _offers(device)
    )


def _shape(r: GemmRequest, dtypes: Collection[str], formats: Collection[str]) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, dtypes),
        scope("weight format", r.weight_format.name, formats),
        limit("epilogue", r.epilogue, " or ".join(_EPILOGUES), is_met=r.epilogue in _EPILOGUES),
    )


def _noting(offer: _Offer) -> Callable[[GemmRequest], Sequence[SemanticNote]]:
    """The minimum only matters where the format has one."""

    def notes(request: GemmRequest) -> Sequence[SemanticNote]:
        symmetric = request.weight_format.is_symmetric
        return [n for n in offer.notes if n is not FOLDED_MINIMUM or not symmetric]

    return notes


def _groups(r: GemmRequest) -> list[Reason]:
    group = r.weight_format.group_size
    return limit("K", r.k, f"a multiple of {group}", is_met=not group or r.k % group == 0)


def _offers(device: DeviceSpec) -> Sequence[_Offer]:
    return (*_dense(device), *_weight_only(device), *_int8_activations(device))


def _generated(instruction: str) -> tuple[Leaf, ...]:
    """Of machine code that is generated here."""
    return (
        Leaf(kind="symbol", name="hal_kernels.gemm"),
        Leaf(kind="instruction", name=instruction),
    )


def _dense(device: DeviceSpec) -> Sequence[_Offer]:
    mm = (Leaf(kind="aten_op", name="aten::mm"), Leaf(kind="aten_op", name="aten::addmm"))
    return (
        _Offer(
            name="cpu.gemm.jit",
            tier=Tier.NATIVE,
            summary="generated for this instruction set; weights widened in registers, exactly",
            check=lambda r: gather(
                _shape(r, ("float32",), (*DENSE, *WEIGHT_ONLY)), vector_unit(device), _groups(r)
            ),
            load=loaders.load_generated,
            leaf=_generated("vfmadd231ps"),
            is_graph_safe=True,
        ),
        _Offer(
            name="cpu.gemm.onednn_fp32",
            tier=Tier.NATIVE,
            summary="oneDNN with a packed weight; silu and the gate fused",
            check=lambda r: gather(_shape(r, ("float32",), ("float32",)), vector_unit(device)),
            load=loaders.load_onednn,
            leaf=(Leaf(kind="aten_op", name="mkldnn::_linear_pointwise"),),
        ),
        _Offer(
            name="cpu.gemm.linear_fp32",
            tier=Tier.NATIVE,
            summary="torch's F.linear in float32 (MKL)",
            check=lambda r: gather(_shape(r, ("float32",), ("float32",)), vector_unit(device)),
            load=loaders.load_linear,
            leaf=mm,
        ),
        _Offer(
            name="cpu.gemm.onednn_bf16",
            tier=Tier.NATIVE,
            summary="oneDNN with a packed weight on the CPU's bfloat16 unit",
            check=lambda r: gather(
                _shape(r, ("bfloat16",), ("bfloat16",)),
                any_feature(device, "amx_bf16", "avx512_bf16"),
            ),
            load=loaders.load_onednn,
            leaf=(Leaf(kind="aten_op", name="mkldnn::_linear_pointwise"),),
        ),
        _Offer(
            name="cpu.gemm.linear_bf16",
            tier=Tier.NATIVE,
            summary="torch's F.linear on the CPU's bfloat16 unit",
            check=lambda r: gather(
                _shape(r, ("bfloat16",), ("bfloat16",)),
                any_feature(device, "amx_bf16", "avx512_bf16"),
            ),
            load=loaders.load_linear,
            leaf=mm,
        ),
    )


def _weight_only(device: DeviceSpec) -> Sequence[_Offer]:
    """torch's packed kernels. They round to bfloat16, which nothing but the user may choose."""
    dtypes = ("float32", "bfloat16")
    return (
        _Offer(
            name="cpu.gemm.int8pack",
            tier=Tier.TUNED,
            summary="torch's packed int8 weight-only product",
            check=lambda r: _shape(r, dtypes, ("int8_channel",)),
            load=loaders.load_int8pack,
            leaf=(Leaf(kind="aten_op", name="aten::_weight_int8pack_mm"),),
            notes=(BFLOAT16_ACTIVATIONS, BFLOAT16_SCALES),
        ),
        _Offer(
            name="cpu.gemm.int4pack",
            tier=Tier.TUNED,
            summary="torch's packed int4 weight-only product",
            check=lambda r: gather(
                _shape(r, dtypes, FOUR_BITS),
                limit("N", r.n, "a multiple of 16", is_met=r.n % 16 == 0),
                _groups(r),
            ),
            load=loaders.load_int4pack,
            leaf=(Leaf(kind="aten_op", name="aten::_weight_int4pack_mm_for_cpu"),),
            notes=(BFLOAT16_ACTIVATIONS, BFLOAT16_SCALES, FOLDED_MINIMUM),
        ),
    )


def _int8_activations(device: DeviceSpec) -> Sequence[_Offer]:
    fbgemm = (
        Leaf(kind="aten_op", name="quantized::linear_with_input_q_dq_qweight_dq_output_fp32"),
    )
    return (
        _Offer(
            name="cpu.gemm.jit_int8",
            tier=Tier.NATIVE,
            summary="generated integer dot products, activations rounded per token",
            check=lambda r: gather(
                _shape(r, ("float32",), INT8_ACTIVATIONS),
                vector_unit(device),
                _groups(r),
                limit("K", r.k, f"at most {_MAX_INT8_K}", is_met=r.k <= _MAX_INT8_K),
            ),
            load=loaders.load_generated_int8,
            leaf=_generated("vpdpbusd|vpmaddubsw"),
            is_graph_safe=True,
        ),
        _Offer(
            name="cpu.gemm.onednn_int8",
            tier=Tier.NATIVE,
            summary="oneDNN's int8 product (AMX or VNNI), activations rounded per token",
            check=lambda r: gather(
                _shape(r, ("float32",), ("int8_channel_a8",)),
                vector_unit(device),
                any_feature(device, "amx_int8", "avx512_vnni", "avx_vnni"),
            ),
            load=loaders.load_onednn_int8,
            leaf=(Leaf(kind="aten_op", name="onednn::qlinear_pointwise"),),
        ),
        _Offer(
            name="cpu.gemm.fbgemm_int8",
            tier=Tier.NATIVE,
            summary="FBGEMM's int8 product (VNNI), activations normalised and rounded per token",
            check=lambda r: gather(
                _shape(r, ("float32",), ("int8_channel_a8",)), any_feature(device, "avx512_vnni")
            ),
            load=loaders.load_fbgemm(8),
            leaf=fbgemm,
        ),
        _Offer(
            name="cpu.gemm.fbgemm_int7",
            tier=Tier.TUNED,
            summary="FBGEMM's int8 product without VNNI: activations rounded to 7 bits",
            check=lambda r: gather(
                _shape(r, ("float32",), ("int8_channel_a8",)), vector_unit(device)
            ),
            load=loaders.load_fbgemm(7),
            leaf=fbgemm,
            notes=(INT7_ACTIVATIONS,),
        ),
    )
