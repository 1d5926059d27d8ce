"""What the observer says of small programs: ops, functions, places, origins, repeats, settings."""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor

import hal
from hal.auditing import observer_masks
from hal.auditing.trace import TensorFact
from hal.errors import AuditError
from observed import calls_of, function_named, observe, ops_named

HERE = Path(__file__).name


def test_op_of_a_linear_layer() -> None:
    layer = torch.nn.Linear(6, 5)
    x = torch.randn(3, 6)
    trace = observe(lambda: layer(x))
    (op,) = ops_named(trace, "addmm")
    assert op.op_class == "gemm"
    assert [fact.shape for fact in op.inputs] == [(5,), (3, 6), (6, 5)]
    assert op.outputs[0].shape == (3, 5)
    assert op.flops == 2 * 3 * 6 * 5
    assert op.bytes == 4 * (5 + 18 + 30 + 15)
    assert op.function == "linear"
    assert op.call is not None
    call = trace.functions[op.call]
    assert call.name == "linear"
    assert call.module == "Linear"
    assert call.leaves == {"aten::addmm": 1}
    assert isinstance(call.arguments["weight"], TensorFact)
    assert call.arguments["weight"].is_constant
    assert trace.steps == 1
    assert op.time_us > 0


def test_place_is_the_line_of_the_program() -> None:
    a = torch.randn(4, 4)

    def inner() -> torch.Tensor:
        return torch.mm(a, a)

    trace = observe(lambda: inner())
    (op,) = ops_named(trace, "mm")
    assert op.location is not None
    assert Path(op.location.file).name == HERE
    assert op.location.line == inner.__code__.co_firstlineno + 1
    assert op.location.function.endswith("inner")
    assert [Path(place.file).name for place in op.stack[:2]] == [HERE, HERE]
    assert len(op.stack) <= 8


def test_module_path_is_dotted() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    trace = observe(lambda: model(torch.randn(2, 4)))
    assert function_named(trace, "linear").module == "1.0 (Linear)"


def test_equal_calls_from_one_place_are_one_entry() -> None:
    a = torch.randn(4, 4)

    def program() -> None:
        for _ in range(7):
            torch.mm(a, a)

    (op,) = ops_named(observe(program), "mm")
    assert op.calls == 7
    assert op.repeats == 6
    assert op.flops == 7 * 2 * 4**3


def test_a_written_or_new_input_is_no_repeat() -> None:
    a = torch.randn(4, 4)

    def program() -> None:
        for _ in range(5):
            torch.mm(a, a)
            a.add_(1)
        for _ in range(5):
            b = torch.randn(4, 4)
            torch.mm(b, b)
        with torch.inference_mode():
            c = torch.randn(4, 4)
            for _ in range(5):
                torch.mm(c, c)
                c.add_(1)

    assert [op.repeats for op in ops_named(observe(program), "mm")] == [0, 0, 0]


def test_a_new_view_of_the_same_memory_is_a_repeat() -> None:
    weight = torch.randn(8, 4)

    def program() -> None:
        for _ in range(4):
            weight.t().contiguous()

    (op,) = ops_named(observe(program), "clone")
    assert op.function == "contiguous"
    assert op.repeats == 3


def test_random_ops_do_not_repeat() -> None:
    x = torch.ones(32)

    def program() -> None:
        for _ in range(4):
            F.dropout(x, 0.5, training=True)

    assert all(op.repeats == 0 for op in observe(program).ops if op.name.startswith("aten::b"))
    assert calls_of(observe(program))["bernoulli_"] or calls_of(observe(program))["native_dropout"]


def test_parts_of_one_tensor_share_an_input() -> None:
    def program() -> None:
        x = torch.randn(6, 4)
        weight = torch.nn.Parameter(torch.randn(4, 4))
        for i in range(6):
            torch.mm(x[i : i + 1], weight)

    (op,) = ops_named(observe(program), "mm")
    assert op.calls == 6
    assert op.shared_inputs == 5


def test_layers_that_read_one_tensor_are_no_loop_and_neither_are_repeats() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = torch.nn.Linear(8, 4, bias=False)
            self.rest = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(7))

        def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            self.key(text)
            for layer in self.rest:
                x = layer(x)
            return x

    layers = [Layer() for _ in range(5)]

    def program() -> None:
        text, x = torch.randn(3, 8), torch.randn(2, 8)
        for _ in range(2):
            for layer in layers:
                x = layer(x, text)

    (op,) = ops_named(observe(program), "mm")
    assert (op.calls, op.repeats, op.shared_inputs) == (10, 5, 0)


def test_numbers_that_torch_makes_tensors_of_are_the_same_again() -> None:
    def program() -> None:
        mask, bias = torch.rand(8, 8) > 0.5, torch.randn(8, 8)
        for low in (-1e4, -1e4, -2e4, -1e4):
            torch.where(mask, bias, low)

    ops = ops_named(observe(program), "where")
    assert (sum(op.calls for op in ops), sum(op.repeats for op in ops)) == (4, 2)


def test_origins_follow_casts_views_and_elementwise_ops() -> None:
    weight = torch.randint(-8, 8, (4, 4), dtype=torch.int8)

    def program() -> torch.Tensor:
        widened = weight.to(torch.float16).float().t() * 0.5
        product = torch.mm(torch.ones(2, 4), torch.cat([widened, widened]).t())
        return torch.mm(product, torch.ones(8, 2))

    first, second = ops_named(observe(program), "mm")
    assert first.inputs[1].origin_dtypes == {"int8", "float16", "float32"}
    assert first.inputs[1].is_constant
    assert second.inputs[0].origin_dtypes == {"float32"}


def test_constants_are_what_existed_and_what_is_made_of_it() -> None:
    old = torch.randn(3, 3)

    def program() -> None:
        new = torch.randn(3, 3)
        torch.mm(old, old.relu())
        torch.mm(new, old)
        cache = torch.zeros(3, 3)
        cache.copy_(new)
        torch.mm(cache, old)

    flags = [[f.is_constant for f in op.inputs] for op in ops_named(observe(program), "mm")]
    assert flags == [[True, True], [False, True], [False, True]]


def test_buffers_of_a_module_made_in_the_audit_are_constant() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x.relu(), self.get_buffer("table"))

    def program() -> None:
        Scaled()(torch.randn(4, 4))

    (op,) = ops_named(observe(program), "mm")
    assert [fact.is_constant for fact in op.inputs] == [False, True]


def test_settings_of_a_call() -> None:
    q = torch.randn(1, 2, 8, 16)

    def program() -> None:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.linear(q, torch.ones(4, 16))

    trace = observe(program)
    attention = function_named(trace, "scaled_dot_product_attention")
    assert attention.settings["grad_enabled"] == "False"
    assert attention.settings["flash_sdp"] == "False"
    assert function_named(trace, "linear").settings == {"autocast": "bfloat16"}
    assert trace.settings["flash_sdp"] == "False"
    assert trace.settings["num_threads"] == str(torch.get_num_threads())


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (torch.ones(5, 5, dtype=torch.bool), "all-true"),
        (torch.zeros(1, 1, 5, 5), "all-true"),
        (torch.ones(5, 5).tril().bool(), "causal"),
        (torch.full((5, 5), float("-inf")).triu(1), "causal"),
        (torch.ones(5, 5).tril(1).bool(), ""),
        (torch.randn(5, 5), ""),
    ],
)
def test_pattern_of_a_mask(mask: torch.Tensor, pattern: str) -> None:
    q = torch.randn(1, 2, 5, 8)
    trace = observe(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
    call = function_named(trace, "scaled_dot_product_attention")
    assert call.arguments["attn_mask"].pattern == pattern
    assert "to" not in calls_of(trace)
    assert calls_of(trace)["_to_copy"] == 0


def test_messages_are_kept_and_still_shown(caplog: pytest.LogCaptureFixture) -> None:
    def program() -> None:
        warnings.warn("look out", RuntimeWarning, stacklevel=1)
        logging.getLogger("some.library").warning("falling %s", "back")
        logging.getLogger("some.library").info("nothing")

    with pytest.warns(RuntimeWarning, match="look out"):
        trace = observe(program)
    found = {(message.category, message.text) for message in trace.messages}
    assert ("RuntimeWarning", "look out") in found
    assert ("WARNING some.library", "falling back") in found
    assert "falling back" in caplog.text
    assert all(message.text != "nothing" for message in trace.messages)
    assert all(message.location is not None for message in trace.messages)


def test_errors_that_a_program_swallows() -> None:
    a = torch.ones(2, 3)

    def program() -> None:
        for _ in range(2):
            try:
                torch.mm(a, a)
            except RuntimeError:
                torch.mm(a, a.t())
        try:
            import flash_attn  # noqa: F401
        except ImportError:
            torch.mm(a, a.t())

    found = {error.raised_by: error for error in observe(program).swallowed}
    assert found["aten::mm"].calls == 2
    assert found["aten::mm"].kind == "RuntimeError"
    assert found["flash_attn"].kind == "ModuleNotFoundError"
    assert all(Path(e.location.file).name == HERE for e in found.values() if e.location)


def test_looking_for_a_library_is_no_failure() -> None:
    import importlib.util

    trace = observe(lambda: importlib.util.find_spec("flash_attn"))
    assert trace.swallowed == []


def test_an_error_of_the_program_is_the_program_s() -> None:
    a = torch.ones(2, 3)
    observed = hal.audit()
    with pytest.raises(RuntimeError, match="cannot be multiplied"), observed:
        torch.mm(a, a)
    assert observed.trace.swallowed == []
    assert observed.result.kind == "program"


def test_one_audit_at_a_time() -> None:
    with hal.audit() as outer:
        with pytest.raises(AuditError, match="one audit at a time"), hal.audit():
            pass
        torch.ones(2)
    assert calls_of(outer.trace)["ones"] == 1
    assert calls_of(observe(lambda: torch.ones(2)))["ones"] == 1


def test_an_audit_is_of_one_block() -> None:
    with hal.audit() as observed:
        torch.ones(2)
    with pytest.raises(AuditError, match="create another"), observed:
        pass
    with hal.audit() as another:
        torch.ones(2)
    assert another.result.rows


def test_report_before_the_end() -> None:
    with hal.audit() as report, pytest.raises(AuditError, match="end of the block"):
        _ = report.result
    assert report.result.mode == "full"


def test_gate_of_a_block() -> None:
    q = torch.randn(1, 2, 64, 32)
    observed = hal.audit(fail_on=("lost-fast-path",))

    def program() -> None:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(64, 64))

    with pytest.raises(AuditError, match="mask"), observed:
        program()
    with pytest.raises(AuditError, match="classes of findings"):
        hal.audit(fail_on=("nonsense",))


def test_everything_is_restored() -> None:
    before = (
        warnings._showwarnmsg,  # type: ignore[attr-defined]
        logging.Logger.callHandlers,
        threading.Thread._bootstrap_inner,  # type: ignore[attr-defined]
        torch.overrides.has_torch_function,
        torch.nn.Linear.__call__,
        torch._C.ScriptFunction.__call__,
        os._exit,
        dict(os.environ),
        [type(finder) for finder in __import__("sys").meta_path],
    )
    observe(lambda: torch.nn.Linear(2, 2)(torch.ones(2)))
    after = (
        warnings._showwarnmsg,  # type: ignore[attr-defined]
        logging.Logger.callHandlers,
        threading.Thread._bootstrap_inner,  # type: ignore[attr-defined]
        torch.overrides.has_torch_function,
        torch.nn.Linear.__call__,
        torch._C.ScriptFunction.__call__,
        os._exit,
        dict(os.environ),
        [type(finder) for finder in __import__("sys").meta_path],
    )
    assert before == after
    assert "__call__" not in vars(torch.nn.Linear)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_tensors_are_not_kept() -> None:
    with hal.audit():
        kept = []
        for _ in range(3):
            x = torch.randn(64, 64)
            y = torch.mm(x, x).relu()
            kept += [weakref.ref(x), weakref.ref(y)]
            del x, y
        assert [reference() for reference in kept] == [None] * 6


def test_inside_of_an_extension_s_op() -> None:
    @torch.library.custom_op("hal_test_observer::attention", mutates_args=())
    def attention(q: torch.Tensor) -> torch.Tensor:
        return torch.mm(q, q.t()).softmax(-1)

    trace = observe(lambda: attention(torch.randn(4, 4)))
    (op,) = [op for op in trace.ops if op.name == "hal_test_observer::attention"]
    assert op.op_class == "attention"
    assert calls_of(trace)["mm"] == 1


def test_subclasses_fakes_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    pair = TwoTensor(torch.randn(3, 3), torch.randn(3, 3))

    def program() -> None:
        torch.mm(pair, pair)
        with FakeTensorMode():
            fake = torch.empty(3, 3)
            torch.mm(fake, fake)
        meta = torch.empty(3, 3, device="meta")
        torch.mm(meta, meta)

    trace = observe(program)
    assert calls_of(trace)["mm"] == 2  # of the pair's two plain tensors
    assert all(fact.device != "meta" for op in trace.ops for fact in op.outputs)


def test_script_region() -> None:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    x = torch.randn(2, 4)

    def program() -> None:
        scripted(x)
        torch.mm(x, x.t())

    trace = observe(program)
    regions = {op.name: op.region for op in trace.ops if op.op_class == "gemm"}
    assert regions == {"aten::addmm": "script", "aten::mm": "eager"}


def test_backward_is_seen() -> None:
    layer = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4, requires_grad=True)
    trace = observe(lambda: layer(x).sum().backward())
    gradients = [op for op in ops_named(trace, "mm") if op.function == "backward"]
    assert sum(op.calls for op in gradients) == 2


def test_transforms_are_seen() -> None:
    weight = torch.randn(4, 4)
    x = torch.randn(3, 4)
    trace = observe(lambda: torch.vmap(lambda row: torch.mv(weight, row))(x))
    assert sum(op.calls for op in trace.ops if op.op_class == "gemm") == 1


def test_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, hal; hal.audit; import hal.auditing.pytest_plugin, hal.cli.audit_run; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_experts_that_no_row_goes_to_are_not_read() -> None:
    weights = torch.randn(16, 32, 64)

    def program() -> None:
        ends = torch.tensor([1, 2] + [2] * 14, dtype=torch.int32)
        torch._grouped_mm(torch.randn(2, 32), weights, offs=ends)

    (op,) = ops_named(observe(program), "_grouped_mm")
    assert op.flops == 2 * 2 * 32 * 64
    assert op.bytes == 4 * (2 * 32 + 2 * 32 * 64 + 2 * 64 + 16)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_their_own_kernels_and_are_seen() -> None:
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    layer = torch.nn.Linear(4, 6)
    expected = [layer(row) for row in rows]
    found: list[torch.Tensor] = []

    def program() -> None:
        nested = torch.nested.nested_tensor(rows)
        found.append(layer(nested))
        with torch.inference_mode():
            found.append(layer(nested))
        torch.nested.to_padded_tensor(nested + nested, 0.0)

    with hal.audit() as report:
        program()
    for result in found:
        parts = result.unbind()
        assert all(
            torch.allclose(part, one, atol=1e-6) for part, one in zip(parts, expected, strict=True)
        )
    products = [op for op in report.trace.ops if op.op_class == "gemm"]
    assert sum(op.calls for op in products) == 2
    assert all(op.inputs[0].is_nested for op in products)
    assert all(op.flops == op.calls * 2 * 5 * 4 * 6 for op in products)
    assert calls_of(report.trace)["add"] == 1
    assert not [note for note in report.result.notes if "failed" in note]
    assert report.trace.steps == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoder_s_nested_fast_path() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        found: list[torch.Tensor] = []
        trace = observe(lambda: found.append(encoder(x, src_key_padding_mask=padding)))
    assert torch.equal(found[0], expected)
    assert calls_of(trace)["_transformer_encoder_layer_fwd"] == 2


def test_every_distinct_mask_is_looked_at() -> None:
    """Batches of one shape: some padded, some not, so that only some masks say nothing."""
    q = torch.randn(1, 2, 6, 8)

    def program() -> None:
        for number in range(6):
            mask = torch.ones(6, 6, dtype=torch.bool)
            if number in (0, 3):
                mask[:, -1] = False
            for _ in range(2):  # two layers
                F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    calls = [c for c in observe(program).functions if c.name == "scaled_dot_product_attention"]
    patterns = {call.arguments["attn_mask"].pattern: 0 for call in calls}
    for call in calls:
        patterns[call.arguments["attn_mask"].pattern] += call.calls
    assert patterns == {"": 4, "all-true": 8}


def test_a_mask_that_is_written_to_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = observer_masks.mask_pattern

    def counted(mask: torch.Tensor) -> str:
        looks.append(mask.numel())
        return look(mask)

    monkeypatch.setattr(observer_masks, "mask_pattern", counted)
    q = torch.randn(1, 2, 6, 8)

    def program() -> None:
        mask = torch.zeros(6, 6)
        for _ in range(5):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        mask[:, -1] = float("-inf")
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    trace = observe(program)
    assert looks == [36, 36]
    calls = [c for c in trace.functions if c.name == "scaled_dot_product_attention"]
    assert {(c.arguments["attn_mask"].pattern, c.calls) for c in calls} == {
        ("all-true", 5),
        ("", 1),
    }


def test_looking_at_masks_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_masks, "_MAX_LOOKED_AT", 100)
    q = torch.randn(1, 2, 6, 8)

    def program() -> None:
        for _ in range(4):
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(6, 6))

    with hal.audit() as report:
        program()
    calls = [c for c in report.trace.functions if c.name == "scaled_dot_product_attention"]
    assert {(c.arguments["attn_mask"].pattern, c.calls) for c in calls} == {
        ("all-true", 2),
        ("", 2),
    }
    assert any("2 attention masks" in note for note in report.result.notes)
