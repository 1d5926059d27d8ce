"""Split-K of products per expert: when K is cut, and that the parts' sum is the product."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal_kernels.grouped_gemm.triton as triton_grouped
import hal_kernels.grouped_gemm.triton_split_k as split_k
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.formats import FORMATS, quantize_weight
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.low_precision import dequantize_groups, quantize_groups
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.gemm.split_k_schedule import LEAST_COLUMNS, PROGRAMS_PER_UNIT, SPLITS
from hal_kernels.grouped_gemm.split_k_schedule import most_tiles, schedule_of
from hal_kernels.grouped_gemm.split_k_variants import split_expert_tiles
from hal_kernels.grouped_gemm.triton_limits import choose_kernels, not_supported_reasons
from hal_kernels.grouped_gemm.triton_tuning import shape_of, whole_shape_of
from hal_kernels.grouped_gemm.triton_variants import FEW_ROWS
from hal_kernels.tuning.store import forced_configuration
from kernel_errors import assert_exact

ROWS = [0, 1, 16, 17, 0, 3]  # per expert: none, one, a tile exactly, a tile and one
UNITS = 132
CLAMP = 0.6  # well inside what the products reach


def device_of(arch: str, units: int = UNITS) -> DeviceSpec:
    device = gpu(arch)
    return dataclasses.replace(device, attributes={**device.attributes, "compute_units": units})


def request_of(name: str, n: int, k: int, **fields: Any) -> GroupedGemmRequest:
    given: dict[str, Any] = {
        "num_experts": len(ROWS), "experts_per_token": 2, "dtype": "bfloat16",
        "weight_format": FORMATS[name], "tokens": TokenRange(1, 8), **fields,
    }  # fmt: skip
    return GroupedGemmRequest(n=n, k=k, **given)


def inputs(k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum(ROWS)
    offsets = torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()])
    x = torch.randn(total, k) * torch.logspace(-2, 2, total)[:, None]
    return x.to(dtype), offsets


def exact(
    x: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor, epilogue: str, clamp: float
) -> torch.Tensor:
    y = torch.cat([x[offsets[e] : offsets[e + 1]] @ weights[e].T for e in range(len(ROWS))])
    if epilogue == "none":
        return y
    gate, up = y.chunk(2, dim=-1)
    if clamp:
        gate, up = torch.clamp(gate, max=clamp), torch.clamp(up, -clamp, clamp)
    return gate * torch.sigmoid(gate) * up


class Splits:
    """Takes a place between a launch and its kernels: how many parts were asked for. All memory
    that is made while it holds its place is NaN, so that what nobody writes shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        launch, empty = split_k.SplitExperts.launch, torch.empty

        def counted(one: split_k.SplitExperts, *arguments: Any) -> None:
            self.seen.append(one.schedule.splits)
            launch(one, *arguments)

        def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
            made = empty(*shape, **options)
            return made.fill_(torch.nan) if made.dtype == torch.float32 else made

        monkeypatch.setattr(split_k.SplitExperts, "launch", counted)
        monkeypatch.setattr(torch, "empty", poisoned)


@settings(deadline=None)
@given(
    experts=st.integers(1, 300),
    per_token=st.integers(1, 12),
    n=st.integers(1, 4096),
    k=st.integers(1, 20_000),
    units=st.integers(0, 304),
)
def test_k_is_cut_where_one_token_leaves_the_device_idle_and_no_further(
    experts: int, per_token: int, n: int, k: int, units: int
) -> None:
    per_token = min(per_token, experts)
    request = request_of("bfloat16", n, k, num_experts=experts, experts_per_token=per_token)
    device = device_of("sm_90", units)
    found = schedule_of(request, device, "grouped_gemm.dense", "bfloat16", "small")
    tiles = split_expert_tiles(
        next(t for t in split_targets() if t.arch == "sm_90"), "dense", is_gated=False
    )
    columns, wanted = -(-n // tiles["BLOCK_N"]), PROGRAMS_PER_UNIT * units

    def programs(rows: int) -> int:
        return columns * most_tiles(rows, experts, tiles["BLOCK_M"])

    if found is None:
        assert programs(per_token) >= wanted or k < SPLITS[0] * LEAST_COLUMNS
        return
    assert found.splits in SPLITS
    assert k >= found.splits * LEAST_COLUMNS  # no part is empty, whatever the step
    assert per_token <= found.most_rows <= max(per_token, FEW_ROWS * experts)
    assert programs(found.most_rows) < wanted
    assert found.most_rows == FEW_ROWS * experts or programs(found.most_rows + 1) >= wanted


def split_targets() -> Any:
    from hal_kernels.aot.targets import TARGETS

    return TARGETS


@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
@pytest.mark.parametrize(
    ("name", "arch", "splits"),
    [
        ("bfloat16", "sm_90", 4),
        ("float16", "gfx1100", 8),
        ("fp8_block128_a8", "sm_90", 4),
        ("fp8_block128_a8", "gfx942", 4),  # the fnuz encoding: the same bits mean half
        ("fp8_block128_ue8m0_a8", "sm_120", 8),
        ("fp8_block32_ue8m0_a8", "sm_89", 4),
        ("mxfp4_a8", "sm_120", 4),  # the unit scales by itself
        ("mxfp4_a8", "gfx950", 4),  # and takes FP4 beside FP8
        ("mxfp4_a8", "sm_90", 4),  # widened, and scaled outside of it
        ("mxfp4_a8", "gfx942", 4),
        ("mxfp4_a8", "sm_80", 4),  # rows rounded, and both operands in 16 bits
        ("fp8_block128", "sm_80", 4),
        ("fp8_block32_ue8m0", "gfx1201", 4),
        ("mxfp4", "gfx90a", 4),
    ],
)
def test_the_sum_of_the_parts_is_the_product(
    name: str, arch: str, splits: int, epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tails along N and, where the format allows it, along K."""
    n, form, clamp = 68, FORMATS[name], CLAMP if epilogue == "silu_gated" else 0.0
    k = splits * LEAST_COLUMNS + (32 if form.activation == "mxfp8_group32" else 128)
    wide = torch.float16 if name == "float16" else torch.bfloat16
    x, offsets = inputs(k, wide)
    request = request_of(
        name, n, k, epilogue=epilogue, clamp=clamp, dtype=str(wide).removeprefix("torch.")
    )
    weight: Any = (torch.randn(len(ROWS), n, k) / k**0.5).to(wide)
    rows = x.double()
    if form.is_dense:
        weights = weight.double()
    else:
        weight = [quantize_weight(one.float(), form) for one in weight]
        weights = torch.stack([one.dequantize().double() for one in weight])
    if form.activation != "float":
        element = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
        is_ue8m0 = "ue8m0" in form.activation or form.activation.startswith("mxfp8")
        kind = "ue8m0" if is_ue8m0 else "float32"
        values, scales = quantize_groups(
            x, group_size=int(form.group_size or 0), element=element, scale_kind=kind
        )
        rows = dequantize_groups(values, scales, element=element, scale_kind=kind).double()
    counted = Splits(monkeypatch)
    kernel = triton_grouped.bind(request, device_of(arch), weight=weight)
    found = kernel(x, offsets)
    assert counted.seen == [splits]
    want = exact(rows, offsets, weights, epilogue, clamp)
    assert_exact("grouped_gemm", found, want, floor=1e-6)
    # Alone in the first tile of its expert a row is what it is among others.
    alone = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    assert torch.equal(kernel(x[:1], alone), found[:1])
    nothing = torch.zeros(len(ROWS) + 1, dtype=torch.int64)
    assert kernel(x[:0], nothing).shape == (0, request.out_features)
    assert counted.seen == [splits] * 2


def test_rows_behind_the_last_expert_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has as many rows as there can be; those of an expert are none the less."""
    n, k = 96, 2048
    x, offsets = inputs(k)
    weight = (torch.randn(len(ROWS), n, k) / k**0.5).bfloat16()
    counted = Splits(monkeypatch)
    kernel = triton_grouped.bind(request_of("bfloat16", n, k), device_of("sm_90"), weight=weight)
    longer = torch.cat((x, torch.full((7, k), torch.nan).bfloat16()))
    assert torch.equal(kernel(longer, offsets)[: len(x)], kernel(x, offsets))
    assert counted.seen == [4, 4]


def test_many_rows_and_busy_devices_take_the_whole_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, k = 64, 2048
    x, offsets = inputs(k)
    weight = (torch.randn(len(ROWS), n, k) / k**0.5).bfloat16()
    request, counted = request_of("bfloat16", n, k), Splits(monkeypatch)
    for units in (0, 1):  # not known, and fewer programs wanted than there are tiles
        triton_grouped.bind(request, device_of("sm_90", units), weight=weight)(x, offsets)
    most = FEW_ROWS * len(ROWS)
    many = torch.randn(most + 1, k).bfloat16()
    ends = torch.tensor([0, 0, 1, 20, most, most, most + 1])
    kernel = triton_grouped.bind(request, device_of("sm_90"), weight=weight)
    kernel(many, ends)
    assert counted.seen == []
    kernel(many[:most], ends.clamp(max=most))
    assert counted.seen == [4]
    # Where configurations are measured nothing else is launched than what is measured.
    with forced_configuration("grouped_gemm.dense", {
        "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3,
    }) as forced:  # fmt: skip
        triton_grouped.bind(request, device_of("sm_90"), weight=weight)(x, offsets)
    assert forced.is_launched
    assert counted.seen == [4]


def test_only_what_is_stated_of_a_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan is made another GPU may be seen, and K be cut as nobody launches it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = SimpleNamespace(multi_processor_count=UNITS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    request = request_of("bfloat16", 64, 2048, tokens=TokenRange(1, 1))
    for units, launched in ((0, ["dense"]), (UNITS, ["split_k", "split_k_sum"])):
        stated = dataclasses.replace(device_of("sm_90", units), torch_device="cuda")
        choices = choose_kernels(request, stated)
        assert not isinstance(choices, Reason)
        assert [choice.kernel.partition(".")[2] for choice in choices] == launched


def test_a_plan_judges_the_parts_and_their_sum() -> None:
    """A rank's share of V4-Flash's experts on eight devices, of one token and of a batch."""
    fields: dict[str, Any] = {"num_experts": 256, "experts_per_token": 6, "clamp": 10.0}
    request = request_of(
        "mxfp4_a8", 512, 4096, epilogue="silu_gated", tokens=TokenRange(1, 1), **fields
    )
    device = device_of("sm_120", 188)
    choices = choose_kernels(request, device)
    assert not isinstance(choices, Reason)
    assert [(c.kernel, c.dtype, c.config) for c in choices] == [
        ("grouped_gemm.split_k", "fp8_e4m3fn", "mxfp4-gated"),
        ("grouped_gemm.split_k_sum", "", "split8-gated"),
    ]
    assert not not_supported_reasons(request, device)
    assert shape_of(request, device) is None
    assert whole_shape_of(request, device) is not None
    for other, of in (
        (dataclasses.replace(request, tokens=TokenRange(1, 32)), device),
        (dataclasses.replace(request, n=65_536), device),
        (dataclasses.replace(request, k=1024), device),
        (request, gpu("sm_120")),
    ):
        whole = choose_kernels(other, of)
        assert not isinstance(whole, Reason)
        assert [choice.kernel for choice in whole] == ["grouped_gemm.mxfp4"]
        assert shape_of(other, of) == whole_shape_of(other, of)


def test_what_is_widened_stays_whole() -> None:
    request = request_of("fp8_block128_a8", 128, 4096, tokens=TokenRange(1, 1))
    whole = choose_kernels(request, device_of("gfx1100", 96))
    assert not isinstance(whole, Reason)
    assert [choice.kernel for choice in whole] == ["grouped_gemm.fp8_widened"]
