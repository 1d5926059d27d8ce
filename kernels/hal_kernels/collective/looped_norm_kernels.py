"""The all-reduce with its norm for rows that registers do not hold, in Triton: tile by tile.

Suffixes of tensor names: T rows, H hidden size, W ranks, P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.collective.peer_memory import _meet_ranks, _stage_tile, _sum_of_tiles


@triton.jit
def _all_reduce_norm_looped_kernel(
    x_TH_ptr, residual_TH_ptr, weight_H_ptr, y_TH_ptr, buffer_W_ptr, epoch_P_ptr, status_ptr,
    rank, T, H, eps, row_elements, slot_elements, half_bytes, flag_offset, max_polls,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """As `_all_reduce_norm_kernel`, BLOCK columns of a row at a time: first the sums, which go to
    the residual, and their squares, then the results, from the row that the cache still has.

    row_elements: room of a row in a half, at least H and a multiple of BLOCK. slot_elements: at
    least T * row_elements.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_TH_ptr.dtype.element_ty
    epoch = tl.load(epoch_P_ptr + program) + 1
    half_offset = (epoch & 1) * half_bytes
    offs = tl.arange(0, BLOCK)
    for row in range(program, T, programs):
        for start in range(0, H, BLOCK):
            cols = start + offs
            x = tl.load(x_TH_ptr + row * H + cols, mask=cols < H, other=0.0)
            for step in tl.static_range(WORLD if IS_PUSH else 1):
                _stage_tile(
                    buffer_W_ptr, x, row * row_elements + start, row * row_elements + H,
                    (rank + step) % WORLD if IS_PUSH else rank,
                    slot_elements * rank if IS_PUSH else 0, half_offset, 0,
                    dtype, BLOCK, 0, False,
                )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 0, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    tl.store(epoch_P_ptr + program, epoch)
    for row in range(program, T, programs):
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, H, BLOCK):
            cols = start + offs
            inside = cols < H
            total = _sum_of_tiles(
                buffer_W_ptr, row * row_elements + start, row * row_elements + H, rank,
                slot_elements, half_offset, 0, dtype, WORLD, BLOCK, IS_PUSH, False, 0, False,
            )  # fmt: skip
            total = tl.where(came == 1, total, float("nan"))
            residual = tl.load(residual_TH_ptr + row * H + cols, mask=inside, other=0.0)
            # Rounded to the activations' own dtype twice, as an all-reduce and an addition would.
            added = (total.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
            tl.store(residual_TH_ptr + row * H + cols, added, mask=inside)
            wide = tl.where(inside, added.to(tl.float32), 0.0)
            squares += wide * wide
        inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / H + eps)
        # A thread reads what it has stored itself: tiles of both loops are laid out alike.
        tl.debug_barrier()
        for start in range(0, H, BLOCK):
            cols = start + offs
            inside = cols < H
            wide = tl.load(residual_TH_ptr + row * H + cols, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_H_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            y = wide * inverse * weight
            tl.store(y_TH_ptr + row * H + cols, y.to(dtype), mask=inside)
