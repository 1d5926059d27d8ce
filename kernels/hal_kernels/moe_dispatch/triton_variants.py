"""The specialisations of the Triton dispatch that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

COLUMNS = 1024  # of one program
FEW_CHOICES, MANY_CHOICES = 512, 4096  # that a program reads at once
ORDERS = ("few", "many")  # configurations of `places`, for few choices and for many
_CHOICES = (8, 32)  # of a token, that are compiled
MAX_TOP_K = _CHOICES[-1]

_MODULE = "hal_kernels.moe_dispatch.triton_kernels"


def rows_config(top_k: int) -> str:
    """The form of the kernels that move rows which a request is judged by: their loop over a
    token's choices is as long or longer."""
    return f"k{next(k for k in _CHOICES if k >= top_k)}"


def rows_warps(dtype: str, warp_size: int) -> int:
    """Of the kernels that move rows: values of 16 bits come in 16 bytes for each of 128 threads."""
    return 4 if dtype == "float32" else 128 // warp_size


def _variant(
    config: str, scalars: Sequence[str], *, dtype: str = "", **fields: Any
) -> KernelVariant:
    strides = frozenset(scalars) & {"stride_x", "stride_y", "D"}
    return KernelVariant(
        dtype=dtype,
        config=config,
        scalars=dict.fromkeys(scalars, "i32"),
        divisible=strides,
        **fields,
    )


def _places(target: Target) -> Sequence[KernelVariant]:
    pointers = dict.fromkeys(("ids_F_ptr", "places_F_ptr", "source_F_ptr"), "int32")
    return tuple(
        _variant(
            config, ("F",), pointers={**pointers, "offsets_ptr": "int64"},
            constants={"E": 256, "BLOCK_F": block},
        )
        for config, block in zip(ORDERS, (FEW_CHOICES, MANY_CHOICES), strict=True)
    )  # fmt: skip


def _spread(target: Target) -> Sequence[KernelVariant]:
    integers = {"ids_TK_ptr": "int32", "places_TK_ptr": "int32"}
    return tuple(
        _variant(
            f"k{top_k}", ("stride_x", "D", "E"), dtype=dtype,
            pointers={"x_TD_ptr": dtype, "rows_MD_ptr": dtype, **integers},
            constants={"TOP_K": top_k, "BLOCK_D": COLUMNS},
            num_warps=rows_warps(dtype, target.warp_size),
        )
        for dtype in ACTIVATION_DTYPES
        for top_k in _CHOICES
    )  # fmt: skip


def _invert(target: Target) -> Sequence[KernelVariant]:
    pointers = {"source_M_ptr": "int32", "places_F_ptr": "int32"}
    return (_variant("m1024", ("M",), pointers=pointers, constants={"BLOCK_M": 1024}),)


def _combine(target: Target) -> Sequence[KernelVariant]:
    others = {"places_TK_ptr": "int32", "weights_TK_ptr": "float32"}
    return tuple(
        _variant(
            f"k{top_k}", ("stride_y", "D"), dtype=dtype,
            pointers={"y_MD_ptr": dtype, "out_TD_ptr": dtype, **others},
            constants={"TOP_K": top_k, "BLOCK_D": COLUMNS},
            num_warps=rows_warps(dtype, target.warp_size),
        )
        for dtype in ACTIVATION_DTYPES
        for top_k in _CHOICES
    )  # fmt: skip


KERNELS = tuple(
    TritonKernel(
        name=f"moe_dispatch.{name}", op="moe_dispatch", module=_MODULE,
        function=f"_moe_{name}_kernel", variants=variants, uses_matrix_unit=False,
    )
    for name, variants in (
        ("places", _places), ("spread", _spread), ("invert", _invert), ("combine", _combine),
    )
)  # fmt: skip
