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


def tiles(ratio: int, head_dim: int, dtype: str, arch: str) -> dict[str, int]:
    """Tile sizes and launch options. ptxas keeps to 128 registers for float16 on sm_80, into which
    four places of a window at a time fit and eight do not."""
    places = 4 if (arch, dtype) == ("sm_80", "float16") else _MOST_PLACES
    return {
        "BLOCK_D": _power_of_two(head_dim),
        "BLOCK_J": min(places, _power_of_two(ratio)),
        "num_warps": 4,
    }


def state_warps(width: int, warp_size: int) -> int:
    """Of a row of the state: 16 bytes of float32 a thread, as far as there are as many."""
    return max(1, min(4, _power_of_two(width) // (4 * warp_size)))


def state_config(*, is_overlapping: bool) -> str:
    """Whose machine code speaks for the state of open windows."""
    return "w1024" if is_overlapping else "w512"


def _pool(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        _pool_variant(target, dtype, config, ratio, is_overlapping=is_overlapping)
        for dtype in ACTIVATION_DTYPES
        for config, ratio, is_overlapping in (("overlapping", 4, True), ("plain", 128, False))
    )


def _pool_variant(
    target: Target, dtype: str, config: str, ratio: int, *, is_overlapping: bool
) -> KernelVariant:
    options = tiles(ratio, 512, dtype, target.arch)
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
            config=state_config(is_overlapping=is_overlapping),
            pointers={
                **dict.fromkeys(("kv_TW_ptr", "gate_TW_ptr"), dtype),
                **dict.fromkeys(("state_ptr", "bias_JW_ptr"), "float32"),
                **dict.fromkeys(_INTEGERS, "int32"),
            },
            scalars=dict.fromkeys(_STRIDES, "i32"),
            divisible=frozenset(_STRIDES),
            constants={
                "WIDTH": width,
                "BLOCK_W": width,
                "RATIO": ratio,
                "STATE_ROWS": rows,
                "HAS_BIAS": True,
            },
            num_warps=state_warps(width, target.warp_size),
        )
        for dtype in ACTIVATION_DTYPES
        for is_overlapping, width, ratio, rows in ((True, 1024, 4, 8), (False, 512, 128, 128))
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
