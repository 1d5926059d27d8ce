"""The specialisations of the Triton products whose weight alone is quantised. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.gemm.triton_variants import (
    PLAIN,
    SIZES,
    SOURCES,
    STRIDES,
    configurations,
    result_pointers,
)
from hal_kernels.tuning.default_tables import load_default_tables

_MODULE = "hal_kernels.gemm.weight_only_kernels"
WEIGHT_ONLY_SOURCES = (
    "hal_kernels.gemm.triton_kernels",
    *SOURCES,
    "hal_kernels.kv_write.packed_rows",
)
_WITHOUT_WGMMA = frozenset({"sm_80", "sm_89", "sm_120"})  # their operands are in registers
_WIDE_BYTES = 16  # of one load of a thread, at most
_INTEGER_TILES = load_default_tables(Path(__file__).with_name("weight_only_configs.json"))


@dataclass(frozen=True, slots=True)
class WeightForm:
    """A weight format. kind: as the kernels have it. group: columns that share a scale (0: all).
    is_zero: whether the minimum is an integer that is taken from the values, before the scale."""

    kind: int
    group: int
    has_minimum: bool = False
    is_zero: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.kind == 4 else 8

    @property
    def minimum_kind(self) -> int:
        """HAS_MINIMUM of the kernels."""
        return 2 if self.is_zero else int(self.has_minimum)

    @property
    def is_square(self) -> bool:
        """Whether as many rows share a scale as columns do, and a step of K is one block."""
        return self.kind in (0, 2)


WEIGHT_FORMS: Mapping[str, WeightForm] = {
    "fp8g128": WeightForm(2, 128),
    "fp8g32": WeightForm(2, 32),
    "w8": WeightForm(3, 0),
    "w8g32": WeightForm(3, 32),
    "w4g32": WeightForm(4, 32),
    "w4g32-asym": WeightForm(4, 32, has_minimum=True),
    "w4g64": WeightForm(4, 64),
    "w4g64-zero": WeightForm(4, 64, has_minimum=True, is_zero=True),
    "w4g128": WeightForm(4, 128),
    "w4g128-zero": WeightForm(4, 128, has_minimum=True, is_zero=True),
}
# What follows a product, by suffix. A bias stands for none, and an activation and a clamp too.
AFTER: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "-bias": {"HAS_BIAS": True, "EPILOGUE": 1},
    "-gated": {"HAS_BIAS": True, "EPILOGUE": 2, "CLAMP": 10.0},
    "-float32": {},
}
RESIDUAL: Mapping[str, Any] = {"HAS_BIAS": True, "HAS_RESIDUAL": True}


def with_wide_loads(
    target: Target, *, columns: int, depth: int, bits: int, warps: int
) -> tuple[int, int]:
    """(columns, warps) of a tile of few rows: so few warps that each thread reads 16 bytes of the
    weight at once, and two of them at least. depth: of a step along K."""
    row = depth * bits // 8
    columns = max(columns, 2 * _WIDE_BYTES * target.warp_size // row)
    return columns, min(warps, columns * row // (_WIDE_BYTES * target.warp_size))


def weight_only_tiles(
    target: Target, name: str, size: str, *, is_gated: bool = False
) -> dict[str, int]:
    """Tile sizes and launch options. name: of `WEIGHT_FORMS`; size: "large" or "small"."""
    form = WEIGHT_FORMS[name]
    if not form.is_square:
        return _integer_tiles(target, form, size, is_gated=is_gated)
    given = dict(configurations("gemm_weight_only", target)[size])
    is_rdna3 = target.arch.startswith("gfx11")
    given |= {"BLOCK_K": form.group, "num_stages": 2}
    if size == "large" and (is_rdna3 or target.arch.startswith("gfx12")):
        # Of these the registers hold less beside the widened weight.
        given |= {"BLOCK_N": 32 if is_rdna3 else 64, "num_warps": 8}
    if size == "large" and is_gated and form.group == 128 and target.arch in _WITHOUT_WGMMA:
        given["BLOCK_N"] = 32  # the fragments of two wide weights and their sums spill
    if size == "small":
        if is_rdna3 and form.group == 128:  # without which registers spill: see the evidence
            given |= {"BLOCK_N": 16} if is_gated else {"num_warps": 8}
        columns, warps = with_wide_loads(
            target,
            columns=given["BLOCK_N"],
            depth=given["BLOCK_K"],
            bits=form.bits,
            warps=given["num_warps"],
        )
        given |= {"BLOCK_N": columns, "num_warps": warps}
    return given


def _integer_tiles(
    target: Target, form: WeightForm, size: str, *, is_gated: bool
) -> dict[str, int]:
    """Of the table, the entry that says most of the form: its bits, whether it has a minimum, and
    whether the product is gated, whose tile holds two weights and two sums."""
    tables = _INTEGER_TILES["gemm_weight_only_integers"]
    table = tables.get(target.arch, tables[target.backend])
    stem, bits, gated = size, f"-int{form.bits}", "-gated" * is_gated
    offset = "-offset" * form.has_minimum
    names = (f"{stem}{bits}{offset}{gated}", f"{stem}{bits}{gated}", f"{stem}{gated}", stem)
    return dict(table[next(name for name in names if name in table)])


def form_constants(name: str) -> dict[str, Any]:
    """Constants of the kernel that say how the weight is stored."""
    form = WEIGHT_FORMS[name]
    return {
        "KIND": form.kind,
        "GROUP_K": form.group,
        "SCALE_N": form.group if form.is_square else 1,
        "HAS_MINIMUM": form.minimum_kind,
    }


def weight_only_variant(
    target: Target,
    name: str,
    size: str,
    config: str,
    after: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    out_dtype: str = "",
) -> KernelVariant:
    """A form in a size of tiles, with what follows the product. out_dtype: of the result, "" for
    that of the rows."""
    form = WEIGHT_FORMS[name]
    follows = {"HAS_BIAS": False, **PLAIN, **after}
    constants: dict[str, Any] = weight_only_tiles(
        target, name, size, is_gated=follows["EPILOGUE"] == 2
    )
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    scale = "float16" if form.kind > 2 and form.group else "float32"
    pointers = result_pointers(target, follows, dtype)
    if out_dtype:
        pointers["y_MN_ptr"] = pointers["y_scale_MG_ptr"] = out_dtype
    return KernelVariant(
        dtype=dtype,
        config=config,
        pointers={
            "x_MK_ptr": dtype,
            "w_ptr": "int8" if form.kind == 3 else "uint8",
            "scale_NG_ptr": scale,
            "minimum_NG_ptr": scale,
            "bias_N_ptr": dtype,
            **pointers,
        },
        scalars={**SIZES, **dict.fromkeys((*STRIDES, "stride_sn"), "i32")},
        divisible=frozenset({"N", "K", *STRIDES}),
        constants={**constants, **form_constants(name), **follows},
        num_warps=warps,
        num_stages=stages,
    )


def _integers(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        weight_only_variant(
            target,
            name,
            size,
            f"{size}-{name}{suffix}",
            after,
            dtype=dtype,
            out_dtype=suffix.removeprefix("-") if suffix == "-float32" else "",
        )
        for dtype in ("bfloat16", "float16")
        for size in ("large", "small")
        for name, form in WEIGHT_FORMS.items()
        for suffix, after in AFTER.items()
        if form.kind > 2
    )


def _fp8(target: Target) -> Sequence[KernelVariant]:
    return tuple(
        weight_only_variant(
            target,
            f"fp8g{group}",
            size,
            f"{size}-g{group}{suffix}",
            after,
            out_dtype=suffix.removeprefix("-") if suffix == "-float32" else "",
        )
        for size in ("large", "small")
        for group in (32, 128)
        for suffix, after in AFTER.items()
    )


def with_residual(target: Target, *, is_fp8: bool) -> Sequence[KernelVariant]:
    """Products that add a residual, for the op `fused_gemm`."""
    return tuple(
        weight_only_variant(
            target, name, size, f"{size}-{name.removeprefix('fp8')}-residual", RESIDUAL
        )
        for size in ("large", "small")
        for name, form in WEIGHT_FORMS.items()
        if (form.kind == 2) == is_fp8
    )


KERNELS = (
    TritonKernel(
        name="gemm.weight_only", op="gemm", module=_MODULE, function="_gemm_weight_only_kernel",
        variants=_integers, uses_matrix_unit=True, sources=WEIGHT_ONLY_SOURCES,
    ),
    TritonKernel(
        name="gemm.fp8_weight_only", op="gemm", module=_MODULE,
        function="_gemm_weight_only_kernel", variants=_fp8, uses_matrix_unit=True,
        sources=WEIGHT_ONLY_SOURCES,
    ),
    TritonKernel(
        name="fused_gemm.weight_only", op="fused_gemm", module=_MODULE,
        function="_gemm_weight_only_kernel", uses_matrix_unit=True,
        variants=lambda target: with_residual(target, is_fp8=False), sources=WEIGHT_ONLY_SOURCES,
    ),
    TritonKernel(
        name="fused_gemm.fp8_weight_only", op="fused_gemm", module=_MODULE,
        function="_gemm_weight_only_kernel", uses_matrix_unit=True,
        variants=lambda target: with_residual(target, is_fp8=True), sources=WEIGHT_ONLY_SOURCES,
    ),
)  # fmt: skip
