"""Rules for number formats, repeated work, copies and transfers, on traces written by hand."""

from __future__ import annotations

import dataclasses

import pytest

from hal.auditing.document import Machine
from hal.auditing.gates import GateClass
from hal.auditing.rules import judge
from hal.auditing.trace import TensorFact, Trace
from hal.device import DeviceSpec
from traces import (
    CPU,
    HOPPER,
    attention,
    call,
    findings,
    gated,
    line,
    only,
    op,
    product,
    tensor,
    trace,
)

WIDENED = tensor(128, 128, made_from=["bfloat16"])


def _with_rates(**rates: float) -> Machine:
    return CPU.model_copy(update={"peak_flops": rates})


def test_widened_weights_of_few_rows_cost_their_bytes_on_any_machine() -> None:
    slow = _with_rates(float32=2e9, bfloat16=1e9)
    found = only(trace(product(tensor(1, 128), WIDENED), machine=slow), "widened-product")
    assert found.gate is GateClass.LOST_FAST_PATH
    assert found.evidence[0].required == "bfloat16"


@pytest.mark.parametrize(
    ("rates", "gate"),
    [
        ({}, GateClass.LOST_FAST_PATH),
        ({"float32": 1e9, "bfloat16": 4e9}, GateClass.LOST_FAST_PATH),
        ({"float32": 4e9, "bfloat16": 1e9}, GateClass.ADVICE),
    ],
)
def test_widened_weights_of_many_rows_go_by_the_rates(
    rates: dict[str, float], gate: GateClass
) -> None:
    seen = trace(product(tensor(64, 128), WIDENED), machine=_with_rates(**rates))
    assert only(seen, "widened-product").gate is gate


def test_products_in_their_own_dtype_are_no_finding() -> None:
    narrow = tensor(128, 128, dtype="bfloat16")
    assert not gated(trace(product(narrow, narrow), product(tensor(8, 8), tensor(8, 8))))


def test_float64_from_narrower() -> None:
    wide = tensor(64, 64, dtype="float64", made_from=["float32"])
    assert only(trace(product(wide, wide)), "float64-product").gate is GateClass.LOST_FAST_PATH
    meant = tensor(64, 64, dtype="float64")
    assert not judge(trace(product(meant, meant)))


def test_a_constant_that_promotes_a_chain() -> None:
    x, table = tensor(128, 64), tensor(128, 64, dtype="float64")
    made = tensor(128, 64, dtype="float64", made_from=["float32"])
    found = only(trace(op("add", [x, table], made, at=line(12))), "float64-promotion")
    assert found.location == line(12)
    scalar = tensor(dtype="float64")
    assert not gated(trace(op("add", [x, scalar], x)))


@pytest.mark.parametrize(
    ("device", "gate"), [("cuda", GateClass.LOST_FAST_PATH), ("cpu", GateClass.ADVICE)]
)
def test_float32_on_a_device_with_better_units(device: str, gate: GateClass) -> None:
    facts = tensor(64, 64, device=device)
    found = only(trace(product(facts, facts), machine=HOPPER), "slow-unit")
    assert found.gate is gate
    assert found.cost_us == pytest.approx(40.0 * (1 - 67 / 989))


def test_a_number_format_is_one_finding_and_none_of_what_it_makes_no_faster() -> None:
    rows, weight = tensor(96, 64, device="cuda"), tensor(64, 64, device="cuda")
    lines = [product(rows, weight, at=line(number), time_us=number) for number in (7, 8, 9)]
    found = only(trace(*lines, machine=HOPPER), "slow-unit")
    assert (found.location, found.calls, found.time_us) == (line(9), 12, 24)
    assert found.evidence[1].found == "3"
    few = product(tensor(4, 64, device="cuda"), weight)
    small = product(rows, weight, flops=4e6)
    assert not gated(trace(few, small, machine=HOPPER))
    experts = [tensor(256, 128), tensor(16, 128, 256)]
    grouped = op("_grouped_mm", experts, flops=4 * 15e9, op_class="gemm")
    assert findings(trace(grouped, machine=HOPPER), "slow-unit")
    grouped.flops = 4 * 5e9  # enough for one product, and not for 16
    assert not findings(trace(grouped, machine=HOPPER), "slow-unit")


def test_rates_of_the_spec_stand_in_for_those_of_the_trace() -> None:
    spec = DeviceSpec(
        device_id="cuda:0",
        vendor="nvidia",
        backend="nvidia",
        name="",
        arch="sm_90",
        torch_device="cuda:0",
        peak_flops={"float32": 1.0, "bfloat16": 8.0},
    )
    facts = tensor(64, 64, device="cuda")
    assert [f.rule for f in judge(trace(product(facts, facts)), spec)] == ["slow-unit"]


def test_the_same_product_again_costs_its_repetitions() -> None:
    weight = tensor(64, 64)
    found = only(trace(product(weight, weight, repeats=3)), "same-product-again")
    assert (found.calls, found.cost_us) == (3, pytest.approx(30.0))
    assert not gated(trace(product(weight, weight)))
    small = tensor(4, 4)
    assert not gated(trace(product(small, small, repeats=3)))


def _copy(source: TensorFact, made: TensorFact, name: str = "_to_copy", **facts: object) -> object:
    return op(name, [source], made, **facts)


def test_casts_of_unchanged_tensors() -> None:
    half, full = tensor(64, 64, dtype="float16"), tensor(64, 64, made_from=["float16"])
    found = only(trace(_copy(half, full, repeats=3)), "cast-each-call")
    assert found.cost_us == pytest.approx(30.0)
    # A model that is converted when it is loaded: many calls, each of another tensor.
    assert not gated(trace(_copy(half, full, calls=24)))


def test_casts_by_autocast_say_so() -> None:
    full, half = tensor(64, 64), tensor(64, 64, dtype="bfloat16")
    cast = _copy(full, half, repeats=3, function="linear")
    found = only(trace(cast, settings={"autocast": "bfloat16"}), "cast-each-call")
    assert "autocast" in found.remedy


def test_products_outside_of_autocast() -> None:
    full, half = tensor(64, 64), tensor(64, 64, dtype="bfloat16")
    calls = [call("linear", settings={"autocast": "bfloat16"}), call("linear")]
    inside, outside = product(half, half, call=0), product(full, full, call=1, at=line(12))
    found = only(trace(inside, outside, functions=calls), "outside-autocast")
    assert found.location == line(12)
    assert not gated(trace(outside, functions=calls))
    once = product(full, full, call=1, calls=1)
    assert not gated(trace(inside, once, functions=calls))


def test_products_again_in_training_are_advice() -> None:
    weight = tensor(64, 64)
    seen = trace(product(weight, weight, repeats=3), functions=[call("backward", self=tensor())])
    assert only(seen, "same-product-again").gate is GateClass.ADVICE


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "int4"])
def test_quantised_weights_dequantised_per_call(dtype: str) -> None:
    stored, made = tensor(64, 64, dtype=dtype), tensor(64, 64, made_from=[dtype])
    used = product(tensor(64, 64), made)
    found = only(trace(_copy(stored, made, repeats=3), used), "dequantised-each-call")
    assert dtype in found.title
    assert not findings(trace(_copy(stored, made), used), "dequantised-each-call")
    elsewhere = product(tensor(64, 64), tensor(64, 64))
    assert not gated(trace(_copy(stored, made, repeats=3), elsewhere))


def test_constants_copied_each_call() -> None:
    turned, made = tensor(64, 64, is_contiguous=False, last_stride=64), tensor(64, 64)
    assert only(trace(_copy(turned, made, "clone", repeats=3)), "constant-copied-each-call")
    assert not gated(trace(_copy(turned, made, "clone")))


def test_contiguous_before_attention() -> None:
    strided, made = tensor(2, 4, 64, 32, is_contiguous=False), tensor(2, 4, 64, 32)
    copy = _copy(strided, made, "clone", function="contiguous", at=line(8))
    leaf = "aten::_scaled_dot_product_flash_attention_for_cpu"
    seen = trace(copy, functions=[attention(made, leaf=leaf, at=line(9))])
    assert only(seen, "contiguous-each-step").location == line(8)
    elsewhere = trace(copy, functions=[attention(made, leaf=leaf, at=line(9, "other"))])
    assert not gated(elsewhere)
    turned = tensor(2, 4, 64, 32, is_contiguous=False, last_stride=64)
    needed = _copy(turned, made, "clone", function="contiguous", at=line(8))
    assert not gated(trace(needed, functions=[attention(made, leaf=leaf, at=line(9))]))


def test_contiguous_before_a_product() -> None:
    turned, made = tensor(64, 96, is_contiguous=False, last_stride=64), tensor(64, 96)
    copy = _copy(turned, made, "clone", function="contiguous")
    assert only(trace(copy, product(made, tensor(96, 8))), "contiguous-each-step")
    once = _copy(turned, made, "clone", function="contiguous", calls=1)
    assert not gated(trace(once, product(made, tensor(96, 8), calls=1)))


def test_a_product_in_disguise() -> None:
    x, weight, made = tensor(48, 64, 1), tensor(1, 64, 96), tensor(48, 64, 96)
    partial, total = op("mul", [x, weight], made), op("sum", [made], tensor(48, 96))
    assert only(trace(partial, total), "product-by-broadcast").op == "gemm"
    assert not gated(trace(partial))
    scaled = op("mul", [made, tensor(1, 1, 96)], made)
    assert not gated(trace(scaled, total))


def test_cpu_ops_in_an_accelerator_program() -> None:
    there, here = tensor(64, 64, device="cuda"), tensor(64, 64, came_from=["cuda"])
    ops = [product(there, there, flops=0.0), product(here, here, flops=0.0, at=line(11))]
    assert only(trace(*ops, machine=HOPPER), "cpu-op").location == line(11)
    assert not findings(trace(product(here, here)), "cpu-op") or "cuda" in here.origin_devices


def test_setting_up_on_the_host_is_no_finding() -> None:
    there, here = tensor(64, 64, device="cuda"), tensor(64, 64)
    seen = trace(
        product(there, there, flops=0.0), op("mul", [here], here, calls=1), machine=HOPPER, steps=4
    )
    assert "cpu-op" not in gated(seen)


def test_copies_between_devices() -> None:
    there, here = tensor(64, 64, device="cuda"), tensor(64, 64)
    assert only(trace(_copy(there, here, calls=4), steps=4), "device-copy")
    # Inputs have to come from somewhere.
    assert not gated(trace(_copy(here, there, calls=4), steps=4))
    # Weights that come again and again need not.
    assert only(trace(_copy(here, there, calls=4, repeats=3), steps=4), "device-copy")
    assert not gated(trace(_copy(there, here, calls=1), steps=4))


def test_numpy_in_the_loop_is_unverified() -> None:
    leaving = call("numpy", self=tensor(64, 64))
    inside = dataclasses.replace(leaving, module="model.Norm")
    seen = trace(functions=[inside], steps=4)
    assert only(seen, "numpy-in-the-loop").gate is GateClass.UNVERIFIED
    # Without modules nobody knows; outside of all modules it is what they computed.
    assert only(trace(functions=[leaving]), "numpy-in-the-loop").gate is GateClass.UNVERIFIED
    result = only(trace(functions=[leaving], steps=4), "numpy-in-the-loop")
    assert result.gate is GateClass.ADVICE
    assert not gated(trace(functions=[call("numpy", self=tensor(64, 64), calls=1)], steps=4))


def test_python_values_in_the_loop() -> None:
    assert only(trace(functions=[call("tolist", self=tensor(64, 64))]), "python-values-in-the-loop")
    many = trace(functions=[call("item", self=tensor(), calls=400)], steps=4)
    assert "100 values" in only(many, "python-values-in-the-loop").evidence[0].found
    assert not gated(trace(functions=[call("item", self=tensor(), calls=4)], steps=4))


def test_a_host_that_waits() -> None:
    there = tensor(1, device="cuda")
    assert only(trace(op("_local_scalar_dense", [there]), steps=4), "host-waits")
    assert not gated(trace(op("_local_scalar_dense", [tensor(1)]), steps=4))


def test_tiny_ops() -> None:
    small, large = tensor(16), tensor(16, 512, 512)
    many = op("mul", [small, small], small, calls=300)
    assert only(trace(many), "tiny-ops").calls == 300
    assert not gated(trace(op("mul", [small, small], small, calls=300), steps=100))
    assert not gated(trace(op("mul", [large, large], large, calls=300)))


def test_without_known_steps_the_products_say_how_often_a_loop_ran() -> None:
    small, weight = tensor(16), tensor(64, 64)
    many = op("mul", [small, small], small, calls=300)
    layers = product(tensor(1, 64), weight, calls=100, flops=0.0, at=line(3, "layer"))
    assert not gated(trace(many, layers))
    assert only(
        trace(many, product(tensor(1, 64), weight, calls=1, at=line(3, "layer"))), "tiny-ops"
    )


def test_loops_over_parts_of_one_tensor() -> None:
    x, weight = tensor(8, 64), tensor(64, 64)
    loop = product(x, weight, calls=32, flops=1e6, shared_inputs=30)
    assert only(trace(loop, steps=2), "loop-of-small-products")
    layers = product(x, weight, calls=32, flops=1e6)
    assert not gated(trace(layers, steps=2))
    rows = op("index", [tensor(64, 64)], x, calls=32, shared_inputs=30, at=line(4, "experts"))
    picked = product(x, weight, calls=32, flops=1e6, stack=(line(5, "experts"),))
    assert only(trace(rows, picked, steps=2), "loop-of-small-products")
    assert not gated(trace(rows, picked, steps=32))  # a batch of the data in each step
    large = product(x, weight, calls=32, flops=32e9, shared_inputs=30)
    assert not gated(trace(large, steps=2))


def test_products_that_are_repeated_are_no_loop() -> None:
    """Text that a UNet projects again in every step: one layer, six steps."""
    text, weight = tensor(154, 64), tensor(64, 32)
    again = product(text, weight, calls=24, flops=24e5, repeats=20, shared_inputs=1)
    assert gated(trace(again, steps=6)) == ["same-product-again"]


def test_a_float64_table_of_constants_made_once_is_nobodys_loss() -> None:
    wide = tensor(32, dtype="float64", is_constant=True)
    made = tensor(64, 32, dtype="float64")

    def times(x: TensorFact, calls: int) -> Trace:
        return trace(op("mul", [x, wide], made, calls=calls), steps=8)

    positions = tensor(64, 1, is_constant=True)
    assert not gated(times(positions, 2))
    assert gated(times(positions, 8)) == ["float64-promotion"]
    assert gated(times(tensor(64, 1), 2)) == ["float64-promotion"]


def test_copies_of_one_tensor_count_where_they_come_each_step() -> None:
    source, made = tensor(2, 256, 32, is_contiguous=False), tensor(2, 256, 32)
    once = op("clone", [source], made, calls=1, repeats=1, function="linear")
    assert not gated(trace(once, steps=8))
    found = only(
        trace(op("clone", [source], made, calls=8, repeats=8, function="linear"), steps=8),
        "constant-copied-each-call",
    )
    assert found.evidence[0].found.startswith("8 more of float32")


def test_a_cat_with_nothing_is_a_copy() -> None:
    keys = tensor(2, 4, 128, 64)
    copies = op("cat", [tensor(0), keys], keys, calls=8)
    assert only(trace(copies, steps=4), "cat-with-nothing").cost_us == pytest.approx(80.0)
    assert not gated(trace(op("cat", [tensor(0), keys], keys, calls=2), steps=16))
    assert not gated(trace(op("cat", [keys, keys], tensor(2, 4, 256, 64), calls=8), steps=4))
