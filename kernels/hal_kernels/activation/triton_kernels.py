"""Gated activations in Triton. Suffixes of tensor names: R rows, F features."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def _gated_activation_kernel(
    x_R2F_ptr, y_RF_ptr, stride_x, stride_y, F, clamp,
    BLOCK_F: tl.constexpr, IS_GELU: tl.constexpr, HAS_CLAMP: tl.constexpr,
):  # fmt: skip
    """y = act(x[:, :F]) * x[:, F:], in float32. With a clamp the gate is capped from above and the
    other half on both sides, before."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = offs < F
    gate = tl.load(x_R2F_ptr + row * stride_x + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_R2F_ptr + row * stride_x + F + offs, mask=inside, other=0.0).to(tl.float32)
    if HAS_CLAMP:
        # Without propagate_nan a NaN would become the clamp.
        gate = tl.minimum(gate, clamp, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -clamp, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, clamp, propagate_nan=tl.PropagateNan.ALL)
    if IS_GELU:
        inner = _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        # tanh(z) = 2 / (1 + exp(-2 z)) - 1
        active = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    y = (active * up).to(y_RF_ptr.dtype.element_ty)
    tl.store(y_RF_ptr + row * stride_y + offs, y, mask=inside)
