"""Rules for settings, compilers, ranks, packages and what a program was told."""

from __future__ import annotations

import pytest

from hal.auditing.document import Refusal, Variable
from hal.auditing.gates import GateClass, Severity
from hal.auditing.rules import ALL_RULES, judge
from hal.auditing.trace import CompileEvent, Message, SwallowedError
from traces import HOPPER, attention, call, findings, gated, line, only, op, product, tensor, trace

NO_GRAD = {"grad_enabled": "False"}


def test_dropout_without_gradients_is_another_result() -> None:
    off = call("dropout", input=tensor(8, 8), p=0.5, training=True, settings=NO_GRAD)
    found = only(trace(functions=[off]), "dropout-left-on")
    assert (found.gate, found.severity) == (GateClass.SEMANTIC, Severity.ERROR)


@pytest.mark.parametrize(
    "facts",
    [
        {"training": False, "settings": NO_GRAD},
        {"training": True, "p": 0.0, "settings": NO_GRAD},
        {"training": True, "input": tensor(8, 8, requires_grad=True)},
    ],
)
def test_dropout_that_is_meant(facts: dict[str, object]) -> None:
    seen = call("dropout", **{"input": tensor(8, 8), "p": 0.5, **facts})
    assert not gated(trace(functions=[seen]))


def test_dropout_of_a_program_that_trains() -> None:
    seen = call("dropout", input=tensor(8, 8), p=0.5, training=True)
    assert not gated(trace(functions=[seen, call("backward", self=tensor())]))


def test_batch_norm_in_training_mode() -> None:
    facts = {"input": tensor(8, 8), "running_mean": tensor(8), "settings": NO_GRAD}
    assert only(
        trace(functions=[call("batch_norm", training=True, **facts)]), "batch-norm-in-training-mode"
    )
    assert not gated(trace(functions=[call("batch_norm", training=False, **facts)]))


@pytest.mark.parametrize(
    ("rule", "setting", "value"),
    [
        ("deterministic-algorithms", "deterministic_algorithms", "True"),
        ("anomaly-mode", "anomaly_mode", "True"),
        ("library-disabled", "mkldnn", "False"),
    ],
)
def test_slow_settings(rule: str, setting: str, value: str) -> None:
    work = product(tensor(64, 64), tensor(64, 64))
    seen = trace(work, settings={setting: value}, settings_places={setting: line(2)})
    assert only(seen, rule).location == line(2)
    assert not gated(trace(work))


def test_gradients_that_nobody_uses_are_advice() -> None:
    weight = tensor(64, 64, requires_grad=True)
    seen = trace(product(weight, weight), steps=4)
    assert only(seen, "gradients-unused").gate is GateClass.ADVICE


def test_what_was_to_be_compiled() -> None:
    events = [
        CompileEvent(kind="eager", reason="TORCH_COMPILE_DISABLE\nmore", function="step"),
        CompileEvent(kind="recompile-limit", reason="limit of 8", function="f", location=line(4)),
        CompileEvent(kind="graph-break", reason="call of print", location=line(5)),
        CompileEvent(
            kind="eager", reason="x", location=line(1, file="lib/torch/_dynamo/convert_frame.py")
        ),
    ]
    seen = trace(compile_events=events, fallbacks=["limit of 8"], graph_breaks={"x": 1})
    eager = findings(seen, "eager-instead-of-compiled")
    assert {f.location for f in eager} == {None, line(4)}
    assert only(seen, "graph-break").location == line(5)


def test_a_graph_break_whose_place_only_a_message_has() -> None:
    text = (
        'Graph break from `Tensor.item()`\nfrom user code:\n  File "/home/model.py", line 9, in f'
    )
    seen = trace(
        product(tensor(8, 8), tensor(8, 8)),
        compile_events=[CompileEvent(kind="graph-break", reason="Tensor.item")],
        messages=[Message(text=text, category="torch._dynamo.variables.tensor")],
    )
    place = only(seen, "graph-break").location
    assert place is not None
    assert (place.file, place.line) == ("model.py", 9)


def test_what_was_to_be_compiled_without_places() -> None:
    seen = trace(fallbacks=["backend failed"], graph_breaks={"call of print": 3})
    assert "backend failed" in only(seen, "eager-instead-of-compiled").title
    assert only(seen, "graph-break").calls == 3


def test_collectives_through_the_host() -> None:
    there = tensor(64, device="cuda")
    gloo = op("all_reduce_", [there], values={"backend": "gloo"}, calls=1)
    assert only(trace(gloo, machine=HOPPER), "collective-through-host")
    copied = op("all_reduce_", [tensor(64, came_from=["cuda"])], calls=1)
    assert only(trace(copied, machine=HOPPER), "collective-through-host")
    assert not gated(trace(op("all_reduce_", [tensor(64)], values={"backend": "gloo"}, calls=1)))


def test_collectives_one_by_one() -> None:
    many = op("all_reduce_", [tensor(64)], calls=40)
    assert "10 small" in only(trace(many, steps=4), "collectives-one-by-one").title
    assert not gated(trace(op("all_reduce_", [tensor(1 << 20)], calls=40), steps=4))
    assert not gated(trace(op("all_reduce_", [tensor(64)], calls=8), steps=4))


def test_ranks_that_disagree() -> None:
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    query = tensor(1, 4, 8, 8)
    calls = [attention(query, leaf=flash), attention(query, dropout_p=0.1, rank=1)]
    found = only(trace(functions=calls, processes=2), "ranks-disagree")
    assert found.gate is GateClass.LEAF_MISMATCH
    (difference,) = found.evidence
    assert (difference.what, "math" in difference.found) == ("rank 1", True)
    assert "flash" in difference.required
    alike = [attention(query, leaf=flash), attention(query, leaf=flash, rank=1)]
    assert not gated(trace(functions=alike, processes=2))


def test_ranks_whose_products_have_other_dtypes() -> None:
    narrow = tensor(8, 8, dtype="bfloat16")
    seen = trace(product(tensor(8, 8), tensor(8, 8)), product(narrow, narrow, rank=1), processes=2)
    assert only(seen, "ranks-disagree").op == "gemm"


def test_variables() -> None:
    slow = Variable(name="X_BLOCKING", value="1", effect="waits", is_slow=True)
    decides = Variable(name="X_THREADS", value="2", effect="threads", changes_decision=True)
    harmless = Variable(name="X_LOG", value="1", effect="logs")
    found = findings(trace(variables=[slow, decides, harmless]), "environment-override")
    gates = {f.evidence[0].what: f.gate for f in found}
    assert gates == {"X_BLOCKING": GateClass.IGNORED_SETTING}


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: no kernel image is available for execution on the device",
        "NVIDIA B200 with CUDA capability sm_100 is not compatible with the current PyTorch "
        "installation.",
        "Torch was not compiled with flash attention.",
        "fast.so: undefined symbol: _ZN3c105ErrorC2E",
        "Torch not compiled with CUDA enabled",
        "FlashAttention only supports Ampere GPUs or newer.",
    ],
)
def test_packages_without_code_for_the_device(text: str) -> None:
    error = SwallowedError(kind="RuntimeError", text=text, raised_by="fast", location=line(6))
    assert only(trace(swallowed=[error]), "wrong-arch-package").location == line(6)
    assert not findings(trace(swallowed=[error]), "swallowed-error")
    message = Message(text=text, category="UserWarning", location=line(6))
    assert only(trace(messages=[message]), "wrong-arch-package")


@pytest.mark.parametrize(
    ("text", "is_fallback"),
    [
        ("flash-attn is not installed, falling back to eager attention", True),
        ("The fast path is not available because one of (selective_scan_fn) is None.", True),
        ("Using default W8A8 block FP8 config. Performance might be sub-optimal!", True),
        ("User provided device_type of 'cuda', but CUDA is not available. Disabling", True),
        ("Triton kernels: module not found", True),
        ("this checkpoint is from an older version", False),
        ("`torch_dtype` is deprecated! Use `dtype` instead!", False),
        ("Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.", False),
    ],
)
def test_announced_fallbacks(text: str, is_fallback: bool) -> None:
    seen = trace(messages=[Message(text=text, category="UserWarning")])
    assert bool(findings(seen, "announced-fallback")) == is_fallback


def test_swallowed_errors_and_refusals() -> None:
    error = SwallowedError(
        kind="ModuleNotFoundError", text="No module named 'flash_attn'", raised_by="flash_attn"
    )
    assert "flash_attn" in only(trace(swallowed=[error]), "swallowed-error").title
    refusal = Refusal(who="attention", required="a", found="b", remedy="do", is_swallowed=True)
    found = only(trace(refusals=[refusal]), "swallowed-refusal")
    assert (found.severity, found.remedy) == (Severity.ERROR, "do")
    seen = Refusal(who="attention", required="a", found="b")
    assert not gated(trace(refusals=[seen]))


@pytest.mark.parametrize(
    ("kind", "raised_by"),
    [
        ("IndexError", "select"),
        ("ValueError", "torch.as_tensor"),
        ("_StopRecomputationError", "relu"),
    ],
)
def test_errors_that_are_questions(kind: str, raised_by: str) -> None:
    error = SwallowedError(kind=kind, text="no", raised_by=raised_by)
    assert not gated(trace(swallowed=[error]))


def test_rules_are_named_and_described() -> None:
    ids = [rule.id for rule in ALL_RULES]
    assert len(ids) == len(set(ids)) >= 35
    for rule in ALL_RULES:
        assert rule.id == rule.id.lower()
        assert rule.summary
        assert rule.remedy
        assert not rule.summary.endswith(".")


def test_an_empty_trace_has_no_findings() -> None:
    assert judge(trace()) == []
