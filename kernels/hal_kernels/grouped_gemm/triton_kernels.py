"""Products per expert in Triton: rows sorted by expert, one weight each, no padding, no host read.

Suffixes of tensor names: M rows, E experts, N output features, K input features, G groups along K.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _expert_tile(
    offsets_E_ptr, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(expert, first row, end of the expert's rows) of a row tile; end 0 beyond the last tile.

    Each expert has its own tiles, the last one cut, so their number is only known on the device:
    programs are launched for the most there can be, and the rest end here.
    """
    experts = tl.arange(0, BLOCK_E)
    inside = experts < E
    begins = tl.load(offsets_E_ptr + experts, mask=inside, other=0)
    ends = tl.load(offsets_E_ptr + experts + 1, mask=inside, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((inside & (upto <= tile)).to(tl.int32), axis=0)
    is_mine = experts == expert
    before = tl.sum(tl.where(is_mine, upto - tiles, 0), axis=0)
    begin = tl.sum(tl.where(is_mine, begins, 0), axis=0)
    end = tl.sum(tl.where(is_mine, ends, 0), axis=0)
    return expert, begin + (tile - before) * BLOCK_M, end


@triton.jit
def _activated(acc, up, IS_GATED: tl.constexpr, CLAMP: tl.constexpr):
    """silu(gate) * up for a gated product, on float32. With a CLAMP (0 is none) the gate is capped
    from above and the other half on both sides, before."""
    if IS_GATED:
        if CLAMP > 0.0:
            # Without propagate_nan a NaN would become the clamp.
            acc = tl.minimum(acc, CLAMP, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        acc = acc / (1.0 + tl.exp(-acc)) * up
    return acc


@triton.jit
def _grouped_gemm_kernel(
    x_MK_ptr, w_ENK_ptr, y_MN_ptr, offsets_E_ptr, N, K,
    stride_xm, stride_we, stride_wn, stride_ym,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_GATED: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """y = epilogue(x @ w[expert].T), accumulated in float32. Program (row tile, column tile); N is
    the number of columns of y: gated weights have rows [0, N) for the gate, [N, 2N) for up.

    Within a tile offsets are of 32 bits, from pointers to its first row: pointers to every row
    would take twice the registers.
    """
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    first_n = tl.program_id(1) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows, cols = offs_m < (end - first).to(tl.int32), offs_n < N - first_n
    x_tile_ptr = x_MK_ptr + first.to(tl.int64) * stride_xm
    w_tile_ptr = w_ENK_ptr + expert.to(tl.int64) * stride_we + first_n.to(tl.int64) * stride_wn
    up_tile_ptr = w_tile_ptr + tl.cast(N, tl.int64) * stride_wn
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    w_offs = offs_n[:, None] * stride_wn + offs_k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = offs_k[None, :] < K - at
        x = tl.load(x_tile_ptr + at + x_offs, mask=rows[:, None] & inside, other=0.0)
        w = tl.load(w_tile_ptr + at + w_offs, mask=cols[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
        if IS_GATED:
            w_up = tl.load(up_tile_ptr + at + w_offs, mask=cols[:, None] & inside, other=0.0)
            up = tl.dot(x, tl.trans(w_up), up)
    y = _activated(acc, up, IS_GATED, CLAMP).to(y_MN_ptr.dtype.element_ty)
    y_tile_ptr = y_MN_ptr + first.to(tl.int64) * stride_ym + first_n
    y_offs = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_tile_ptr + y_offs, y, mask=rows[:, None] & cols[None, :])


@triton.jit
def _grouped_gemm_fp8_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_ENK_ptr, w_scale_ptr, y_MN_ptr, offsets_E_ptr, N, K,
    stride_xm, stride_xs, stride_we, stride_wn, stride_wse, stride_wsn, stride_ym,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_K: tl.constexpr, SCALE_N: tl.constexpr, IS_GATED: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """As `_grouped_gemm_kernel` for FP8 with float32 scales: of x per row and GROUP_K columns, of w
    [E, rows / SCALE_N, K / GROUP_K]. Each group's product is scaled into the accumulator; where a
    tile's columns share a scale of w, that is one value, multiplied into those of the rows."""
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    first_n = tl.program_id(1) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, GROUP_K)
    rows, cols = offs_m < (end - first).to(tl.int32), offs_n < N - first_n
    x_tile_ptr = x_MK_ptr + first.to(tl.int64) * stride_xm
    w_tile_ptr = w_ENK_ptr + expert.to(tl.int64) * stride_we + first_n.to(tl.int64) * stride_wn
    up_tile_ptr = w_tile_ptr + tl.cast(N, tl.int64) * stride_wn
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    w_offs = offs_n[:, None] * stride_wn + offs_k[None, :]
    xs_ptrs = x_scale_MG_ptr + (first.to(tl.int64) + offs_m) * stride_xs
    scales = w_scale_ptr + expert.to(tl.int64) * stride_wse
    ws_ptr = scales + (first_n // SCALE_N).to(tl.int64) * stride_wsn
    ws_ptrs = scales + ((first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    us_ptrs = scales + ((N + first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(tl.cdiv(K, GROUP_K)):
        at = group * GROUP_K
        inside = offs_k[None, :] < K - at
        x = tl.load(x_tile_ptr + at + x_offs, mask=rows[:, None] & inside, other=0.0)
        w = tl.load(w_tile_ptr + at + w_offs, mask=cols[:, None] & inside, other=0.0)
        x_scale = tl.load(xs_ptrs + group, mask=rows, other=0.0)
        if SCALE_N % BLOCK_N == 0:
            acc += tl.dot(x, tl.trans(w)) * (x_scale * tl.load(ws_ptr + group))[:, None]
        else:
            w_scale = tl.load(ws_ptrs + group, mask=cols, other=0.0)
            acc += tl.dot(x, tl.trans(w)) * x_scale[:, None] * w_scale[None, :]
        if IS_GATED:
            # Rows of up begin at N, which need not be where a block of scales begins.
            w_up = tl.load(up_tile_ptr + at + w_offs, mask=cols[:, None] & inside, other=0.0)
            u_scale = tl.load(us_ptrs + group, mask=cols, other=0.0)
            up += tl.dot(x, tl.trans(w_up)) * x_scale[:, None] * u_scale[None, :]
    y = _activated(acc, up, IS_GATED, CLAMP).to(y_MN_ptr.dtype.element_ty)
    y_tile_ptr = y_MN_ptr + first.to(tl.int64) * stride_ym + first_n
    y_offs = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_tile_ptr + y_offs, y, mask=rows[:, None] & cols[None, :])


@triton.jit
def _fp8_of_fp4(packed, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_FNUZ: tl.constexpr):
    """e2m1 codes, two in a byte, as e4m3 [BLOCK_N, BLOCK_K]: every value of the one is one of the
    other. Of the magnitudes 0, ½, 1, 1½, 2, 3, 4, 6 all but the first two are evenly spaced codes.
    """
    codes = tl.join(packed & 0xF, packed >> 4).reshape(BLOCK_N, BLOCK_K)
    size = codes & 0x7
    bits = tl.where(size >= 2, 48 + 4 * size, size * 48)
    sign = (codes & 0x8) << 4
    if IS_FNUZ:
        # One more in the exponent for the same value; the code of minus zero is NaN there.
        bits = tl.where(size == 0, 0, (bits + 8) | sign)
        wide = bits.to(tl.uint8).to(tl.float8e4b8, bitcast=True)
    else:
        wide = (bits | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return wide


@triton.jit
def _power_of_two(code):
    """A ue8m0 code as float32; 0 is 2**-127, which float32 holds as a denormal."""
    bits = tl.where(code == 0, 0x400000, code.to(tl.int32) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mxfp4_product(
    acc, x, x_scales, w_ptrs, ws_rows, step, cols, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNPACKS: tl.constexpr, IS_FNUZ: tl.constexpr,
):  # fmt: skip
    """One step along K of x @ w.T, added to acc; see `_grouped_gemm_mxfp4_kernel`. w_ptrs, ws_rows:
    of the first column of each of the rows `cols` of w."""
    at_b = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    # K is one of 32, which the compiler does not know: without the hint it loads 8 bytes at a time.
    in_b = at_b[None, :] < tl.multiple_of(K // 2, 16)
    w = tl.load(w_ptrs + at_b[None, :], mask=cols[:, None] & in_b, other=0)
    if BLOCK_K == 32:
        w_scale = _power_of_two(tl.load(ws_rows + step, mask=cols, other=0))
        wide = _fp8_of_fp4(w, BLOCK_N, BLOCK_K, IS_FNUZ)
        acc += tl.dot(x, tl.trans(wide)) * x_scales[:, None] * w_scale[None, :]
    else:
        at_g = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
        in_g = at_g[None, :] < K // 32
        w_scales = tl.load(ws_rows[:, None] + at_g[None, :], mask=cols[:, None] & in_g, other=0)
        if UNPACKS:
            wide = _fp8_of_fp4(w, BLOCK_N, BLOCK_K, IS_FNUZ)
            acc = tl.dot_scaled(x, x_scales, "e4m3", tl.trans(wide), w_scales, "e4m3", acc)
        else:
            acc = tl.dot_scaled(x, x_scales, "e4m3", tl.trans(w), w_scales, "e2m1", acc)
    return acc


@triton.jit
def _grouped_gemm_mxfp4_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_ENK_ptr, w_scale_ENG_ptr, y_MN_ptr, offsets_E_ptr, N, K,
    stride_xm, stride_xs, stride_we, stride_wn, stride_wse, stride_wsn, stride_ym,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UNPACKS: tl.constexpr, IS_FNUZ: tl.constexpr, IS_GATED: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """y = epilogue(x @ w[expert].T) for FP8 (e4m3) rows and FP4 (e2m1) weights, each with one ue8m0
    scale per 32 columns (OCP Microscaling v1.0). Two weights are in a byte, the even column in the
    low half. K is a multiple of 32. Gated weights as in `_grouped_gemm_kernel`.

    BLOCK_K of 32: the weights are widened to FP8, exactly, and each group's product is scaled into
    the accumulator, for FP8 units that know no scales. A larger one: the unit multiplies the scales
    in by itself; UNPACKS widens to FP8 where it takes no FP4 beside FP8.
    """
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    offs_m = first + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k, offs_g = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    rows, cols = offs_m < end, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    xs_rows = x_scale_MG_ptr + offs_m.to(tl.int64) * stride_xs
    weight = w_ENK_ptr + expert.to(tl.int64) * stride_we
    w_ptrs = weight + offs_n.to(tl.int64)[:, None] * stride_wn
    up_ptrs = weight + (offs_n + N).to(tl.int64)[:, None] * stride_wn
    scales = w_scale_ENG_ptr + expert.to(tl.int64) * stride_wse
    ws_rows = scales + offs_n.to(tl.int64) * stride_wsn
    us_rows = scales + (offs_n + N).to(tl.int64) * stride_wsn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        at_k = step * BLOCK_K + offs_k
        x = tl.load(x_ptrs + at_k[None, :], mask=rows[:, None] & (at_k[None, :] < K), other=0.0)
        if BLOCK_K == 32:
            x_scales = _power_of_two(tl.load(xs_rows + step, mask=rows, other=0))
        else:
            at_g = step * (BLOCK_K // 32) + offs_g
            in_g = rows[:, None] & (at_g[None, :] < K // 32)
            x_scales = tl.load(xs_rows[:, None] + at_g[None, :], mask=in_g, other=0)
        acc = _mxfp4_product(
            acc, x, x_scales, w_ptrs, ws_rows, step, cols, K, BLOCK_N, BLOCK_K, UNPACKS, IS_FNUZ
        )
        if IS_GATED:
            up = _mxfp4_product(
                up, x, x_scales, up_ptrs, us_rows, step, cols, K, BLOCK_N, BLOCK_K, UNPACKS, IS_FNUZ
            )
    y = _activated(acc, up, IS_GATED, CLAMP)
    y_ptrs = y_MN_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_MN_ptr.dtype.element_ty), mask=rows[:, None] & cols[None, :])
