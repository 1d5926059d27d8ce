"""What may be chosen for the Triton attention, and what a choice costs. Free of torch and triton.

A class is measured and modelled with `KEYS` keys of each sequence, as a context grows while its
configuration stays: for a prefill its queries are the last of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.attention.triton_limits import form_of_request, kernel_of, misfit_of
from hal_kernels.attention.triton_variants import (
    FORMS,
    SPLIT_KEYS,
    decode_config,
    decode_tiles,
    group_rows,
    prefill_config,
    tiles_of_form,
)
from hal_kernels.tuning.performance_model import ONE_AHEAD, Footprint
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.tunable import Call, Default, TunableKernel

KEYS = 4096
_WINDOW = 128  # of the compiled variants with one
_PAGE = 16
_SIZES = ("group", "head_dim", "kv_heads")
_FORMS = tuple(FORMS)


def shape_of(request: AttentionRequest, device: DeviceSpec) -> tuple[str, ShapeClass] | None:
    """Kernel and class of a request at the most tokens of its range; None for what no kernel
    serves, and for caches of FP8, whose tiles are not to be chosen."""
    if misfit_of(request, device.arch) or request.kv_dtype != request.dtype:
        return None
    sizes = {
        "group": request.num_heads // request.num_kv_heads,
        "head_dim": max(request.head_dim, request.v_head_dim),
        "kv_heads": request.num_kv_heads,
    }
    form = form_of_request(request)
    return kernel_of(request), shape_class(request.dtype, form, request.tokens.high, sizes)


def _block(shape: ShapeClass) -> int:
    return next(size for size in (64, 128, 256) if shape.size("head_dim") <= size)


def _has_window(shape: ShapeClass) -> bool:
    return bool(FORMS[shape.form]["WINDOW"])


def _prefill_config(head_dim: int, shape: ShapeClass) -> str:
    return prefill_config(head_dim, shape.form, is_fp8=False)


def _decode_config(head_dim: int, shape: ShapeClass) -> str:
    return decode_config(head_dim, shape.form, group_rows(shape.size("group")), is_fp8=False)


def _default(tiles: Any, name: Callable[[int, ShapeClass], str]) -> Any:
    def default(target: Target, shape: ShapeClass) -> Default:
        found = tiles(target, shape)
        return Default(config=name(_block(shape), shape), configuration=found)

    return default


def _prefill_tiles(target: Target, shape: ShapeClass) -> dict[str, int]:
    return tiles_of_form(target, _block(shape), shape.form)


def _decode_tiles(target: Target, shape: ShapeClass) -> dict[str, int]:
    return decode_tiles(target, _block(shape), group_rows(shape.size("group")))


def _prefill_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    is_hip, block = target.backend == "hip", _block(shape)
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for m in (32, 64, 128)
        for n in ((16, 32, 64) if is_hip or block > 128 else (32, 64, 128))
        for warps in (4, 8)
        for stages in ((1,) if is_hip else (2, 3))
        if m * block <= 128 * 128 and not (m == 32 and warps == 8)
    ]


def _decode_space(target: Target, shape: ShapeClass) -> Sequence[Mapping[str, int]]:
    is_hip = target.backend == "hip"
    return [
        {"BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for n in ((16, 32, 64) if is_hip or _block(shape) > 128 else (16, 32, 64, 128))
        for warps in (2, 4, 8)
        for stages in ((1,) if is_hip else (2, 3, 4))
    ]


def _keys(shape: ShapeClass) -> int:
    return min(KEYS, _WINDOW + shape.rows) if _has_window(shape) else KEYS


def _prefill_footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    m, n, width = configuration["BLOCK_M"], configuration["BLOCK_N"], _block(shape)
    heads, keys = shape.size("group") * shape.size("kv_heads"), _keys(shape)
    programs = -(-shape.rows // m) * heads
    seen = min(keys, _WINDOW + m) if _has_window(shape) else keys
    steps = -(-seen // n)
    wide = shape.size("head_dim")
    return Footprint(
        programs=programs,
        steps=steps,
        step_bytes=4 * n * width,
        ahead=ONE_AHEAD,
        flops=4.0 * programs * steps * m * n * width,
        needed_flops=4.0 * shape.rows * heads * min(keys, seen) * wide,
        memory_bytes=4.0 * keys * shape.size("kv_heads") * wide + 4.0 * shape.rows * heads * wide,
    )


def _decode_footprint(shape: ShapeClass, configuration: Mapping[str, int]) -> Footprint:
    n, width, wide = configuration["BLOCK_N"], _block(shape), shape.size("head_dim")
    group, kv_heads = shape.size("group"), shape.size("kv_heads")
    keys = min(KEYS, _WINDOW) if _has_window(shape) else KEYS
    splits = -(-keys // SPLIT_KEYS)
    programs = splits * kv_heads * shape.rows
    steps = -(-min(keys, SPLIT_KEYS) // n)
    rows = group_rows(group)
    parts = 8.0 * shape.rows * group * kv_heads * splits * wide
    return Footprint(
        programs=programs,
        steps=steps,
        step_bytes=4 * n * width,
        ahead=ONE_AHEAD,
        flops=4.0 * programs * steps * rows * n * width,
        needed_flops=4.0 * shape.rows * group * kv_heads * keys * wide,
        memory_bytes=4.0 * shape.rows * keys * kv_heads * wide + parts,
    )


def _call(phase: Any) -> Any:
    def call(shape: ShapeClass, device: Any) -> Call:
        import torch

        from hal.ops.formats import torch_dtype

        group, kv_heads = shape.size("group"), shape.size("kv_heads")
        width, dtype = shape.size("head_dim"), torch_dtype(shape.dtype)
        is_windowed = _has_window(shape)
        request = AttentionRequest(
            num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=width, v_head_dim=width,
            dtype=shape.dtype, kv_dtype=shape.dtype, block_size=_PAGE, is_causal=True,
            window=_WINDOW if is_windowed else 0, has_sinks=is_windowed,
            softcap=float(FORMS[shape.form]["SOFTCAP"]),
            phase=phase, tokens=TokenRange(1, shape.rows),
        )  # fmt: skip
        sequences = shape.rows if phase == "decode" else 1
        keys = max(KEYS, 0 if phase == "decode" else shape.rows)
        pages = -(-keys // _PAGE)
        caches = [
            torch.randn(sequences * pages, _PAGE, kv_heads, width, device=device).to(dtype)
            for _ in range(2)
        ]
        queries = [1] * sequences if phase == "decode" else [shape.rows]
        table = torch.randperm(sequences * pages, device=device).to(torch.int32)
        meta = AttentionMetadata(
            torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32),
            torch.full((sequences,), keys, dtype=torch.int32, device=device),
            table.view(sequences, pages),
            max(queries),
            keys,
        )
        q = torch.randn(shape.rows, group * kv_heads * width, device=device).to(dtype)
        static: dict[str, Any] = {"scale": width**-0.5}
        if is_windowed:
            static["sinks"] = torch.randn(group * kv_heads, device=device).to(dtype)
        return Call(request=request, static=static, args=(q, *caches, meta))

    return call


def _dtypes(target: Target) -> Sequence[str]:
    return ("bfloat16", "float16")


TUNABLE = (
    TunableKernel(
        kernel="attention.prefill", module="hal_kernels.attention.triton", size_names=_SIZES,
        forms=_FORMS, dtypes=_dtypes, default=_default(_prefill_tiles, _prefill_config),
        space=_prefill_space, footprint=_prefill_footprint, call=_call("prefill"),
    ),
    TunableKernel(
        kernel="attention.decode", module="hal_kernels.attention.triton", size_names=_SIZES,
        forms=_FORMS, dtypes=_dtypes, default=_default(_decode_tiles, _decode_config),
        space=_decode_space, footprint=_decode_footprint, call=_call("decode"),
    ),
)  # fmt: skip
