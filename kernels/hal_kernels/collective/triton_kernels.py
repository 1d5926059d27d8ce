"""Collectives over peers' memory in Triton; see `peer_memory` for buffers, flags and epochs.

push: a rank writes into the peers' buffers (posted writes: over PCIe faster than reads), each
source into a slot of its own. pull: it writes into its own, and the peers read.
Sums are in float32 in rank order, so all ranks have the same bits. Rounded on the wire
(WIRE_GROUP > 0), a message is e4m3 with a float32 scale for each group; all that is gathered is
exact. Epochs are counted on the device, by program, so that a captured graph may be replayed; a
buffer is therefore always used with the same number of programs.
Suffixes of tensor names: N elements, W ranks, P programs, T rows, H hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.collective.peer_memory import (
    _meet_ranks,
    _stage_tile,
    _staged_tile,
    _sum_of_tiles,
)


@triton.jit
def _all_reduce_one_shot_kernel(
    x_N_ptr, y_N_ptr, buffer_W_ptr, epoch_P_ptr, status_ptr, rank, N, slot_elements, half_bytes,
    scale_offset, flag_offset, max_polls,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, WIRE_GROUP: tl.constexpr,
    IS_FNUZ: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """y = sum of all ranks' x: every rank gets all of every other rank's message.

    slot_elements: room of a source in a half, at least N and a multiple of BLOCK. scale_offset:
    bytes from the start of a half to the scales of the wire.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_N_ptr.dtype.element_ty
    epoch = tl.load(epoch_P_ptr + program) + 1
    half_offset = (epoch & 1) * half_bytes
    for tile in range(program, tl.cdiv(N, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_N_ptr + offs, mask=offs < N, other=0.0)
        for step in tl.static_range(WORLD if IS_PUSH else 1):
            # Each rank starts at another peer, so that no link has all the writes at once.
            _stage_tile(
                buffer_W_ptr, x, start, N, (rank + step) % WORLD if IS_PUSH else rank,
                slot_elements * rank if IS_PUSH else 0, half_offset, scale_offset,
                dtype, BLOCK, WIRE_GROUP, IS_FNUZ,
            )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 0, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(N, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        total = _sum_of_tiles(
            buffer_W_ptr, start, N, rank, slot_elements, half_offset, scale_offset,
            dtype, WORLD, BLOCK, IS_PUSH, False, WIRE_GROUP, IS_FNUZ,
        )  # fmt: skip
        total = tl.where(came == 1, total, float("nan"))
        tl.store(y_N_ptr + offs, total.to(dtype), mask=offs < N)
    tl.store(epoch_P_ptr + program, epoch)


@triton.jit
def _all_reduce_norm_kernel(
    x_TH_ptr, residual_TH_ptr, weight_H_ptr, y_TH_ptr, buffer_W_ptr, epoch_P_ptr, status_ptr,
    rank, T, H, eps, slot_elements, half_bytes, flag_offset, max_polls,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """residual += sum of all ranks' x; y = residual / rms * weight. In one shot, a row a tile.

    BLOCK: a power of two of at least H. slot_elements: at least T * BLOCK.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_TH_ptr.dtype.element_ty
    epoch = tl.load(epoch_P_ptr + program) + 1
    half_offset = (epoch & 1) * half_bytes
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    for row in range(program, T, programs):
        x = tl.load(x_TH_ptr + row * H + cols, mask=inside, other=0.0)
        for step in tl.static_range(WORLD if IS_PUSH else 1):
            _stage_tile(
                buffer_W_ptr, x, row * BLOCK, row * BLOCK + H,
                (rank + step) % WORLD if IS_PUSH else rank,
                slot_elements * rank if IS_PUSH else 0, half_offset, 0,
                dtype, BLOCK, 0, False,
            )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 0, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    tl.store(epoch_P_ptr + program, epoch)  # here, so that no register holds it over the sums
    weight = tl.load(weight_H_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    for row in range(program, T, programs):
        total = _sum_of_tiles(
            buffer_W_ptr, row * BLOCK, row * BLOCK + H, rank, slot_elements, half_offset, 0,
            dtype, WORLD, BLOCK, IS_PUSH, False, 0, False,
        )  # fmt: skip
        total = tl.where(came == 1, total, float("nan"))
        residual = tl.load(residual_TH_ptr + row * H + cols, mask=inside, other=0.0)
        # Rounded to the activations' own dtype twice, as an all-reduce and an addition would.
        added = (total.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_TH_ptr + row * H + cols, added, mask=inside)
        wide = tl.where(inside, added.to(tl.float32), 0.0)
        y = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / H + eps)) * weight
        tl.store(y_TH_ptr + row * H + cols, y.to(dtype), mask=inside)


@triton.jit
def _stage_parts(
    x_N_ptr, buffer_W_ptr, part_elements, part_width, row_width, N, rank, slot_elements,
    half_offset, scale_offset,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, WIRE_GROUP: tl.constexpr,
    IS_FNUZ: tl.constexpr,
):  # fmt: skip
    """Write each rank's part of x, tile by tile, where its owner will sum it.

    Part p of x is its columns [p * part_width, (p + 1) * part_width) of rows of `row_width`.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_N_ptr.dtype.element_ty
    for tile in range(program, tl.cdiv(part_elements, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        place = offs // part_width * row_width + offs % part_width
        for step in tl.static_range(WORLD):
            owner = (rank + step) % WORLD
            source = place + owner * part_width
            # The last part of a flat message may be shorter than the others.
            x = tl.load(x_N_ptr + source, mask=(offs < part_elements) & (source < N), other=0.0)
            _stage_tile(
                buffer_W_ptr, x, start, part_elements, owner if IS_PUSH else rank,
                slot_elements * (rank if IS_PUSH else owner), half_offset, scale_offset,
                dtype, BLOCK, WIRE_GROUP, IS_FNUZ,
            )  # fmt: skip


@triton.jit
def _reduce_scatter_kernel(
    x_TW_ptr, y_TP_ptr, buffer_W_ptr, epoch_P_ptr, status_ptr, rank, T, part_width,
    slot_elements, half_bytes, scale_offset, flag_offset, max_polls,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, WIRE_GROUP: tl.constexpr,
    IS_FNUZ: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """y[T, part_width] = this rank's columns of the sum of all ranks' x[T, WORLD * part_width]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_TW_ptr.dtype.element_ty
    epoch = tl.load(epoch_P_ptr + program) + 1
    half_offset = (epoch & 1) * half_bytes
    part = T * part_width
    _stage_parts(
        x_TW_ptr, buffer_W_ptr, part, part_width, part_width * WORLD, part * WORLD, rank,
        slot_elements, half_offset, scale_offset,
        WORLD, BLOCK, IS_PUSH, WIRE_GROUP, IS_FNUZ,
    )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 0, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(part, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        total = _sum_of_tiles(
            buffer_W_ptr, start, part, rank, slot_elements, half_offset, scale_offset,
            dtype, WORLD, BLOCK, IS_PUSH, True, WIRE_GROUP, IS_FNUZ,
        )  # fmt: skip
        total = tl.where(came == 1, total, float("nan"))
        tl.store(y_TP_ptr + offs, total.to(dtype), mask=offs < part)
    tl.store(epoch_P_ptr + program, epoch)


@triton.jit
def _all_gather_kernel(
    x_TP_ptr, y_TW_ptr, buffer_W_ptr, epoch_P_ptr, status_ptr, rank, T, part_width,
    slot_elements, half_bytes, flag_offset, max_polls,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """y[T, WORLD * part_width]: the ranks' x[T, part_width] side by side, bit for bit."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_TP_ptr.dtype.element_ty
    epoch = tl.load(epoch_P_ptr + program) + 1
    half_offset = (epoch & 1) * half_bytes
    part = T * part_width
    for tile in range(program, tl.cdiv(part, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_TP_ptr + offs, mask=offs < part, other=0.0)
        for step in tl.static_range(WORLD if IS_PUSH else 1):
            _stage_tile(
                buffer_W_ptr, x, start, part, (rank + step) % WORLD if IS_PUSH else rank,
                slot_elements * rank if IS_PUSH else 0, half_offset, 0, dtype, BLOCK, 0, False,
            )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 0, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(part, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        place = offs // part_width * (part_width * WORLD) + offs % part_width
        for step in tl.static_range(WORLD):
            source = (rank + step) % WORLD
            values = _staged_tile(
                buffer_W_ptr, start, part, rank if IS_PUSH else source,
                slot_elements * source if IS_PUSH else 0, half_offset, 0, dtype, BLOCK, 0, False,
            )  # fmt: skip
            values = tl.where(came == 1, values, float("nan"))
            tl.store(y_TW_ptr + place + source * part_width, values.to(dtype), mask=offs < part)
    tl.store(epoch_P_ptr + program, epoch)


@triton.jit
def _all_reduce_two_shot_kernel(
    x_N_ptr, y_N_ptr, buffer_W_ptr, epoch_P_ptr, status_ptr, rank, N, part_elements, slot_elements,
    half_bytes, scale_offset, result_offset, flag_offset, max_polls,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr, WIRE_GROUP: tl.constexpr,
    IS_FNUZ: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """y = sum of all ranks' x: each rank sums a part, then all gather the parts.

    part_elements: of one rank, ceil(N / WORLD) or more, a multiple of 8. result_offset: bytes from
    the start of a half to the summed parts.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_N_ptr.dtype.element_ty
    epoch = tl.load(epoch_P_ptr + program) + 1
    half_offset = (epoch & 1) * half_bytes
    _stage_parts(
        x_N_ptr, buffer_W_ptr, part_elements, part_elements, N, N, rank, slot_elements,
        half_offset, scale_offset, WORLD, BLOCK, IS_PUSH, WIRE_GROUP, IS_FNUZ,
    )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 0, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(part_elements, BLOCK), programs):
        start = tile * BLOCK
        total = _sum_of_tiles(
            buffer_W_ptr, start, part_elements, rank, slot_elements, half_offset, scale_offset,
            dtype, WORLD, BLOCK, IS_PUSH, True, WIRE_GROUP, IS_FNUZ,
        )  # fmt: skip
        # A rank that waited in vain passes its NaN on: nobody takes part of a sum for the sum.
        total = tl.where(came == 1, total, float("nan")).to(dtype)
        for step in tl.static_range(WORLD if IS_PUSH else 1):
            _stage_tile(
                buffer_W_ptr, total, start, part_elements,
                (rank + step) % WORLD if IS_PUSH else rank,
                slot_elements * rank if IS_PUSH else 0, half_offset + result_offset, 0,
                dtype, BLOCK, 0, False,
            )  # fmt: skip
    came = _meet_ranks(
        buffer_W_ptr, status_ptr, flag_offset, 1, program, programs, rank, epoch, max_polls,
        WORLD, USE_PTX,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(part_elements, BLOCK), programs):
        start = tile * BLOCK
        offs = start + tl.arange(0, BLOCK)
        for step in tl.static_range(WORLD):
            owner = (rank + step) % WORLD
            values = _staged_tile(
                buffer_W_ptr, start, part_elements, rank if IS_PUSH else owner,
                slot_elements * owner if IS_PUSH else 0, half_offset + result_offset, 0,
                dtype, BLOCK, 0, False,
            )  # fmt: skip
            values = tl.where(came == 1, values, float("nan"))
            place = owner * part_elements + offs
            inside = (offs < part_elements) & (place < N)
            tl.store(y_N_ptr + place, values.to(dtype), mask=inside)
    tl.store(epoch_P_ptr + program, epoch)
