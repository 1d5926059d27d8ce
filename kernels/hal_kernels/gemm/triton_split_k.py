"""Launches split products with quantised weights, and the sums of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.split_k_kernels import _gemm_split_k_kernel
from hal_kernels.gemm.split_k_tuning import chosen_of, split_class
from hal_kernels.gemm.split_k_variants import split_k_tiles
from hal_kernels.gemm.triton_kernels import _split_k_kernel
from hal_kernels.gemm.triton_limits import FEW_ROWS, split_of
from hal_kernels.gemm.triton_results import Epilogue, Result
from hal_kernels.tuning.store import tuned_rows


@dataclass(frozen=True, slots=True)
class SplitK:
    """The launches of a request whose few rows are split. config: of the parts."""

    request: GemmRequest
    splits: int
    config: Mapping[str, Any]
    bias: torch.Tensor | None = None

    def covers(self, rows: int) -> bool:
        """Whether so many rows are split."""
        return 0 < rows <= FEW_ROWS

    def launch(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: Result,
    ) -> None:
        """rows: values and scales (x twice where it has none); weight: data, scale, minimum (scale
        where it has none)."""
        (x, x_scale), (data, scale, minimum) = rows, weight
        request, splits, count = self.request, self.splits, x.shape[0]
        features = request.out_features
        halves = 2 if self.config["IS_GATED"] else 1
        shape = (splits * halves, count, features)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        _gemm_split_k_kernel[(triton.cdiv(features, self.config["BLOCK_N"]), splits)](
            x, x_scale, data, scale, minimum, part, count, features, request.k,
            x.stride(0), x_scale.stride(0), data.stride(0), scale.stride(0), **self.config,
        )  # fmt: skip
        block = min(1024, triton.next_power_of_2(features))
        _split_k_kernel[(count, triton.cdiv(features, block))](
            part, part if self.bias is None else self.bias, *result.pointers,
            count, features, *result.strides, BLOCK_N=block, SPLIT_K=splits,
            HAS_BIAS=self.bias is not None, **Epilogue(request).constants,
        )  # fmt: skip


def bind_split_k(
    request: GemmRequest,
    device: DeviceSpec,
    kernel: str,
    target: Target,
    bias: torch.Tensor | None = None,
) -> SplitK | None:
    """None where few rows of the request are not split. kernel: of its whole product."""
    found = split_of(request, device, kernel)
    if found is None:
        return None
    choice, splits = found
    is_gated = request.epilogue == "silu_gated"
    tiles = split_k_tiles(target, choice.config.removesuffix("-gated"), is_gated=is_gated)
    shape = split_class(request, choice.dtype, choice.config)
    # Nothing is tuned for a fused product, as of whole ones.
    known = None if isinstance(request, FusedGemmRequest) else (choice.kernel, shape)
    chosen = tuned_rows(known, device).choose(shape.rows, chosen_of(tiles, splits))
    splits = chosen.pop("SPLIT_K")
    return SplitK(request, splits, {**tiles, **chosen}, bias)
