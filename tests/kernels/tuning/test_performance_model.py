"""The model: what it must never say, and the orders that it must keep."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_devices import gpu
from hal.device import DeviceSpec
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.estimating import estimate
from hal_kernels.tuning.performance_model import (
    ONE_AHEAD,
    UNIT_LOAD_RATE,
    DeviceRates,
    Footprint,
    Prediction,
    Resources,
    device_rates,
    predict,
)
from hal_kernels.tuning.shapes import shape_class
from hal_kernels.tuning.tunable_kernels import TUNABLE

DEVICE = DeviceRates(arch="sm_90", units=100, bandwidth=4e12, peak_flops={"bfloat16": 1e15})
USED = Resources(registers=64, shared_bytes=32 << 10, num_warps=4, stages=3, unit="bfloat16")
SQUARE = {"n": 8192, "k": 8192}
LAUNCH = Footprint(
    programs=800, steps=64, step_bytes=16 << 10, flops=4e11, needed_flops=4e11, memory_bytes=1e9
)


def predicted(
    footprint: Footprint = LAUNCH, used: Resources = USED, device: DeviceRates = DEVICE
) -> Prediction:
    found = predict(footprint, used, device)
    assert isinstance(found, Prediction)
    return found


def test_no_launch_is_faster_than_the_rates_allow() -> None:
    found = predicted()
    assert found.bound_us == pytest.approx(400.0)  # 4e11 operations at 1e15 a second
    assert found.us >= found.bound_us
    moving = predicted(dataclasses.replace(LAUNCH, memory_bytes=8e9))
    assert moving.by == "memory"
    assert moving.us >= moving.bound_us == pytest.approx(2000.0)


def test_a_last_wave_that_is_nearly_empty_costs_a_whole_one() -> None:
    by_one = dataclasses.replace(LAUNCH, programs=801, flops=LAUNCH.flops * 801 / 800)
    assert predicted(by_one).us == pytest.approx(predicted().us * 9 / 8, rel=0.02)
    assert predicted(by_one).us - predicted(by_one).bound_us > predicted().us - predicted().bound_us


def test_few_resident_warps_and_few_bytes_in_flight_are_slower() -> None:
    alone = dataclasses.replace(USED, shared_bytes=200 << 10)
    assert predicted(used=alone).us > predicted().us
    assert predicted(used=alone).occupancy.blocks == 1
    thin = Footprint(
        programs=800, steps=64, step_bytes=256, flops=0.0, needed_flops=0.0, memory_bytes=1e6
    )
    deep = dataclasses.replace(USED, stages=5)
    assert predicted(thin).by == "latency"
    # A step waits half as long, but for the first of a program, which nothing was loaded ahead of.
    assert predicted(thin, deep).us == pytest.approx(predicted(thin).us * 17 / 33, rel=0.02)


def test_one_multiprocessor_alone_loads_faster_than_its_share_but_not_at_any_rate() -> None:
    def loads(programs: int) -> Prediction:
        return predicted(
            Footprint(
                programs=programs, steps=64, step_bytes=64 << 10, flops=0.0, needed_flops=0.0,
                memory_bytes=1.0,
            ),
            dataclasses.replace(USED, stages=5, shared_bytes=16 << 10),
            dataclasses.replace(DEVICE, bandwidth=1e12),
        )  # fmt: skip

    alone, all_busy = loads(1), loads(100)
    assert all_busy.by == "loads"
    assert alone.us < all_busy.us
    assert alone.us >= (64 << 16) / UNIT_LOAD_RATE * 1e6


def test_a_loop_that_is_not_pipelined_multiplies_after_it_has_loaded() -> None:
    one = dataclasses.replace(LAUNCH, programs=100, flops=1e11, needed_flops=1e11, memory_bytes=1e6)
    plain = dataclasses.replace(USED, stages=1)
    assert predicted(one, plain).us > predicted(one, dataclasses.replace(USED, stages=2)).us
    assert predicted(one, plain).by == "latency"


def test_padding_is_lost_and_not_needed() -> None:
    padded = dataclasses.replace(LAUNCH, needed_flops=LAUNCH.flops / 4)
    assert predicted(padded).us == predicted().us
    assert predicted(padded).bound_us == pytest.approx(LAUNCH.memory_bytes / 4e12 * 1e6)


def test_what_cannot_be_said_is_said_so() -> None:
    too_much = dataclasses.replace(USED, shared_bytes=1 << 20)
    assert "no block fits" in str(predict(LAUNCH, too_much, DEVICE))
    unknown = dataclasses.replace(USED, unit="fp8")
    assert "peak rate of fp8" in str(predict(LAUNCH, unknown, DEVICE))
    bare = gpu("sm_90")
    assert "multiprocessors" in str(device_rates(bare))
    counted = dataclasses.replace(bare, attributes={"compute_units": 132})
    assert "bandwidth" in str(device_rates(counted))
    whole = dataclasses.replace(counted, memory_bandwidth=4.8e12)
    assert isinstance(device_rates(whole), DeviceRates)
    assert "occupancy limits" in str(device_rates(dataclasses.replace(whole, arch="sm_75")))


def test_a_loop_that_reads_where_its_operands_are_loads_one_step_ahead() -> None:
    waits = Footprint(
        programs=100, steps=64, step_bytes=1024, flops=0.0, needed_flops=0.0, memory_bytes=1e6
    )
    deep, shallow = (dataclasses.replace(USED, stages=stages) for stages in (5, 2))
    followed = dataclasses.replace(waits, ahead=ONE_AHEAD)
    assert predicted(waits, deep).us < predicted(waits, shallow).us / 3
    assert predicted(followed, deep).us == predicted(followed, shallow).us


def test_an_instruction_of_an_older_architecture_does_not_reach_the_peak_rate() -> None:
    device = dataclasses.replace(
        gpu("sm_90"), memory_bandwidth=4e12, peak_flops={"bfloat16": 1e15},
        attributes={"compute_units": 100},
    )  # fmt: skip
    tunable, shape = TUNABLE["gemm.dense"], shape_class("bfloat16", "plain", 8192, SQUARE)
    configuration = tunable.default(find_target("sm_90"), shape).configuration

    def found(instruction: str, on: DeviceSpec = device) -> Prediction:
        trial = Trial(
            configuration=dict(configuration), tier="native", registers=128,
            shared_bytes=64 << 10, instruction=instruction, instruction_count=4,
        )  # fmt: skip
        answer = estimate(tunable, shape, trial, on)
        assert isinstance(answer, Prediction)
        return answer

    own, older = found("wgmma.mma_async.sync"), found("mma.sync.aligned.m16n8k16")
    assert older.us > own.us
    assert older.bound_us == own.bound_us, "what the rates allow is the device's"
    earlier = dataclasses.replace(device, arch="sm_89")
    assert found("mma.sync.aligned.m16n8k16", earlier).us == found("", earlier).us


@pytest.mark.parametrize("name", sorted(TUNABLE))
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_every_configuration_is_of_a_variant_and_has_a_footprint(name: str, target: object) -> None:
    """Of each form, for few and for many rows: the default comes first, each once, and each has the
    constants that the catalogue's variant has."""
    from hal_kernels.aot.catalogue import find_kernel
    from hal_kernels.aot.targets import Target

    assert isinstance(target, Target)
    tunable, variants = TUNABLE[name], find_kernel(name).variants(target)
    sizes = {size: 16 if size == "group" else 64 for size in tunable.size_names}
    compiled = {(variant.dtype, variant.config) for variant in variants}
    for dtype in tunable.dtypes(target):
        for form in tunable.forms:
            if name == "index_logits.paged" and (dtype, form) not in compiled:
                # Of an FP8 query: it meets no plain keys, and those of four bits elsewhere.
                assert dtype == target.fp8_dtype
                assert form.partition("-")[0] in ("bf16", "fp4_68")
                continue
            if name == "gemm.split_k" and (dtype, form) not in compiled:
                with pytest.raises(KeyError, match=form):  # a format of another dtype
                    tunable.default(target, shape_class(dtype, form, 1, sizes))
                continue
            for rows in (1,) if name == "gemm.split_k" else (1, 300):  # few rows are split
                if not variants:  # an architecture that the kernel is not for
                    continue
                shape = shape_class(dtype, form, rows, sizes)
                configurations = tunable.configurations(target, shape)
                assert configurations[0] == tunable.default(target, shape).configuration
                keys = [tuple(sorted(c.items())) for c in configurations]
                assert len(set(keys)) == len(keys) >= 3
                for configuration in configurations:
                    variant = tunable.variant(variants, target, shape, configuration)
                    known = {*variant.constants, "num_warps", "num_stages", *tunable.launch_only}
                    assert configuration.keys() <= known
                    found = tunable.footprint(shape, configuration)
                    assert found.programs > 0
                    assert found.steps > 0
                    assert found.flops >= found.needed_flops > 0
                    assert found.memory_bytes > 0


def test_bytes_and_operations_of_a_product_are_those_of_the_op() -> None:
    """Against the catalogue's own count, which was written for the roofline."""
    from hal.ops import CATALOGUE

    shape = shape_class("bfloat16", "gated", 64, {"n": 256, "k": 512})
    tunable = TUNABLE["gemm.dense"]
    request = tunable.call(shape, "cpu").request
    configuration = tunable.default(find_target("sm_90"), shape).configuration
    found = tunable.footprint(shape, configuration)
    assert found.needed_flops == pytest.approx(CATALOGUE["gemm"].flops(request, 64), rel=0.02)
    moved = CATALOGUE["gemm"].bytes_moved(request, 64)
    assert found.memory_bytes == pytest.approx(moved, rel=0.02)
