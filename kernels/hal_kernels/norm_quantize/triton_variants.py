"""The specialisations of the Triton norm with rounding that targets are compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.quantize.triton_variants import LARGEST, converts_in_integers

# Of padded rows that stay in registers; a narrower one has less of everything than the next.
WIDTHS = (2048, 8192, 16384)
STEP = 4096  # columns of a step over a wider row
# Name in a configuration -> (group, is_ue8m0), of FP8; int8 has one scale a row.
FORMS: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {"g128": (128, False), "g128-ue8m0": (128, True), "g32": (32, False), "g32-ue8m0": (32, True),
     "row": (0, False)}
)  # fmt: skip


def launch_blocks(hidden: int, group: int, warp_size: int) -> tuple[int, int, int]:
    """(columns of a group, groups of a block, warps) for rows of that width, 16 values a thread;
    group 0 is the row."""
    if not group:
        group = 1 << (hidden - 1).bit_length()
    block = 1 << (-(-hidden // group) - 1).bit_length()
    return group, block, max(1, group * block // (16 * warp_size))


def looped_blocks(group: int, warp_size: int) -> tuple[int, int, int]:
    """As `launch_blocks`, of a step over a row wider than those, eight values a thread: a second
    row of sums is kept between the steps."""
    size, block, _ = launch_blocks(STEP, group, warp_size)
    return size, block, STEP // (8 * warp_size)


def forms_of(arch: str, out: str, is_ue8m0: bool) -> dict[str, bool]:
    """Constants of the rounding. Where Triton does not convert to e4m3, it is done in integers."""
    return {"IS_UE8M0": is_ue8m0, "IS_BITS": converts_in_integers(arch, out)}


def _rounded(target: Target) -> Iterator[tuple[str, str, int, bool]]:
    yield "int8", "row", 0, False
    for name, (group, is_ue8m0) in FORMS.items():
        yield target.fp8_dtype, name, group, is_ue8m0


def _kept(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            dtype, f"h{width}-{_short(out)}-{name}", out,
            launch_blocks(width, group, target.warp_size), forms_of(target.arch, out, is_ue8m0),
        )
        for dtype in ACTIVATION_DTYPES
        for width in WIDTHS
        for out, name, group, is_ue8m0 in _rounded(target)
    )  # fmt: skip


def _looped(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(
            dtype, f"looped-{_short(out)}-{name}", out, looped_blocks(group, target.warp_size),
            forms_of(target.arch, out, is_ue8m0) | {"IS_ROW": not group},
        )
        for dtype in ACTIVATION_DTYPES
        for out, name, group, is_ue8m0 in _rounded(target)
    )  # fmt: skip


def _short(out: str) -> str:
    return out.split("_", maxsplit=1)[0]


def _variant(
    dtype: str, config: str, out: str, blocks: tuple[int, int, int], forms: Mapping[str, bool]
) -> KernelVariant:
    """The one that does everything, with a residual and with the rows kept: the others do less."""
    size, block, warps = blocks
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            **dict.fromkeys(("x_RH_ptr", "residual_RH_ptr", "weight_H_ptr", "y_RH_ptr"), dtype),
            "values_RH_ptr": "uint8" if forms["IS_BITS"] else out,
            "scale_RG_ptr": "uint8" if forms["IS_UE8M0"] else "float32",
        },
        scalars={
            **dict.fromkeys(("stride_x", "stride_residual", "H", "num_groups"), "i32"),
            "eps": "fp32",
        },
        divisible=frozenset({"stride_x", "stride_residual", "H"}),
        constants={
            "GROUP": size,
            "BLOCK_G": block,
            "HAS_RESIDUAL": True,
            "KEEPS_ROWS": True,
            "LARGEST": LARGEST[out],
            "IS_INTEGER": out == "int8",
            **forms,
        },
        num_warps=warps,
    )


KERNELS = tuple(
    TritonKernel(
        name=name, op="norm_quantize", module="hal_kernels.norm_quantize.triton_kernels",
        function=function, variants=variants, uses_matrix_unit=False,
        sources=("hal_kernels.quantize.triton_kernels", "hal_kernels.quantize.code_kernels"),
    )
    for name, function, variants in (
        ("norm_quantize.rows", "_norm_quantize_kernel", _kept),
        ("norm_quantize.looped", "_norm_quantize_looped_kernel", _looped),
    )
)  # fmt: skip
