"""Peers' memory in Triton: every rank maps every other rank's buffer; flags say what is in it.

One buffer a rank, the same layout on all: two halves of `half_bytes` that calls use in turn, then
flags. A call has an epoch, one larger than the last. Flags are int32 [phase, program, source rank]
and hold the last epoch for which the source's program has finished a phase.

A program owns the tiles `program, program + programs, …` on every rank, so that it waits for the
same program of the peers and for nobody else; programs must all be resident (at most one a
multiprocessor). A half is written again two epochs later: by then every peer has raised its flag
for the epoch between, so its kernel of this one has ended.

Waiting has a limit of polls. A rank that reaches it says in `status` which peer did not come, and
its result is NaN: nothing that is wrong looks right.

Flags cross PCIe, where remote atomics need not exist: on NVIDIA they are plain stores with release
and loads with acquire order at system scope (PTX ISA, memory consistency model). There a barrier
orders what a block's threads have stored before what one of them releases. On AMD it does not:
waves wait at it, and not for their stores, and a release waits for those of its own wave (LLVM
AMDGPU back end, memory model of gfx90a to gfx12), so that each wave releases before the barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of the words that `_settle_stores` touches, one in so many lanes: each wave has at least one, of
# up to 16 waves a block.
_LANES = tl.constexpr(1024)
_APART = tl.constexpr(64)


@triton.jit
def _settle_stores(status_ptr):
    """Every wave of this block waits until the system sees what it has stored: adds nothing to the
    status, with release order."""
    lane = tl.arange(0, _LANES)
    nothing = tl.zeros((_LANES,), dtype=tl.int32)
    tl.atomic_add(
        status_ptr + nothing, nothing, mask=lane % _APART == 0, sem="release", scope="sys"
    )


@triton.jit
def _release_flag(pointer, epoch, USE_PTX: tl.constexpr):
    """All that this thread block has stored is visible to whoever sees the flag; without PTX what
    `_settle_stores` was called behind."""
    tl.debug_barrier()
    if USE_PTX:
        tl.inline_asm_elementwise(
            "{ st.global.release.sys.b32 [$1], $2; mov.u32 $0, $2; }", "=r,l,r",
            [pointer.to(tl.uint64, bitcast=True), epoch], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_xchg(pointer, epoch, sem="release", scope="sys")


@triton.jit
def _acquire_flag(pointer, USE_PTX: tl.constexpr):
    if USE_PTX:
        seen = tl.inline_asm_elementwise(
            "ld.global.acquire.sys.b32 $0, [$1];", "=r,l",
            [pointer.to(tl.uint64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def _meet_ranks(
    buffer_W_ptr, status_ptr, flag_offset, phase, program, programs, rank, epoch, max_polls,
    WORLD: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Tell every rank that this program has finished a phase of the epoch, and wait for the same
    program of every rank: 1 if each came within the limit of polls, else 0."""
    if not USE_PTX:
        _settle_stores(status_ptr)
    place = (phase * programs + program) * WORLD + rank
    for peer in tl.static_range(WORLD):
        base = tl.load(buffer_W_ptr + peer) + flag_offset
        _release_flag(base.to(tl.pointer_type(tl.int32)) + place, epoch, USE_PTX)
    own = (tl.load(buffer_W_ptr + rank) + flag_offset).to(tl.pointer_type(tl.int32))
    came = 1
    for peer in tl.static_range(WORLD):
        flag = own + (phase * programs + program) * WORLD + peer
        # A peer may be an epoch ahead; the difference stays right when epochs wrap around.
        behind = epoch - _acquire_flag(flag, USE_PTX)
        polls = 0
        while (behind > 0) & (polls < max_polls):
            behind = epoch - _acquire_flag(flag, USE_PTX)
            polls += 1
        if behind > 0:
            came = 0
            # The first one: those behind it may be late because they waited for it.
            tl.atomic_cas(status_ptr, 0, peer + 1)
    tl.debug_barrier()
    return came


@triton.jit
def _data_of(buffer_W_ptr, peer, offset, dtype: tl.constexpr):
    """Where a rank's data starts: `offset` bytes into its buffer."""
    pointer = (tl.load(buffer_W_ptr + peer) + offset).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _stage_tile(
    buffer_W_ptr, values, start, limit, holder, slot, half_offset, scale_offset,
    dtype: tl.constexpr, BLOCK: tl.constexpr, WIRE_GROUP: tl.constexpr, IS_FNUZ: tl.constexpr,
):  # fmt: skip
    """Write a tile into a rank's half at element `slot + start`, as it is or rounded in groups to
    e4m3, the fnuz one where the hardware has that. Of the elements, `limit` are inside. A group
    that is not finite has the scale NaN, so that all of it arrives as NaN: limiting alone would
    make a finite value of what is not a number."""
    offs = start + tl.arange(0, BLOCK)
    inside = offs < limit
    if WIRE_GROUP == 0:
        data = _data_of(buffer_W_ptr, holder, half_offset, dtype)
        tl.store(data + slot + offs, values, mask=inside)
    else:
        groups: tl.constexpr = BLOCK // WIRE_GROUP
        wire: tl.constexpr = tl.float8e4b8 if IS_FNUZ else tl.float8e4nv
        largest: tl.constexpr = 240.0 if IS_FNUZ else 448.0
        wide = tl.reshape(values.to(tl.float32), (groups, WIRE_GROUP))
        peak = tl.max(tl.abs(wide), axis=1)
        scale = tl.where(peak > 0.0, peak / largest, 1.0)
        # Not of the peak: a maximum passes over NaN.
        is_broken = tl.max(tl.where(tl.abs(wide) < float("inf"), 0, 1), axis=1)
        scale = tl.where(is_broken > 0, float("nan"), scale)
        narrow = tl.minimum(tl.maximum(wide / scale[:, None], -largest), largest)
        data = _data_of(buffer_W_ptr, holder, half_offset, wire)
        tl.store(data + slot + offs, tl.reshape(narrow, (BLOCK,)).to(wire), mask=inside)
        scales = _data_of(buffer_W_ptr, holder, half_offset + scale_offset, tl.float32)
        group = tl.arange(0, groups)
        is_used = start + group * WIRE_GROUP < limit
        tl.store(scales + (slot + start) // WIRE_GROUP + group, scale, mask=is_used)


@triton.jit
def _staged_tile(
    buffer_W_ptr, start, limit, holder, slot, half_offset, scale_offset,
    dtype: tl.constexpr, BLOCK: tl.constexpr, WIRE_GROUP: tl.constexpr, IS_FNUZ: tl.constexpr,
):  # fmt: skip
    """The tile that `_stage_tile` wrote, in float32; zeros outside."""
    offs = start + tl.arange(0, BLOCK)
    inside = offs < limit
    if WIRE_GROUP == 0:
        data = _data_of(buffer_W_ptr, holder, half_offset, dtype)
        values = tl.load(data + slot + offs, mask=inside, other=0.0).to(tl.float32)
    else:
        wire: tl.constexpr = tl.float8e4b8 if IS_FNUZ else tl.float8e4nv
        data = _data_of(buffer_W_ptr, holder, half_offset, wire)
        narrow = tl.load(data + slot + offs, mask=inside, other=0.0).to(tl.float32)
        scales = _data_of(buffer_W_ptr, holder, half_offset + scale_offset, tl.float32)
        values = narrow * tl.load(scales + (slot + offs) // WIRE_GROUP, mask=inside, other=0.0)
    return values


@triton.jit
def _sum_of_tiles(
    buffer_W_ptr, start, limit, rank, slot_elements, half_offset, scale_offset,
    dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, IS_PUSH: tl.constexpr,
    HAS_PARTS: tl.constexpr, WIRE_GROUP: tl.constexpr, IS_FNUZ: tl.constexpr,
):  # fmt: skip
    """Sum of a tile over the ranks, in rank order and float32, so that it is equal wherever it is
    computed. Pushed: all in our half, a slot for each source. Pulled: in the sources' halves, in
    slot `rank` where they are in parts for each reader, else in slot 0."""
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD):
        if IS_PUSH:
            total += _staged_tile(
                buffer_W_ptr, start, limit, rank, slot_elements * peer, half_offset, scale_offset,
                dtype, BLOCK, WIRE_GROUP, IS_FNUZ,
            )  # fmt: skip
        else:
            total += _staged_tile(
                buffer_W_ptr, start, limit, peer, slot_elements * rank if HAS_PARTS else 0,
                half_offset, scale_offset, dtype, BLOCK, WIRE_GROUP, IS_FNUZ,
            )  # fmt: skip
    return total
