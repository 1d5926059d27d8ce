"""Launches the rounding of rows that stay in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal_kernels.grouped_gemm.round_kernels import _round_rows_kernel
from hal_kernels.grouped_gemm.round_variants import GROUP
from hal_kernels.quantize.triton_variants import group_block, launch_warps


def bind_round_rows() -> Callable[[torch.Tensor], torch.Tensor]:
    """kernel(x[M, K] bfloat16) -> [M, K]: what MXFP8 keeps of x. K is a multiple of 32."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        groups = width // GROUP
        block = group_block(GROUP, groups)
        y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        if rows:
            _round_rows_kernel[(rows, -(-groups // block))](
                x, y, x.stride(0), y.stride(0), width,
                GROUP=GROUP, BLOCK_G=block, num_warps=launch_warps(GROUP, block),
            )  # fmt: skip
        return y

    return kernel
