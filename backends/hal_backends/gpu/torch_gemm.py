"""Matrix products by torch: the vendor's BLAS, scaled FP8 and FP4 products, int8, per expert.

Limits after pytorch's aten/src/ATen/native/cuda/{ScaledBlas,GroupedBlas}.cpp: which architectures
a kernel exists for, and shapes. `torch._grouped_mm` runs a loop with a host synchronisation on all
others, so the candidate is for the architectures with the kernel only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.candidates import KernelCandidate, Leaf, SemanticNote, Work
from hal.device import DeviceSpec
from hal.ops.formats import DTYPE_BYTES, FORMATS
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu import torch_gemm_float32
from hal_backends.gpu import torch_gemm_loaders as loaders
from hal_backends.gpu.formats import matrix_feature
from hal_backends.gpu.limits import (
    architecture,
    claimed_architecture,
    feature,
    gather,
    limit,
    multiple,
    scope,
)
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device, work_of
from hal_backends.gpu.semantics import ROUNDED_ACTIVATIONS, ROUNDED_WEIGHTS

_DENSE = ("bfloat16", "float16", "float32")
_HALF = ("bfloat16", "float16")
# Row-wise and tensor-wise scales: cuBLAS or CUTLASS on NVIDIA, hipBLASLt on AMD.
_FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950", "gfx1201")
_GROUPED_ARCHS = ("sm_90", "sm_100", "sm_103", "gfx942", "gfx950")
_MX_ARCHS = ("sm_100", "sm_103", "gfx950")
_INT8_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """The BLAS of any platform; the scaled products where torch has them."""
    if op == "gemm":
        offers = [
            _linear(device),
            *torch_gemm_float32.offers(device, blas_tier),
            _dequantize(device),
        ]
        if device.backend in ("nvidia", "amd"):
            offers += [_fp8_channel(device), _mx(device)]
        if device.backend == "nvidia":
            offers += [_fp8_block128(device), _nvfp4(device), _int8(device)]
        return on_device(offers, op, device)
    if op == "grouped_gemm":
        offers = [_per_expert(device), _dequantize_per_expert(device)]
        if device.backend in ("nvidia", "amd"):
            offers.append(_grouped(device))
        return on_device(offers, op, device)
    return ()


def _aten(name: str) -> tuple[Leaf, ...]:
    return (Leaf(kind="aten_op", name=f"aten::{name}"),)


def _format(r: GemmRequest | GroupedGemmRequest, *names: str) -> list[Reason]:
    return scope("weight format", r.weight_format.name, names)


def _activation_bytes(r: GemmRequest | GroupedGemmRequest, tokens: int) -> float:
    """An activation after the product writes and reads its result once more."""
    return 0.0 if r.epilogue == "none" else 2.0 * tokens * r.n * DTYPE_BYTES[r.dtype]


def blas_tier(device: DeviceSpec) -> Tier:
    """The vendor's BLAS is native where the device is known to have a 16-bit matrix unit."""
    return Tier.NATIVE if "matrix.bfloat16" in device.features else Tier.TUNED


def _linear(device: DeviceSpec) -> Offer:
    """F.linear rounds its result to the operands' dtype: a float32 result of 16-bit operands (a
    router's scores, logits) would have lost its bits before it is widened."""

    def check(r: GemmRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, _DENSE),
            _format(r, r.dtype),
            scope("out_dtype", r.out_dtype or r.dtype, (r.dtype,)),
        )

    def work(r: GemmRequest, tokens: int) -> Work:
        return work_of(r, tokens, unit=r.dtype, more_bytes=_activation_bytes(r, tokens))

    return Offer(
        op="gemm",
        implementation="torch_linear",
        tier=blas_tier(device),
        summary="the vendor's BLAS through torch's F.linear",
        check=check,
        load=loaders.load_linear,
        leaf=_aten("mm"),
        work=work,
        is_graph_safe=True,
    )


_QUANTISED = tuple(name for name, f in FORMATS.items() if not f.is_dense)


# Roundings whose scales change no mantissa, or leave few enough bits for bfloat16.
_EXACT_ROUNDINGS = ("fp8_group128_ue8m0", "mxfp8_group32", "mxfp4_group32", "nvfp4_group16")


def dequantize_notes(r: GemmRequest | GroupedGemmRequest) -> Sequence[SemanticNote]:
    """What is lost when both operands are widened to the activations' dtype before the product.

    A power of two changes no mantissa, and neither e4m3, e2m1 nor e2m1 times an e4m3 scale has
    more bits than bfloat16; a float32 scale has.
    """
    stored = r.weight_format
    if r.dtype == "float32":
        return ()
    is_wide = r.dtype == "bfloat16"
    is_exact = stored.scale_dtype in ("ue8m0", "e4m3") and is_wide
    notes = [] if is_exact else [ROUNDED_WEIGHTS]
    if stored.activation != "float" and not (is_wide and stored.activation in _EXACT_ROUNDINGS):
        notes.append(ROUNDED_ACTIVATIONS)
    return notes


def _dequantize_work(r: GemmRequest | GroupedGemmRequest, tokens: int, experts: int) -> Work:
    """The widened weight is written and read: twice its 16-bit size, with a read of what is
    stored."""
    wide = 2.0 * experts * r.n * r.k * DTYPE_BYTES[r.dtype]
    return work_of(r, tokens, unit=r.dtype, more_bytes=wide + _activation_bytes(r, tokens))


def _dequantize(device: DeviceSpec) -> Offer:
    return Offer(
        op="gemm",
        implementation="torch_dequantize_linear",
        tier=Tier.PORTABLE,
        summary="widens both operands to 16 bits at each call, then the vendor's BLAS",
        check=lambda r: gather(scope("dtype", r.dtype, _DENSE), _format(r, *_QUANTISED)),
        load=loaders.load_dequantize_linear,
        leaf=_aten("mm"),
        notes=dequantize_notes,
        work=lambda r, tokens: _dequantize_work(r, tokens, 1),
    )


def _shape16(r: GemmRequest) -> list[Reason]:
    return gather(scope("dtype", r.dtype, _HALF), multiple("K", r.k, 16), multiple("N", r.n, 16))


def _matrix(device: DeviceSpec, r: GemmRequest | GroupedGemmRequest) -> list[Reason]:
    needed = matrix_feature(r, device)
    return feature(device, needed) if needed else []


def _scaled(
    device: DeviceSpec,
    name: str,
    formats: Sequence[str],
    summary: str,
    more: Callable[[GemmRequest], Sequence[Reason]],
    load: Callable[[], object],
) -> Offer:
    def check(r: GemmRequest) -> list[Reason]:
        return gather(_format(r, *formats), _shape16(r), _matrix(device, r), more(r))

    return Offer(
        op="gemm",
        implementation=f"torch_scaled_mm_{name}",
        tier=Tier.NATIVE,
        summary=f"{summary}; {NOT_RUN}",
        check=check,
        load=load,  # type: ignore[arg-type]
        leaf=_aten("_scaled_mm_v2"),
        requires=("torch>=2.10",),
    )


def _fp8_channel(device: DeviceSpec) -> Offer:
    def more(r: GemmRequest) -> list[Reason]:
        return gather(
            architecture(device, _FP8_ARCHS, why="torch's row-wise scaled product"),
            limit("dtype", r.dtype, "bfloat16", is_met=r.dtype == "bfloat16"),
        )

    return _scaled(
        device,
        "rowwise",
        ("fp8_channel_a8",),
        "FP8 with one scale per row and channel: cuBLAS, CUTLASS or hipBLASLt",
        more,
        loaders.load_scaled_rowwise(device),
    )


def _fp8_block128(device: DeviceSpec) -> Offer:
    def more(r: GemmRequest) -> list[Reason]:
        return gather(
            architecture(device, ("sm_90",), why="cuBLAS has 128x128 scales on Hopper only"),
            multiple("K", r.k, 128),
            multiple("N", r.n, 128),
        )

    return _scaled(
        device,
        "block128",
        ("fp8_block128_a8", "fp8_block128_ue8m0_a8"),
        "FP8 with 128x128 weight blocks and 1x128 groups of activations: cuBLAS 12.9",
        more,
        loaders.load_scaled_block128,
    )


def _mx(device: DeviceSpec) -> Offer:
    def more(r: GemmRequest) -> list[Reason]:
        return gather(
            claimed_architecture(
                device, _MX_ARCHS, ("sm_120",), why="torch's product with a power of two per 32"
            ),
            multiple("K", r.k, 128),
            multiple("N", r.n, 128),
        )

    return _scaled(
        device,
        "mx",
        ("fp8_block32_ue8m0_a8",),
        "MXFP8: one power of two per 32 values, 32x32 blocks spread along the rows",
        more,
        loaders.load_scaled_mx(device),
    )


def _nvfp4(device: DeviceSpec) -> Offer:
    def more(r: GemmRequest) -> list[Reason]:
        return gather(
            claimed_architecture(
                device, ("sm_100", "sm_103"), ("sm_120",), why="torch's product of NVFP4"
            ),
            multiple("K", r.k, 128),
            multiple("N", r.n, 128),
        )

    return _scaled(
        device,
        "nvfp4",
        ("nvfp4_a4",),
        "NVFP4: groups of 16 with e4m3 scales, weights and activations",
        more,
        loaders.load_scaled_nvfp4,
    )


def _int8(device: DeviceSpec) -> Offer:
    def check(r: GemmRequest) -> list[Reason]:
        return gather(
            _format(r, "int8_channel_a8"),
            scope("dtype", r.dtype, _DENSE),
            _matrix(device, r),
            # sm_103's integer rate is a small part of its others: it is never the fast path there.
            architecture(device, _INT8_ARCHS, why="cuBLASLt's int8 product at full rate"),
            multiple("K", r.k, 8),
            multiple("N", r.n, 8),
        )

    def work(r: GemmRequest, tokens: int) -> Work:
        """The int32 product is written and read before the scales."""
        return work_of(r, tokens, unit="int8", more_bytes=2.0 * tokens * r.n * 4)

    return Offer(
        op="gemm",
        implementation="torch_int_mm",
        tier=Tier.TUNED,
        summary=f"torch._int_mm (cuBLASLt), scales afterwards; {NOT_RUN}",
        check=check,
        load=loaders.load_int_mm,
        leaf=_aten("_int_mm"),
        work=work,
    )


def _grouped(device: DeviceSpec) -> Offer:
    def check(r: GroupedGemmRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, ("bfloat16",)),
            _format(r, "bfloat16"),
            architecture(
                device, _GROUPED_ARCHS, why="torch has a grouped kernel; it loops on all others"
            ),
            multiple("K", r.k, 16),
            multiple("N", r.n, 16),
        )

    return Offer(
        op="grouped_gemm",
        implementation="torch_grouped_mm",
        tier=Tier.NATIVE,
        summary=f"torch._grouped_mm: CUTLASS or Composable Kernel; {NOT_RUN}",
        check=check,
        load=loaders.load_grouped_mm,
        leaf=_aten("_grouped_mm"),
        requires=("torch>=2.8",),
        is_graph_safe=True,
    )


def _per_expert(device: DeviceSpec) -> Offer:
    return Offer(
        op="grouped_gemm",
        implementation="torch_per_expert",
        tier=Tier.PORTABLE,
        summary="one F.linear per expert that has rows; waits for the row counts on the host",
        check=lambda r: gather(scope("dtype", r.dtype, _DENSE), _format(r, r.dtype)),
        load=loaders.load_per_expert,
        leaf=_aten("mm"),
        work=lambda r, tokens: work_of(
            r, tokens, unit=r.dtype, more_bytes=_activation_bytes(r, tokens * r.experts_per_token)
        ),
    )


def _dequantize_per_expert(device: DeviceSpec) -> Offer:
    def work(r: GroupedGemmRequest, tokens: int) -> Work:
        touched = min(r.num_experts, tokens * r.experts_per_token)
        return _dequantize_work(r, tokens, touched)

    return Offer(
        op="grouped_gemm",
        implementation="torch_dequantize_per_expert",
        tier=Tier.PORTABLE,
        summary="widens rows and each expert's weight at each call, then one F.linear per expert",
        check=lambda r: gather(scope("dtype", r.dtype, _DENSE), _format(r, *_QUANTISED)),
        load=loaders.load_per_expert,
        leaf=_aten("mm"),
        notes=dequantize_notes,
        work=work,
    )
