"""Binds attention: programs by shape, keys shared among work-items where there are few rows."""

from __future__ import annotations

from typing import Any

import torch

from hal.candidates import Bind, Kernel
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal_opencl.memory import CopiedMemory, Fresh, Launcher, memory_of

PREFILL_ROWS = 8  # of a tile: their scores and sixteen keys fill the registers
MAX_ROWS = 8
# Below this many keys a second pass over the parts costs more than the cores that it keeps busy.
KEYS_A_PART = 256
MAX_PARTS = 16


def load_attention(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(
        request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        if (sinks is not None) != request.has_sinks:
            raise ValueError(f"opencl attention: required sinks as {request.arguments()} says")
        group = request.num_heads // request.num_kv_heads
        tile = PREFILL_ROWS if request.phase == "prefill" else min(group, MAX_ROWS)
        defines = _defines(request, group, tile)
        sink_values = torch.zeros(1) if sinks is None else sinks.float().clone()
        kernel = memory.device.kernel("attention.cl", "attend", defines)
        attend = Launcher(memory, kernel, memory.constant(sink_values))
        combine = Launcher(memory, memory.device.kernel("attention.cl", "combine", defines))
        softcap = float(request.softcap or 1.0)
        width = request.num_heads * request.v_head_dim

        def attention(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
        ) -> torch.Tensor:
            table = meta.block_table
            if isinstance(memory, CopiedMemory):
                k_cache, v_cache, table = _used_blocks(k_cache, v_cache, table)
            sequences = meta.seq_lens.shape[0]
            tiles = -(-meta.max_query_len * group // tile)
            parts = _parts(tiles * request.num_kv_heads * sequences, meta, device.num_cores)
            y = q.new_empty((q.shape[0], width))
            target = y
            if parts > 1:
                part_size = request.v_head_dim + 2
                target = q.new_empty((q.shape[0] * request.num_heads * parts, part_size))
            attend(
                (tiles * parts, request.num_kv_heads, sequences),
                *(float(scale), softcap, q, q.stride(0), k_cache, v_cache),
                *(meta.query_start_loc, meta.seq_lens, table, table.stride(0)),
                *(parts, Fresh(target)),
            )
            if parts > 1:
                combine((q.shape[0] * request.num_heads,), Fresh(target), parts, Fresh(y))
            return y

        return attention

    return bind


def _defines(request: AttentionRequest, group: int, tile: int) -> dict[str, int]:
    return {
        "TILE_ROWS": tile,
        "GROUP": group,
        "NUM_KV_HEADS": request.num_kv_heads,
        "HEAD_DIM": request.head_dim,
        "V_HEAD_DIM": request.v_head_dim,
        "BLOCK": request.block_size,
        "WINDOW": request.window,
        "CAUSAL": int(request.is_causal),
        "SOFTCAP": int(bool(request.softcap)),
        "HAS_SINKS": int(request.has_sinks),
    }


def _parts(work_items: int, meta: AttentionMetadata, num_cores: int) -> int:
    """How many work-items share the keys of a row: none but one where there are enough rows."""
    if work_items >= 4 * num_cores:
        return 1
    return max(1, min(MAX_PARTS, meta.max_seq_len // KEYS_A_PART))


def _used_blocks(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor
) -> tuple[Any, Any, Any]:
    """The caches reduced to the blocks of the table, which are all that has to travel."""
    used, renumbered = torch.unique(table, return_inverse=True)
    blocks = used.long()
    return k_cache[blocks], v_cache[blocks], renumbered.to(torch.int32).contiguous()
