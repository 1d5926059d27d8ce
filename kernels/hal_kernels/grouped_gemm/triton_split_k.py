"""Launches split products per expert, and the sums of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.gemm import GroupedGemmRequest
from hal_kernels.gemm.triton_tiles import target_of
from hal_kernels.grouped_gemm.split_k_kernels import (
    _grouped_gemm_split_k_kernel,
    _grouped_split_sum_kernel,
)
from hal_kernels.grouped_gemm.split_k_schedule import SplitSchedule, most_tiles
from hal_kernels.grouped_gemm.split_k_variants import SUM_COLUMNS, split_expert_tiles


@dataclass(frozen=True, slots=True)
class SplitExperts:
    """The launches of a request whose K is cut for few rows. config: of the parts."""

    request: GroupedGemmRequest
    schedule: SplitSchedule
    config: Mapping[str, Any]

    def covers(self, rows: int) -> bool:
        """Whether a call of so many rows, of all experts together, is split."""
        return 0 < rows <= self.schedule.most_rows

    def launch(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        weight: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """rows: values and scales; weight: data and scales [E, rows, groups] (each its values twice
        where there are none). y [M, N] is written."""
        (x, x_scale), (data, scale) = rows, weight
        request, config, splits = self.request, self.config, self.schedule.splits
        count, width = y.shape
        experts, is_gated = request.num_experts, bool(config["IS_GATED"])
        halves = 2 if is_gated else 1
        part = torch.empty((splits * halves, count, width), dtype=torch.float32, device=x.device)
        tiles = most_tiles(count, experts, config["BLOCK_M"])
        grid = (tiles, triton.cdiv(width, config["BLOCK_N"]), splits)
        _grouped_gemm_split_k_kernel[grid](
            x, x_scale, data, scale, part, offsets, count, width, request.k,
            x.stride(0), x_scale.stride(0), data.stride(0), data.stride(1),
            scale.stride(0), scale.stride(1),
            E=experts, BLOCK_E=triton.next_power_of_2(experts), **config,
        )  # fmt: skip
        block = min(SUM_COLUMNS, triton.next_power_of_2(width))
        _grouped_split_sum_kernel[(count, triton.cdiv(width, block))](
            part, y, count, width, y.stride(0), BLOCK_N=block, SPLITS=splits,
            IS_GATED=is_gated, CLAMP=request.clamp,
        )  # fmt: skip


def bind_split(
    request: GroupedGemmRequest, device: DeviceSpec, schedule: SplitSchedule | None
) -> SplitExperts | None:
    """None where K stays whole."""
    if schedule is None:
        return None
    is_gated = request.epilogue == "silu_gated"
    config = split_expert_tiles(target_of(device), schedule.form, is_gated=is_gated)
    return SplitExperts(request, schedule, config)
