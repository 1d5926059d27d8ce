"""The specialisations of the Triton norms that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

# Of padded rows that stay in registers; a narrower one has no more of anything than the next.
WIDTHS = (128, 1024, 8192, 16384)
STEP = 4096  # columns of a step over a wider row
# Name in a configuration -> (residual, int8): the one with int8 has a residual too.
FORMS: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {"plain": (False, False), "residual": (True, False), "int8": (True, True)}
)
_MODULE = "hal_kernels.norm.triton_kernels"
_STRIDES = ("stride_x", "stride_residual", "stride_y", "H")


def launch_tile(block: int, warp_size: int) -> tuple[int, int]:
    """(rows, warps) of a program over rows of `block` columns, a power of two.

    A thread has eight values, of which 16 bits each are one load of 16 bytes, and of rows over
    4096 sixteen: so many that their registers still let all warps of a multiprocessor in. Two warps
    at least, as it holds half as many blocks as warps: short rows share a program.
    """
    values = 8 if block <= 4096 else 16
    return max(1, 16 * warp_size // block), max(2, block // (values * warp_size))


def _variant(
    target: Target, dtype: str, config: str, *, has_residual: bool, is_quantised: bool, width: int
) -> KernelVariant:
    rows, warps = launch_tile(width, target.warp_size)
    is_kept = not config.startswith("looped")
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            **dict.fromkeys(("x_RH_ptr", "residual_RH_ptr", "weight_H_ptr"), dtype),
            "y_RH_ptr": "int8" if is_quantised else dtype,
            "scale_R_ptr": "float32",
        },
        scalars={
            **dict.fromkeys((*_STRIDES, *(("R",) if is_kept else ())), "i32"),
            "eps": "fp32",
        },
        divisible=frozenset(_STRIDES),
        constants={
            **({"BLOCK_R": rows} if is_kept else {}),
            "BLOCK_H": width,
            "HAS_RESIDUAL": has_residual,
            "IS_QUANTISED": is_quantised,
        },
        num_warps=warps,
    )


def _forms() -> Iterator[tuple[str, str, bool, bool]]:
    for dtype in ACTIVATION_DTYPES:
        for form, (has_residual, is_quantised) in FORMS.items():
            yield dtype, form, has_residual, is_quantised


def _rms_norm(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            target, dtype, f"h{width}-{form}",
            has_residual=has_residual, is_quantised=is_quantised, width=width,
        )
        for width in WIDTHS
        for dtype, form, has_residual, is_quantised in _forms()
    )  # fmt: skip


def _rms_norm_looped(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            target, dtype, f"looped-{form}",
            has_residual=has_residual, is_quantised=is_quantised, width=STEP,
        )
        for dtype, form, has_residual, is_quantised in _forms()
    )  # fmt: skip


KERNELS = (
    TritonKernel(
        name="norm.rms", op="norm.rms", module=_MODULE,
        function="_rms_norm_kernel", variants=_rms_norm, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="norm.rms_looped", op="norm.rms", module=_MODULE,
        function="_rms_norm_looped_kernel", variants=_rms_norm_looped, uses_matrix_unit=False,
    ),
)  # fmt: skip
