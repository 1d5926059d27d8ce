"""The specialisations of the Triton compression that targets are compiled for. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel

_MODULE = "hal_kernels.nsa_compress.triton_kernels"
DTYPES = ("bfloat16", "float16")
MOST_HIDDEN_BYTES = 64 << 20  # of the hidden values that lie between two launches
FORMS = ("few", "many")
_HEAD_DIM = 192  # of a key in the paper; a loop goes over it, so the code of others is the same
_STRIDES = ("stride_page", "stride_row", "stride_head")


def form_of(phase: str) -> str:
    """A decode completes an entry of one sequence in `compress_stride`; anything else many."""
    return "few" if phase == "decode" else "many"


def product_tiles(target: Target, form: str, kernel: str) -> dict[str, int]:
    """Items, hidden values and values of a row in a tile of a product, and launch options. Rows
    that are found by a table are loaded fewer steps ahead than the pipeline has stages, so the
    product that reads them has more stages."""
    is_cuda, is_few = target.backend == "cuda", form == "few"
    stages = {"hidden": (7, 5), "project": (4, 3)}[kernel]
    return {
        "BLOCK_I": 16 if is_few else 128,
        "BLOCK_H": 64,
        "BLOCK_D": 64,
        "num_warps": 4 if is_few or is_cuda else 8,
        "num_stages": stages[FORMS.index(form)] if is_cuda else 2,
    }


def items_at_once(hidden_size: int, tiles: Mapping[str, int]) -> int:
    """Items of one pair of launches: whole tiles, whose hidden values take no more memory."""
    block = tiles["BLOCK_I"]
    return max(1, MOST_HIDDEN_BYTES // (2 * hidden_size * block)) * block


def _variants(target: Target, kernel: str) -> Sequence[KernelVariant]:
    floats = (
        ("rows_NPKD_ptr", "w1_HL_ptr", "hidden_IH_ptr")
        if kernel == "hidden"
        else ("hidden_IH_ptr", "w2_DH_ptr", "entries_NPKD_ptr")
    )
    variants = []
    for dtype in DTYPES:
        for form in FORMS:
            tiles = product_tiles(target, form, kernel)
            warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
            variants.append(
                KernelVariant(
                    dtype=dtype,
                    config=form,
                    pointers={
                        **dict.fromkeys(floats, dtype),
                        "b1_H_ptr" if kernel == "hidden" else "b2_D_ptr": "float32",
                        **dict.fromkeys(("starts_B_ptr", "lengths_B_ptr", "table_BW_ptr"), "int32"),
                    },
                    scalars=dict.fromkeys(
                        ("first_item", "num_items", "num_entries", "H", "stride_table", *_STRIDES),
                        "i32",
                    ),
                    divisible=frozenset({"H", *_STRIDES}),
                    constants={
                        "KV_HEADS": 4,
                        "HEAD_DIM": _HEAD_DIM,
                        "LENGTH": 32,
                        "STRIDE": 16,
                        "PAGE": 64,
                        **tiles,
                    },
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return variants


def _hidden(target: Target) -> Sequence[KernelVariant]:
    return _variants(target, "hidden")


def _project(target: Target) -> Sequence[KernelVariant]:
    return _variants(target, "project")


KERNELS = tuple(
    TritonKernel(
        name=f"nsa_compress.{name}", op="nsa_compress", module=_MODULE,
        function=f"_nsa_{name}_kernel", variants=variants, uses_matrix_unit=True,
    )
    for name, variants in (("hidden", _hidden), ("project", _project))
)  # fmt: skip
