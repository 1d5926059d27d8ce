"""What attention and indexers have in common where their tiles are tuned: a program goes over keys
in steps, and how many keys a step has, and with which launch options, is to be chosen.

Free of torch and triton, but for the operands of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hal.ops.attention import AttentionMetadata
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant, TritonKernel
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.tunable import Default

KEYS = 4096
"""Keys of a sequence where a class does not say: a context grows while its tiles stay."""

STEPS = ("BLOCK_N", "num_warps", "num_stages")
_LAUNCH = ("num_warps", "num_stages")
_DIFFERENT_PAGES = 64


def chosen(constants: Mapping[str, Any], names: Sequence[str] = STEPS) -> dict[str, int]:
    """The constants of a launch that tuning chooses."""
    return {name: int(constants[name]) for name in names}


@functools.cache
def _variants(kernel: TritonKernel, target: Target) -> Mapping[tuple[str, str], KernelVariant]:
    return {(v.dtype, v.config): v for v in kernel.variants(target)}


def default_of(
    kernel: TritonKernel, names: Sequence[str] = STEPS
) -> Callable[[Target, ShapeClass], Default]:
    """The default of a class whose form is the name of the catalogue's variant: that variant's
    constants. Raises KeyError for a class that has none on the target."""

    def default(target: Target, shape: ShapeClass) -> Default:
        found = _variants(kernel, target)[shape.dtype, shape.form]
        constants = {
            **found.constants,
            "num_warps": found.num_warps,
            "num_stages": found.num_stages,
        }
        return Default(config=found.config, configuration=chosen(constants, names))

    return default


def steps_of_keys(
    target: Target, keys: Sequence[int], *, warps: Sequence[int] = (4, 8)
) -> list[dict[str, int]]:
    """Steps of so many keys under launch options; AMD's loops are not pipelined here."""
    return [
        {"BLOCK_N": n, "num_warps": w, "num_stages": s}
        for n in keys
        for w in warps
        for s in ((1,) if target.backend == "hip" else (2, 3))
    ]


def page_table(sequences: int, rows: int, page: int, device: Any) -> Any:
    """int32 [sequences, pages]: every page of a cache once, in any order."""
    import torch

    pages = -(-rows // page)
    order = torch.randperm(sequences * pages, device=device)
    return order.view(sequences, pages).to(torch.int32)


def cache_of(name: str, table: Any, dim: int, page: int) -> Any:
    """A cache of random rows in a format of `hal.ops.kv_formats`; of a packed one a few pages are
    made and repeated, as rounding all rows of a large cache would take its memory several times."""
    import torch

    from hal.ops.kv_formats import KV_FORMATS, write_rows

    pages, device = table.numel(), table.device
    if name == "bf16":
        return torch.randn(pages, page, dim, device=device).to(torch.bfloat16)
    made = min(pages, _DIFFERENT_PAGES)
    shape = (made, KV_FORMATS[name].page_bytes(page))
    cache = torch.zeros(shape, dtype=torch.uint8, device=device)
    slots = torch.arange(made * page, device=device)
    write_rows(name, cache, page, slots, torch.randn(made * page, dim, device=device))
    return cache.repeat(-(-pages // made), 1)[:pages].contiguous()


def metadata(table: Any, context: int, queries: Sequence[int]) -> AttentionMetadata:
    """Of sequences that all have the same context, and so many new tokens each."""
    import torch

    starts = torch.tensor([0, *queries], device=table.device).cumsum(0).to(torch.int32)
    lengths = torch.full((len(queries),), context, dtype=torch.int32, device=table.device)
    return AttentionMetadata(starts, lengths, table, max(queries), context)


def batch_of(phase: str, rows: int, keys: int) -> tuple[list[int], int]:
    """(new tokens of each sequence, context): of a decode a sequence a row, else one sequence."""
    if phase == "decode":
        return [1] * rows, keys
    return [rows], max(keys, rows)


def lists_of(tokens: int, entries: int, top_k: int, device: Any) -> Any:
    """int32 [tokens, top_k] of distinct entries of so many."""
    import torch

    order = torch.rand(tokens, entries, device=device).argsort(dim=1)[:, :top_k]
    lists = torch.full((tokens, top_k), -1, dtype=torch.int32, device=device)
    lists[:, : order.shape[1]] = order.to(torch.int32)
    return lists
