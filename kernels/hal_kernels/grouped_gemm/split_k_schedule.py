"""Whether K of products per expert is cut into parts, and up to how many rows.

The first tokens of a decode touch few experts, each of which has one row of tiles: where a rank's
share of an expert is narrow these are fewer than the device runs at a time. How many parts K is
cut into follows from the tiles of one token, so from sizes and the device alone; from so many rows
on that the tiles keep the device busy, K stays whole. Free of torch and triton.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hal.device import DeviceSpec
from hal.ops.gemm import GroupedGemmRequest
from hal_kernels.aot.limits import evidence_of
from hal_kernels.gemm.dense_forms import known_target, units_of
from hal_kernels.gemm.split_k_schedule import PROGRAMS_PER_UNIT, splits_of
from hal_kernels.grouped_gemm.split_k_variants import FORMS, split_expert_tiles, sum_config
from hal_kernels.grouped_gemm.triton_variants import FEW_ROWS


@dataclass(frozen=True, slots=True)
class SplitSchedule:
    """form: of the parts, as `split_k_variants` has it. dtype, config: of the parts' variant.
    sum_config: of their sum's. splits: parts. most_rows: of a call whose K is cut."""

    form: str
    dtype: str
    config: str
    sum_config: str
    splits: int
    most_rows: int


def most_tiles(rows: int, experts: int, block_m: int) -> int:
    """Row tiles that so many rows, sorted by expert, can have: experts have tiles of their own."""
    return min(rows, rows // block_m + experts)


def split_form(kernel: str, config: str) -> str:
    """The form of `FORMS` of a whole product's kernel and configuration; "" for one whose K always
    stays whole."""
    stem = config.split("-")[0]
    if kernel == "grouped_gemm.weight_only":
        return f"weight-{stem}"
    name = {"dense": "dense", "mxfp4": "mxfp4", "fp8_block": stem}.get(kernel.partition(".")[2], "")
    return name if name in FORMS else ""


def schedule_of(
    request: GroupedGemmRequest, device: DeviceSpec, kernel: str, dtype: str, config: str
) -> SplitSchedule | None:
    """The parts of a request's calls of few rows; None where K stays whole: one token's tiles keep
    the device busy, its number of multiprocessors is not stated, or there is no native code.
    kernel, dtype, config: of the whole product."""
    target, units, form = known_target(device), units_of(device), split_form(kernel, config)
    if target is None or not units or not form:
        return None
    is_gated = request.epilogue == "silu_gated"
    parts, total = form + "-gated" * is_gated, "grouped_gemm.split_k_sum"
    tiles = split_expert_tiles(target, form, is_gated=is_gated)
    columns, experts = -(-request.out_features // tiles["BLOCK_N"]), request.num_experts

    def programs(rows: int) -> int:
        return int(columns * most_tiles(rows, experts, tiles["BLOCK_M"]))

    splits = splits_of(programs(request.experts_per_token), request.k, units)
    if splits == 1:
        return None
    summed = sum_config(splits, request.dtype, is_gated=is_gated)
    found = (
        evidence_of("grouped_gemm.split_k", device, dtype, parts),
        evidence_of(total, device, "", summed),
    )
    if any(code is None or code.tier != "native" for code in found):
        return None
    # The most rows whose tiles are still too few, and few for each expert.
    every = range(FEW_ROWS * experts + 1)
    most = bisect_left(every, PROGRAMS_PER_UNIT * units, key=programs) - 1
    return SplitSchedule(form, dtype, parts, summed, splits, most)
