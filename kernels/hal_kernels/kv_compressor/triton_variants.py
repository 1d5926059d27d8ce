"""The specialisations of the Triton compressor that targets are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

_MODULE = "hal_kernels.kv_compressor.triton_kernels"
_MOST_PLACES = 8  # of a window at a time
_INTEGERS = ("starts_B_ptr", "lengths_B_ptr", "slots_B_ptr")
_STRIDES = ("stride_kv", "stride_gate", "stride_slot")


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def tiles(ratio: int, head_dim: int) -> dict[str, int]:
    """Tile sizes and launch options."""
    return {
        "BLOCK_D": _power_of_two(head_dim),
        "BLOCK_J": min(_MOST_PLACES, _power_of_two(ratio)),
        "num_warps": 4,
    }


def _pool(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _pool_variant(dtype, config, ratio, is_overlapping=is_overlapping)
        for dtype in ACTIVATION_DTYPES
        for config, ratio, is_overlapping in (("overlapping", 4, True), ("plain", 128, False))
    )


def _pool_variant(dtype: str, config: str, ratio: int, *, is_overlapping: bool) -> KernelVariant:
    options = tiles(ratio, 512)
    warps = options.pop("num_warps")
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            **dict.fromkeys(("kv_TW_ptr", "gate_TW_ptr", "norm_D_ptr", "out_ND_ptr"), dtype),
            **dict.fromkeys(("state_ptr", "bias_JW_ptr"), "float32"),
            **dict.fromkeys((*_INTEGERS, "entry_starts_B_ptr"), "int32"),
        },
        scalars={
            **dict.fromkeys(("num_sequences", "num_steps", *_STRIDES), "i32"),
            "eps": "fp32",
        },
        divisible=frozenset(_STRIDES),
        constants={
            "DIM": 512,
            "RATIO": ratio,
            "IS_OVERLAPPING": is_overlapping,
            "HAS_BIAS": True,
            "HAS_NORM": True,
            **options,
        },
        num_warps=warps,
    )


def _state(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        KernelVariant(
            dtype=dtype,
            config="w1024",
            pointers={
                **dict.fromkeys(("kv_TW_ptr", "gate_TW_ptr"), dtype),
                **dict.fromkeys(("state_ptr", "bias_JW_ptr"), "float32"),
                **dict.fromkeys(_INTEGERS, "int32"),
            },
            scalars=dict.fromkeys(_STRIDES, "i32"),
            divisible=frozenset(_STRIDES),
            constants={
                "WIDTH": 1024,
                "BLOCK_W": 1024,
                "RATIO": 4,
                "STATE_ROWS": 8,
                "HAS_BIAS": True,
            },
        )
        for dtype in ACTIVATION_DTYPES
    )


KERNELS = (
    TritonKernel(
        name="kv_compressor.pool", op="kv_compressor", module=_MODULE,
        function="_kv_compressor_kernel", variants=_pool, uses_matrix_unit=False,
    ),
    TritonKernel(
        name="kv_compressor.state", op="kv_compressor", module=_MODULE,
        function="_compressor_state_kernel", variants=_state, uses_matrix_unit=False,
    ),
)  # fmt: skip
