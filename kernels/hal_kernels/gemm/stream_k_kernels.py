"""Stream-K products in Triton: steps along K shared out evenly, whatever tiles they fall in.

Suffixes of tensor names: M rows (tokens), N output features, K input features, P parts, two a
program, each BLOCK_M x BLOCK_N (twice that for a gated product). The arithmetic of who does what is
`stream_k_schedule`, where it says why.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.epilogues import EPILOGUE_SILU_GATED, _finish
from hal_kernels.gemm.triton_kernels import _tile_of


@triton.jit
def _begin_of(program, total, programs):
    """Number of the first step of a program, counted over all tiles."""
    return program * (total // programs) + tl.minimum(program, total % programs)


@triton.jit
def _program_of(step, total, programs):
    """The program that has a step, counted over all tiles."""
    share = total // programs
    more = total % programs
    longer = step // (share + 1)
    shorter = more + (step - more * (share + 1)) // share
    return tl.where(step < more * (share + 1), longer, shorter)


@triton.jit
def _gemm_stream_k_kernel(
    x_MK_ptr, w_NK_ptr, bias_N_ptr, y_MN_ptr, part_P_ptr,
    M, N, K, stride_xm, stride_wn, stride_ym,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """y = epilogue(x @ w.T + bias) as `_gemm_kernel`, of the tiles that one program has whole; the
    other tiles' float32 parts for `_stream_k_fix_up_kernel`."""
    steps = tl.cdiv(K, BLOCK_K)
    total = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * steps
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin = _begin_of(program, total, programs)
    end = _begin_of(program + 1, total, programs)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(begin // steps, tl.cdiv(end, steps)):
        first = tl.maximum(begin - tile * steps, 0)
        last = tl.minimum(end - tile * steps, steps)
        block_m, block_n = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        rows, cols = offs_m < M, offs_n < N
        x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
        w_ptrs = w_NK_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
        up_ptrs = w_NK_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(first, last):
            at_k = step * BLOCK_K + offs_k
            inside = at_k[None, :] < K
            x = tl.load(x_ptrs + at_k[None, :], mask=rows[:, None] & inside, other=0.0)
            w = tl.load(w_ptrs + at_k[None, :], mask=cols[:, None] & inside, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc)
            if EPILOGUE == EPILOGUE_SILU_GATED:
                w_up = tl.load(up_ptrs + at_k[None, :], mask=cols[:, None] & inside, other=0.0)
                up = tl.dot(x, tl.trans(w_up), up)
        if last - first == steps:
            y = _finish(acc, up, bias_N_ptr, offs_n, N, HAS_BIAS, EPILOGUE, 0.0)
            y_ptrs = y_MN_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
            tl.store(y_ptrs, y.to(y_MN_ptr.dtype.element_ty), mask=rows[:, None] & cols[None, :])
        else:
            halves: tl.constexpr = 2 if EPILOGUE == EPILOGUE_SILU_GATED else 1
            slot = (2 * program + (first == 0).to(tl.int32)).to(tl.int64)
            part = part_P_ptr + slot * (halves * BLOCK_M * BLOCK_N)
            at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(part + at, acc)
            if EPILOGUE == EPILOGUE_SILU_GATED:
                tl.store(part + BLOCK_M * BLOCK_N + at, up)


@triton.jit
def _stream_k_fix_up_kernel(
    part_P_ptr, bias_N_ptr, y_MN_ptr, M, N, steps, programs, stride_ym,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Program (tile, ROWS of its rows): sums the parts of a tile in the order of its steps, then
    the epilogue. Nothing to do for a tile that one program has whole."""
    tile = tl.program_id(0)
    total = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * steps
    owner = _program_of(tile * steps, total, programs)
    last = _program_of((tile + 1) * steps - 1, total, programs)
    if owner == last:
        return
    block_m, block_n = _tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs_m = block_m * BLOCK_M + row
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    halves: tl.constexpr = 2 if EPILOGUE == EPILOGUE_SILU_GATED else 1
    acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for program in range(owner, last + 1):
        slot = (2 * program + (program == owner).to(tl.int32)).to(tl.int64)
        part = part_P_ptr + slot * (halves * BLOCK_M * BLOCK_N)
        acc += tl.load(part + at)
        if EPILOGUE == EPILOGUE_SILU_GATED:
            up += tl.load(part + BLOCK_M * BLOCK_N + at)
    y = _finish(acc, up, bias_N_ptr, offs_n, N, HAS_BIAS, EPILOGUE, 0.0)
    y_ptrs = y_MN_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    tile_mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y_ptrs, y.to(y_MN_ptr.dtype.element_ty), mask=tile_mask)
