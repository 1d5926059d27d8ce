"""Stream-K: every step of every tile exactly once, and products against float64."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import hal_kernels.gemm.stream_k_limits as stream_k_limits
import hal_kernels.gemm.triton as triton_gemm
import hal_kernels.gemm.triton_stream_k as stream_k_launch
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest, apply_epilogue
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.aot.targets import find_target
from hal_kernels.gemm.dense_forms import FEW_ROWS, WIDE_ROWS, dense_size
from hal_kernels.gemm.stream_k_schedule import FIX_UP_STEPS, Schedule, stream_k
from hal_kernels.gemm.triton_limits import KernelChoice, choose_kernels
from hal_kernels.gemm.triton_variants import configurations
from kernel_errors import assert_exact

PURE = settings(deadline=None, max_examples=60)
# Of few examples are tiles wide: so many are looked for, and none at all is an error.
SELDOM = settings(PURE, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    tiles, steps = draw(st.integers(1, 150)), draw(st.integers(1, 40))
    return Schedule(tiles, steps, draw(st.integers(1, min(200, tiles * steps))))


@PURE
@given(schedules())
def test_every_step_of_every_tile_is_done_once_and_evenly(schedule: Schedule) -> None:
    done: Counter[int] = Counter()
    shares = []
    for program in range(schedule.programs):
        steps = [
            segment.tile * schedule.steps + step
            for segment in schedule.segments(program)
            for step in range(segment.first, segment.last)
        ]
        done.update(steps)
        shares.append(len(steps))
        assert all(schedule.program_of(step) == program for step in steps)
    assert done == Counter(range(schedule.tiles * schedule.steps))
    assert max(shares) - min(shares) <= 1


@PURE
@given(schedules())
def test_the_parts_of_a_tile_are_those_that_were_written(schedule: Schedule) -> None:
    written: dict[int, list[tuple[int, int]]] = {}
    whole = set()
    for program in range(schedule.programs):
        for segment in schedule.segments(program):
            if segment.slot is None:
                whole.add(segment.tile)
                continue
            assert 2 * program <= segment.slot < 2 * program + 2
            written.setdefault(segment.tile, []).append((segment.first, segment.slot))
    slots = [slot for parts in written.values() for _, slot in parts]
    assert len(slots) == len(set(slots))  # no part over another
    assert whole.isdisjoint(written)
    for tile in range(schedule.tiles):
        in_order = tuple(slot for _, slot in sorted(written.get(tile, [])))
        assert schedule.parts_of(tile) == in_order
        assert (tile in whole) == (not in_order)


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 400), st.sampled_from([1, 4, 8]))
def test_the_model_only_takes_what_is_shorter(
    tiles: int, steps: int, slots: int, splits: int
) -> None:
    found = stream_k(tiles, steps, slots, splits=splits)
    if found is None:
        return
    waves = -(-tiles * splits // slots)
    assert found.programs <= slots
    longest = found.begin_of(1) + FIX_UP_STEPS
    assert longest < waves * -(-steps // splits) + (FIX_UP_STEPS if splits > 1 else 0)


def test_whole_waves_stay_whole_and_odd_ones_are_shared_out() -> None:
    assert stream_k(188, 64, 188) is None
    assert stream_k(376, 64, 188) is None
    found = stream_k(224, 64, 188)  # 1.19 waves
    assert found == Schedule(224, 64, 188)
    assert stream_k(40, 64, 188) == Schedule(40, 64, 188)  # fewer tiles than units
    assert stream_k(40, 6, 188) is None  # too short to pay for the parts
    assert stream_k(47, 64, 188, splits=4) is None  # split products fill the wave already


def device(arch: str, units: int) -> DeviceSpec:
    plain = gpu(arch)
    attributes = {**plain.attributes, "compute_units": units}
    return dataclasses.replace(plain, attributes=attributes)


def request_of(n: int, k: int, dtype: str, **fields: Any) -> GemmRequest:
    return GemmRequest(n=n, k=k, dtype=dtype, weight_format=FORMATS[dtype], **fields)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream-K whatever the model says: the shapes of these tests are small."""

    def shared_out(tiles: int, steps: int, slots: int, *, splits: int) -> Schedule:
        return Schedule(tiles, steps, min(slots, tiles * steps))

    monkeypatch.setattr(stream_k_limits, "stream_k", shared_out)


# Rows, columns of y, K, units: odd waves of small and of large tiles, and fewer tiles than units.
SHAPES = {
    "m1-odd-wave": (1, 330, 300, 2),
    "m16-few-tiles": (16, 70, 500, 5),
    "m17-odd-wave": (17, 300, 130, 2),
    "m130-few-tiles": (130, 40, 300, 3),
    "m500-wide": (500, 140, 4100, 3),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("shape", "form", "dtype", "arch"),
    [
        ("m1-odd-wave", "plain", "bfloat16", "sm_120"),
        ("m1-odd-wave", "gated-bias", "bfloat16", "sm_90"),
        ("m16-few-tiles", "silu-bias", "float16", "gfx942"),
        ("m17-odd-wave", "gated-bias", "bfloat16", "gfx942"),
        ("m17-odd-wave", "silu-bias", "float16", "sm_80"),
        ("m130-few-tiles", "plain", "bfloat16", "sm_120"),
        ("m17-odd-wave", "float32", "bfloat16", "sm_90"),
        ("m16-few-tiles", "float32", "float16", "gfx942"),
        ("m500-wide", "plain", "bfloat16", "sm_80"),
        ("m500-wide", "float32", "float16", "sm_120"),
    ],
)
def test_products(shape: str, form: str, dtype: str, arch: str) -> None:
    m, n, k, units = SHAPES[shape]
    is_gated, torch_dtype = "gated" in form, getattr(torch, dtype)
    epilogue = "silu_gated" if is_gated else ("silu" if "silu" in form else "none")
    stored = 2 * n if is_gated else n
    weight = (torch.randn(stored, k) / k**0.5).to(torch_dtype)
    bias = torch.randn(stored).to(torch_dtype) if "bias" in form else None
    x = (torch.randn(m, k + 16) * torch.logspace(-2, 1, m)[:, None]).to(torch_dtype)[:, :k]
    result = "float32" if form == "float32" else dtype
    request = request_of(
        stored, k, dtype, has_bias=bias is not None, epilogue=epilogue, out_dtype=result
    )
    on = device(arch, units)
    attempt = stream_k_launch.bind_stream_k(request, on, weight=weight, bias=bias)
    y = torch.full((m, n), torch.nan, dtype=getattr(torch, result))
    assert attempt is not None
    assert attempt(x, y)
    exact = x.double() @ weight.double().T
    exact = apply_epilogue(epilogue, exact if bias is None else exact + bias.double())  # type: ignore[arg-type]
    assert_exact("gemm", y, exact, times=2.0, floor=1e-6)
    bound = triton_gemm.bind(request, on, weight=weight, bias=bias)
    assert torch.equal(bound(x), y)  # what a bound product does, and the same every time


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whole_numbers_are_summed_exactly_whoever_has_them(data: st.DataObject) -> None:
    """Products of small whole numbers are exact in float32 in any order: a step left out, done
    twice or read from another tile shows."""
    m, n = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 140))
    k = data.draw(st.integers(1, 170))
    config = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": data.draw(st.integers(1, 3))}
    tiles, steps = -(-m // 16) * -(-n // 64), -(-k // 32)
    schedule = Schedule(tiles, steps, data.draw(st.integers(1, min(20, tiles * steps))))
    x, weight = (torch.randint(-3, 4, (rows, k)).bfloat16() for rows in (m, n))
    y = torch.full((m, n), torch.nan, dtype=torch.float32)
    stream_k_launch._launch(
        request_of(n, k, "bfloat16", out_dtype="float32"), schedule, config, (x, weight, None, y)
    )
    assert torch.equal(y.double(), x.double() @ weight.double().T)


@pytest.mark.usefixtures("always")
def test_a_row_of_a_decode_does_not_depend_on_the_others() -> None:
    request = request_of(200, 300, "bfloat16")
    weight = torch.randn(200, 300).bfloat16()
    kernel = triton_gemm.bind(request, device("sm_90", 3), weight=weight)
    x = torch.randn(16, 300).bfloat16()
    assert torch.equal(kernel(x)[3:4], kernel(x[3:4]))


def test_nothing_is_shared_out_where_the_number_of_units_is_not_known() -> None:
    weight, request = torch.randn(64, 64).bfloat16(), request_of(64, 64, "bfloat16")
    for on in (gpu("sm_120"), device("sm_70", 80)):  # nothing was compiled for the other
        assert stream_k_launch.bind_stream_k(request, on, weight=weight, bias=None) is None


@SELDOM
@given(
    st.sampled_from(["sm_80", "sm_89", "sm_120"]),
    st.integers(17, 3000), st.integers(1, 9000), st.integers(64, 9000), st.integers(1, 200),
)  # fmt: skip
def test_wide_tiles_are_shared_out_where_they_ask_for_less(
    arch: str, rows: int, n: int, k: int, units: int
) -> None:
    """Counted step by step, and not by the bound that the choice goes by."""
    bound = stream_k_limits.bind_schedule(request_of(n, k, "bfloat16"), device(arch, units))
    assert bound is not None
    square = dataclasses.replace(bound, sizes=bound.sizes - {"wide"})
    found, other = bound.share(rows), square.share(rows)
    assert (found is None) == (other is None)
    assume(found is not None and other is not None and found.config != other.config)
    assert found is not None
    assert other is not None
    assert (found.config, found.fix_up) == ("wide", "wide")
    assert found.schedule.programs <= units
    work = [
        s.schedule.tiles * s.schedule.steps * s.tiles["BLOCK_K"] * s.tiles["BLOCK_M"]
        * s.tiles["BLOCK_N"]
        for s in (found, other)
    ]  # fmt: skip
    assert work[0] <= work[1]
    for share in (found, other):
        schedule = share.schedule
        parts = [s for p in range(schedule.programs) for s in schedule.segments(p)]
        assert sum(s.slot is not None for s in parts) <= schedule.most_parts
    assert bound._asked("wide", found.schedule)[1] <= bound._asked("large", other.schedule)[1]


@SELDOM
@given(
    st.sampled_from(["sm_80", "sm_89", "sm_120", "sm_90"]),
    st.integers(1, 9000), st.integers(1, 20_000), st.integers(0, 200),
)  # fmt: skip
def test_wide_tiles_never_take_a_device_longer(
    arch: str, rows: int, features: int, units: int
) -> None:
    """A wide tile has the work of two square ones. Where the device is not known, of many rows."""
    target = find_target(arch)
    name = dense_size(target, "gemm", units, rows=rows, features=features, k=1024, has_wide=True)
    assume(name == "wide")
    assert arch != "sm_90"
    assert rows > FEW_ROWS if units else rows >= WIDE_ROWS
    tiles = configurations("gemm", target)
    wide, square = (
        -(-rows // tiles[size]["BLOCK_M"]) * -(-features // tiles[size]["BLOCK_N"])
        for size in ("wide", "large")
    )
    at_once = units or 1
    assert 2 * -(-wide // at_once) <= -(-square // at_once)


def test_a_plan_names_what_is_shared_out() -> None:
    """The scores of a router over 256 experts, in float32."""
    request = request_of(256, 7168, "bfloat16", out_dtype="float32", tokens=TokenRange(512, 512))
    names = [choice.kernel for choice in choices_of(request, device("sm_90", 132))]
    assert names == ["gemm.stream_k", "gemm.stream_k_fix_up"]
    assert [c.config for c in choices_of(request, device("sm_90", 132))] == ["large-float32"] * 2
    assert [choice.kernel for choice in choices_of(request, gpu("sm_90"))] == ["gemm.dense"]


def choices_of(request: GemmRequest, on: DeviceSpec) -> tuple[KernelChoice, ...]:
    found = choose_kernels(request, on)
    assert not isinstance(found, Reason)
    return found
