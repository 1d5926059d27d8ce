"""Every kernel whose configuration can be tuned, and which class of which a request is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal.suggestions import did_you_mean
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.attention import triton_tuning as attention
from hal_kernels.block_sparse_attention import triton_tuning as block_sparse_attention
from hal_kernels.compressed_attention import triton_tuning as compressed_attention
from hal_kernels.gemm import fp8_weight_tuning as gemm_fp8_weight
from hal_kernels.gemm import split_k_tuning as gemm_split_k
from hal_kernels.gemm import triton_tuning as gemm
from hal_kernels.grouped_gemm import triton_tuning as grouped_gemm
from hal_kernels.index_logits import triton_tuning as index_logits
from hal_kernels.mla_attention import triton_tuning as mla_attention
from hal_kernels.nsa_attention import triton_tuning as nsa_attention
from hal_kernels.tuning.fixed_kernels import why_fixed
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.tunable import TunableKernel

_KERNELS: tuple[TunableKernel, ...] = (
    *attention.TUNABLE,
    *block_sparse_attention.TUNABLE,
    *compressed_attention.TUNABLE,
    *gemm.TUNABLE,
    gemm_fp8_weight.TUNABLE,
    gemm_split_k.TUNABLE,
    *grouped_gemm.TUNABLE,
    *index_logits.TUNABLE,
    *mla_attention.TUNABLE,
    *nsa_attention.TUNABLE,
)
TUNABLE: Mapping[str, TunableKernel] = MappingProxyType({k.kernel: k for k in _KERNELS})

ShapeOf = Callable[[Any, DeviceSpec], tuple[str, ShapeClass] | None]
SHAPE_OF: Mapping[str, ShapeOf] = MappingProxyType(
    {
        "attention": attention.shape_of,
        "block_sparse_attention": block_sparse_attention.shape_of,
        "compressed_attention": compressed_attention.shape_of,
        "gemm": gemm.shape_of,
        "grouped_gemm": grouped_gemm.shape_of,
        "index_logits": index_logits.shape_of,
        "index_selection": index_logits.shape_of_selection,
        "mla_attention": mla_attention.shape_of,
    }
)
"""Op -> the kernel and the class of a request."""

ShapesOf = Callable[[Any, DeviceSpec], Sequence[tuple[str, ShapeClass]]]
_SHAPES_OF: Mapping[str, ShapesOf] = MappingProxyType(
    {
        "nsa_attention": nsa_attention.shapes_of,
    }
)
"""As SHAPE_OF, of requests that launch several kernels, or one of them in several forms."""


def classes_of(op: str, request: Any, device: DeviceSpec) -> tuple[tuple[str, ShapeClass], ...]:
    """The kernels of a request that can be tuned, each with its class."""
    if op in _SHAPES_OF:
        return tuple(_SHAPES_OF[op](request, device))
    found = SHAPE_OF[op](request, device) if op in SHAPE_OF else None
    return () if found is None else (found,)


def find_tunable(name: str) -> TunableKernel:
    """Raises SettingsError for a kernel that there is not, or that has nothing to choose."""
    if name in TUNABLE:
        return TUNABLE[name]
    known = sorted(TUNABLE)
    remedy = did_you_mean(name, TUNABLE)
    if name in CATALOGUE:
        remedy = f"nothing is to be tuned: {why_fixed(name)}"
    raise SettingsError(
        "option --kernel", f"one that can be tuned: {', '.join(known)}", repr(name), remedy
    )
