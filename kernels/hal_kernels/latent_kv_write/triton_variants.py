"""The specialisations of the pass over queries and one row a token, for each target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.ops.kv_formats import KV_FORMATS
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.kv_write.triton_variants import packed_constants, row_warps

_KINDS = {"rms": 1, "layer": 2}  # what the kernel calls the norms
# Of rows in a floating dtype: columns of a tile's row, which no scale belongs to.
_PLAIN_GROUP = 64
_STYLES = ("interleaved", "half_split")
_VALUES = 512  # of the queries of a program
_THREAD_VALUES = 8  # of a row, that a thread takes at once: 16 bytes

# Rows as models have them: format -> (values, first rotated value, normed values, values of a query
# head, its first rotated one).
ROWS: dict[str, tuple[int, int, int, int, int]] = {
    "fp8_656": (576, 512, 512, 192, 128),
    "v4_584": (512, 448, 512, 512, 448),
    "v41_528": (512, 448, 512, 512, 448),
    "fp4_288": (512, 448, 512, 512, 448),
    "fp8_132": (128, 64, 128, 128, 64),
    "fp4_68": (128, 64, 128, 128, 64),
    "bf16": (576, 512, 512, 192, 128),
    "fp16": (576, 512, 512, 192, 128),
}

# Rows of index keys, which some models have under a layer norm; their queries are not normed.
LAYER_NORMED = ("fp8_132", "fp4_68", "bf16", "fp16")


def dtype_of(kv_format: str) -> str:
    """Of the activations that rows of a format are made of: packed formats are bfloat16 by
    definition."""
    return "float16" if kv_format == "fp16" else "bfloat16"


def config_of(request: LatentKvWriteRequest) -> str:
    """The name of the specialisation whose machine code speaks for a request."""
    style = "" if request.style == "interleaved" else "-half"
    layer = "-layer" if request.norm_dim and request.row_norm_kind == "layer" else ""
    return f"{request.kv_format}{'-qnorm' if request.has_q_norm else ''}{style}{layer}"


def program_warps(request: LatentKvWriteRequest, warp_size: int) -> int:
    """Warps of a program: a row of 512 values has two of 32 threads, and so has a narrower one in a
    floating dtype, whose queries are as many."""
    form = KV_FORMATS[request.kv_format]
    if not form.is_plain:
        return row_warps(form, warp_size)
    return max(1, _VALUES // (_THREAD_VALUES * warp_size))


def launch_constants(request: LatentKvWriteRequest) -> dict[str, Any]:
    """The constants of the kernel for a request."""
    width = request.head_dim if request.has_q_norm else request.rotary_dim
    block_d = _power_of_two(width)
    return {
        "NUM_HEADS": request.num_heads,
        "HEAD_DIM": request.head_dim,
        "FIRST": 0 if request.has_q_norm else request.q_rotary_start,
        "WIDTH": width,
        "Q_START": request.q_rotary_start,
        "HAS_Q_NORM": request.has_q_norm,
        # Also of fewer heads: a tile has a value for each thread, and none is held by two warps, of
        # which one might write it in place before the other has read it. Pairs of normed heads in
        # halves may be: they are stored after a sum over the head, when all have read.
        "BLOCK_H": max(1, _VALUES // block_d),
        "BLOCK_D": block_d,
        "ROTARY": request.rotary_dim,
        "IS_INTERLEAVED": request.style == "interleaved",
        "BLOCK_R": _power_of_two(request.rotary_dim // 2),
        "ROW_START": request.row_rotary_start,
        "NORM": _KINDS[request.row_norm_kind] if request.norm_dim else 0,
        "NORM_DIM": request.norm_dim,
        **_row_constants(request),
    }


def _row_constants(request: LatentKvWriteRequest) -> dict[str, Any]:
    form = KV_FORMATS[request.kv_format]
    if not form.is_plain:
        is_fp4 = form.element == "fp4_e2m1"
        return {**packed_constants(form, request.block_size), "IS_FP4": is_fp4}
    groups = request.row_dim // _PLAIN_GROUP
    return {
        "GROUPS": groups,
        "GROUP": _PLAIN_GROUP,
        "BLOCK_G": _power_of_two(groups),
        "SCALES": 0,
        "PLAIN": 0,
        "BLOCK_P": 16,
        "PAGE": request.block_size,
        "IS_UE8M0": False,
        "IS_FP4": False,
    }


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _variants(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _variant(target, name, style, kind, has_q_norm=has_q_norm)
        for name in ROWS
        for style in _STYLES
        for has_q_norm, kind in ((False, "rms"), (True, "rms"), (False, "layer"))
        if kind == "rms" or name in LAYER_NORMED
    )


def _variant(
    target: Target, name: str, style: Any, kind: Any, *, has_q_norm: bool
) -> KernelVariant:
    form, dtype = KV_FORMATS[name], dtype_of(name)
    row_dim, row_start, norm_dim, head_dim, q_start = ROWS[name]
    request = LatentKvWriteRequest(
        num_heads=16, head_dim=head_dim, row_dim=row_dim, rotary_dim=64, q_rotary_start=q_start,
        row_rotary_start=row_start, norm_dim=norm_dim, block_size=64, dtype=dtype,
        kv_format=form.name, has_q_norm=has_q_norm, style=style, row_norm_kind=kind,
    )  # fmt: skip
    warps = program_warps(request, target.warp_size)
    strides = (
        "stride_q", "stride_x", "stride_page", "stride_row", "stride_scale_page",
        "stride_scale_row", "scale_start", "stride_tail_page", "stride_tail_row", "tail_start",
    )  # fmt: skip
    floats = ("q_THD_ptr", "x_TD_ptr", "q_weight_D_ptr", "x_weight_D_ptr", "x_bias_D_ptr")
    values = form.element if form.is_plain else "uint8"
    return KernelVariant(
        dtype=dtype,
        config=config_of(request),
        pointers={
            **dict.fromkeys(floats, dtype),
            "positions_T_ptr": "int64",
            "table_PR_ptr": "float32",
            "values_ptr": values,
            "scales_ptr": "float32" if form.scale == "float32" else values,
            "tails_ptr": "bfloat16" if form.plain_dim else values,
            "slots_T_ptr": "int64",
        },
        scalars={**dict.fromkeys(strides, "i32"), "eps": "fp32"},
        divisible=frozenset({"stride_q", "stride_x", "stride_page", "stride_row"}),
        constants=launch_constants(request),
        num_warps=warps,
    )


KERNELS = (
    TritonKernel(
        name="latent_kv_write.pass", op="latent_kv_write",
        module="hal_kernels.latent_kv_write.triton_kernels", function="_latent_kv_write_kernel",
        variants=_variants, uses_matrix_unit=False,
        sources=(
            "hal_kernels.kv_write.packed_kernels", "hal_kernels.kv_write.fp4_kernels",
            "hal_kernels.kv_write.packed_rows", "hal_kernels.latent_kv_write.rotation",
        ),
    ),
)  # fmt: skip
