"""One matrix product per expert that has rows, on the CPU by MKL or oneDNN through torch.

The weights stay as they are ([E, N, K], or a transposed view of [E, K, N]): nothing is packed, and
only the experts that a batch touches are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

from hal.ops.gemm import Epilogue, apply_epilogue


def bind_per_expert(
    weight: torch.Tensor, epilogue: Epilogue = "none", clamp: float = 0.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """kernel(x [M, K] sorted by expert, expert_offsets int64 [E + 1]) -> y [M, N] (gated: N/2)."""
    width = weight.shape[1] // (2 if epilogue == "silu_gated" else 1)

    def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
        offsets = expert_offsets.tolist()
        y = x.new_empty((x.shape[0], width))
        for expert in range(weight.shape[0]):
            low, high = offsets[expert], offsets[expert + 1]
            if low == high:
                continue
            part = functional.linear(x[low:high], weight[expert])
            y[low:high] = part if epilogue == "none" else apply_epilogue(epilogue, part, clamp)
        return y

    return kernel
