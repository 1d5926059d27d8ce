"""Binds the Triton kernels of native sparse attention to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.ops.nsa_attention import BRANCHES, NsaAttentionRequest, NsaCaches, NsaMetadata
from hal_kernels.attention.triton_variants import merge_heads
from hal_kernels.block_sparse_attention.grouped_rows import LOG2_E
from hal_kernels.gemm.triton import target_of
from hal_kernels.nsa_attention.triton_kernels import (
    _nsa_branch_kernel,
    _nsa_entries_kernel,
    _nsa_lists_kernel,
    _nsa_merge_kernel,
    _nsa_select_kernel,
)
from hal_kernels.nsa_attention.triton_tuning import BRANCH, ENTRIES, shapes_of
from hal_kernels.nsa_attention.triton_variants import (
    HEAD_DIMS,
    PLACES,
    SPLIT_BLOCKS,
    SPLIT_ENTRIES,
    SPLIT_KEYS,
    entry_tiles,
    list_tiles,
    padded,
    row_tiles,
    select_tiles,
)
from hal_kernels.tuning.store import tuned_rows

_SELECTED, _WINDOW = 1, 2


def bind(request: NsaAttentionRequest, device: DeviceSpec, *, scale: float) -> Callable[..., Any]:
    """kernel(q[T, H*D], gates[T, H, 3], caches, meta) -> out[T, H*DV], or with the selected blocks
    int32 [T, K, num_selected] where the request publishes them.

    Rows of q that belong to no sequence keep whatever was in the memory of the results.
    """
    launches = _Launches(request, device, scale * LOG2_E)
    run = launches.decode if request.phase == "decode" else launches.whole

    def kernel(q: torch.Tensor, gates: torch.Tensor, caches: NsaCaches, meta: NsaMetadata) -> Any:
        shape = (q.shape[0], request.num_heads, BRANCHES)
        if gates.shape != shape:
            raise ValueError(
                f"nsa_attention: required gates {list(shape)}, found {list(gates.shape)}"
            )
        out = q.new_empty((q.shape[0], request.num_heads * request.v_head_dim))
        lists = torch.empty(
            (q.shape[0], request.num_kv_heads, request.num_selected),
            dtype=torch.int32,
            device=q.device,
        )
        if q.shape[0] and meta.max_query_len and meta.seq_lens.shape[0]:
            rows = gates.flatten(1)
            run(q, rows if rows.stride(1) == 1 else rows.contiguous(), caches, meta, out, lists)
        return (out, lists) if request.publishes_blocks else out

    return kernel


class _Launches:
    """The launches of a call, with the constants of its request."""

    def __init__(self, request: NsaAttentionRequest, device: DeviceSpec, scale: float) -> None:
        self.request, self.scale = request, scale
        target, group = target_of(device), request.num_heads // request.num_kv_heads
        block_d, block_dv = (
            padded(dim, HEAD_DIMS) for dim in (request.head_dim, request.v_head_dim)
        )
        widest = max(block_d, block_dv)
        keys = {
            "HEADS": request.num_heads,
            "GROUP": group,
            "HEAD_DIM": request.head_dim,
            "BLOCK_D": block_d,
            "PAGE": request.block_size,
        }
        rows = keys | {"V_HEAD_DIM": request.v_head_dim, "BLOCK_DV": block_dv}
        entry = {"LENGTH": request.compress_length, "STRIDE": request.compress_stride}
        branch = rows | {
            "SPLIT": SPLIT_KEYS, "SELECT": request.select_size, "PLACES": request.num_selected,
        }  # fmt: skip
        size = request.select_size
        tall = row_tiles(target, widest, group, is_query=False, key_block=size)
        flat = row_tiles(target, widest, group, is_query=True, key_block=size)
        is_decode = request.phase == "decode"
        of_entries = entry_tiles(target, widest, group, is_query=is_decode)
        self.entries = rows | entry | {"SPLIT": SPLIT_ENTRIES, "IS_WHOLE": not is_decode}
        self.of_entries = of_entries
        self.branch = branch
        self.tall, self.flat = tall, flat
        self.tuned = {
            (kernel, shape.form.partition("-")[2]): tuned_rows((kernel, shape), device)
            for kernel, shape in shapes_of(request, device)
        }
        choice = select_tiles(
            target,
            widest,
            group,
            ratio=size // request.compress_stride,
            overlap=request.compress_length // request.compress_stride,
            places=padded(request.num_selected, PLACES),
        )
        self.select = {
            **keys, **entry, **choice, "SELECT": size,
            "INITIAL": request.num_initial, "LOCAL": request.num_local,
        }  # fmt: skip
        self.lists = list_tiles(target, self.select["BLOCK_C"])
        self.merge = {
            "V_HEAD_DIM": request.v_head_dim,
            "BLOCK_DV": block_dv,
            "BLOCK_H": merge_heads(target, block_dv),
        }

    def grid(self, meta: NsaMetadata, queries: int, splits: int = 1) -> tuple[int, int, int]:
        tiles = -(-meta.max_query_len // queries)
        return tiles * splits, self.request.num_kv_heads, meta.seq_lens.shape[0]

    def whole(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        caches: NsaCaches,
        meta: NsaMetadata,
        out: torch.Tensor,
        lists: torch.Tensor,
    ) -> None:
        """Of a prompt: each branch adds to the result."""
        sums = self._sums(q, 1)
        self._run_entries(q, gates, caches, meta, (out, *sums), 1, 1)
        self._choose(q, caches, meta, sums, lists, 1, 1)
        for branch in (_SELECTED, _WINDOW):
            self._run_branch(branch, q, gates, caches, meta, lists, (out, *sums), None)

    def decode(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        caches: NsaCaches,
        meta: NsaMetadata,
        out: torch.Tensor,
        lists: torch.Tensor,
    ) -> None:
        """Splits of all branches, which the merge brings together."""
        request = self.request
        of_entries = max(1, -(-request.entries_at(meta.max_seq_len) // SPLIT_ENTRIES))
        of_selected = -(-request.num_selected * request.select_size // SPLIT_KEYS)
        of_window = -(-request.window // SPLIT_KEYS)
        parts = of_entries + of_selected + of_window
        sums = self._sums(q, parts)
        part = sums[0].new_empty((*sums[0].shape, request.v_head_dim))
        held = (part, *sums)
        self._run_entries(q, gates, caches, meta, held, of_entries, parts)
        self._choose(q, caches, meta, sums, lists, of_entries, parts)
        self._run_branch(
            _SELECTED, q, gates, caches, meta, lists, held, (of_selected, of_entries, parts)
        )
        first = of_entries + of_selected
        self._run_branch(_WINDOW, q, gates, caches, meta, lists, held, (of_window, first, parts))
        tiles = -(-request.num_heads // self.merge["BLOCK_H"])
        _nsa_merge_kernel[(q.shape[0], tiles)](
            part, *sums, gates, out, of_entries, of_selected, of_window,
            request.num_heads, out.stride(0), gates.stride(0), num_warps=1, **self.merge,
        )  # fmt: skip

    def _sums(self, q: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Maximum and sum of the scores of each head, part by part."""
        shape = (q.shape[0], self.request.num_heads, parts)
        return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)

    def _run_entries(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        caches: NsaCaches,
        meta: NsaMetadata,
        held: tuple[torch.Tensor, ...],
        splits: int,
        parts: int,
    ) -> None:
        keys, values, table = caches.entry_keys, caches.entry_values, meta.entry_block_table
        form = "whole" if self.entries["IS_WHOLE"] else "split"
        tile = self.tuned[ENTRIES, form].choose(q.shape[0], self.of_entries)
        _nsa_entries_kernel[self.grid(meta, tile["BLOCK_Q"], splits)](
            q, gates, keys, values, *held, meta.query_start_loc, meta.seq_lens, table,
            self.scale, splits, parts, q.stride(0), held[0].stride(0), gates.stride(0),
            table.stride(0), *keys.stride()[:3], *values.stride()[:3],
            **self.entries, **tile,
        )  # fmt: skip

    def _choose(
        self,
        q: torch.Tensor,
        caches: NsaCaches,
        meta: NsaMetadata,
        sums: tuple[torch.Tensor, torch.Tensor],
        lists: torch.Tensor,
        entry_splits: int,
        parts: int,
    ) -> None:
        request, places = self.request, self.select["BLOCK_C"]
        blocks = max(1, -(-meta.max_seq_len // request.select_size))
        of_split = SPLIT_BLOCKS if request.phase == "decode" else blocks
        splits = -(-blocks // of_split)
        best = torch.empty(
            (*lists.shape[:2], splits, places), dtype=torch.int64, device=lists.device
        )
        keys, table = caches.entry_keys, meta.entry_block_table
        _nsa_select_kernel[self.grid(meta, self.select["BLOCK_Q"], splits)](
            q, keys, *sums, best, meta.query_start_loc, meta.seq_lens, table,
            self.scale, of_split, splits, entry_splits, parts, request.num_kv_heads, q.stride(0),
            table.stride(0), *keys.stride()[:3], **self.select,
        )  # fmt: skip
        count = lists.shape[0] * lists.shape[1]
        _nsa_lists_kernel[(-(-count // self.lists["BLOCK_T"]),)](
            best, lists, count, splits,
            BLOCK_C=places, PLACES=request.num_selected, **self.lists,
        )  # fmt: skip

    def _run_branch(
        self,
        branch: int,
        q: torch.Tensor,
        gates: torch.Tensor,
        caches: NsaCaches,
        meta: NsaMetadata,
        lists: torch.Tensor,
        held: tuple[torch.Tensor, ...],
        split: tuple[int, int, int] | None,
    ) -> None:
        """split: number of splits, the first part and all parts; None for a whole branch."""
        splits, first, parts = (1, 0, 1) if split is None else split
        is_selected = branch == _SELECTED
        # Queries of a tile share the window, not the blocks.
        default = self.flat if is_selected or split is not None else self.tall
        form = "split" if split is not None else "selected" if is_selected else "window"
        tile = self.tuned[BRANCH, form].choose(q.shape[0], default)
        keys, values = (
            (caches.selected_keys, caches.selected_values)
            if is_selected
            else (caches.window_keys, caches.window_values)
        )
        _nsa_branch_kernel[self.grid(meta, tile["BLOCK_Q"], splits)](
            q, gates, keys, values, lists, *held, meta.query_start_loc, meta.seq_lens,
            meta.block_table, self.scale, 0 if is_selected else self.request.window,
            splits, first, parts, self.request.num_kv_heads, q.stride(0), held[0].stride(0),
            gates.stride(0), meta.block_table.stride(0), *keys.stride()[:3], *values.stride()[:3],
            BRANCH=branch, IS_WHOLE=split is None, **self.branch, **tile,
        )  # fmt: skip
