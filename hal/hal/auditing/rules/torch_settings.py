"""Rules for settings of torch itself, and for layers left in training mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hal.auditing.gates import GateClass
from hal.auditing.rules.attention import SDPA, attention_calls
from hal.auditing.rules.facts import tensors, time_of
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex
from hal.auditing.trace import FunctionCall

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "dropout_",
             "feature_alpha_dropout")  # fmt: skip


def _setting(index: TraceIndex, name: str, found: str, title: str) -> Iterator[Hit]:
    if index.trace.settings.get(name) == found:
        under = [call for call in index.trace.functions if call.settings.get(name) == found]
        yield Hit(
            title=title,
            location=index.setting_place(name, found),
            evidence=(evidence(name, "torch's default", found),),
            calls=sum(call.calls for call in under),
        )


def _deterministic(index: TraceIndex) -> Iterator[Hit]:
    title = "deterministic algorithms are on: slower kernels for the same numbers"
    yield from _setting(index, "deterministic_algorithms", "True", title)


def _anomaly(index: TraceIndex) -> Iterator[Hit]:
    title = "anomaly detection is on: every op of autograd records where it was called"
    yield from _setting(index, "anomaly_mode", "True", title)


def _libraries_off(index: TraceIndex) -> Iterator[Hit]:
    used = {op.op_class for op in index.trace.ops}
    on_cuda = "cuda" in index.accelerators
    if used & {"convolution", "gemm"} and not index.accelerators:
        title = "oneDNN is off: convolutions and 16-bit products run without it"
        yield from _setting(index, "mkldnn", "False", title)
    if on_cuda and "convolution" in used:
        yield from _setting(index, "cudnn", "False", "cuDNN is off: convolutions run without it")


def _fused_attention_off(index: TraceIndex) -> Iterator[Hit]:
    """The setting itself is named where it was set; calls that it slowed are `sdpa-math-path`."""
    for call, _, backend in attention_calls(index):
        if backend != "math" or call.settings.get("flash_sdp") != "False":
            continue
        yield Hit(
            title="torch's fused attention is disabled by the program",
            location=index.trace.settings_places.get("flash_sdp") or call.location,
            op="attention",
            evidence=(evidence("flash_sdp", "enabled", "disabled"),),
            calls=call.calls,
            time_us=call.time_us,
        )


def _dropout(index: TraceIndex) -> Iterator[Hit]:
    if index.is_training:
        return
    for name in _DROPOUTS:
        for call in index.functions.get(name, []):
            p, training = call.arguments.get("p", 0.5), call.arguments.get("training", True)
            if training and _is_positive(p) and _is_without_gradient(call):
                yield _dropout_hit(index, call, f"dropout of p={p}")
    for call, arguments, _ in attention_calls(index):
        if arguments.dropout_p > 0 and _is_without_gradient(call):
            yield _dropout_hit(index, call, f"attention with dropout_p={arguments.dropout_p}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _is_without_gradient(call: FunctionCall) -> bool:
    """Whether nothing of the call can be trained: a module in training mode by mistake."""
    if call.settings.get("grad_enabled") == "False" or "inference_mode" in call.settings:
        return True
    return not any(fact.requires_grad for fact in tensors(call.arguments))


def _dropout_hit(index: TraceIndex, call: FunctionCall, what: str) -> Hit:
    return Hit(
        title=f"{what} is on where nothing is trained: results are random",
        location=call.location,
        op="attention" if call.name.endswith(SDPA) else "elementwise",
        evidence=(evidence("mode of the module", "eval", "training, without gradients"),),
        calls=call.calls,
        time_us=call.time_us,
        rank=index.rank_of(call),
    )


def _batch_norm(index: TraceIndex) -> Iterator[Hit]:
    if index.is_training:
        return
    for call in index.functions.get("batch_norm", []):
        if call.arguments.get("training") is True and _is_without_gradient(call):
            has_statistics = call.arguments.get("running_mean") is not None
            if has_statistics:
                yield Hit(
                    title="batch norm is in training mode where nothing is trained: it uses the "
                    "batch, and changes the model",
                    location=call.location,
                    op="norm",
                    evidence=(evidence("mode of the module", "eval", "training"),),
                    calls=call.calls,
                    time_us=call.time_us,
                    rank=index.rank_of(call),
                )


def _gradients_unused(index: TraceIndex) -> Iterator[Hit]:
    if index.is_training or index.trace.steps < 2:
        return
    recorded = [op for op in index.trace.ops if any(f.requires_grad for f in op.outputs)]
    worst = max(recorded, key=lambda op: op.time_us, default=None)
    if worst is not None and worst.op_class in ("gemm", "convolution", "attention"):
        yield Hit(
            title="autograd records a graph that nobody uses",
            location=worst.location,
            op=worst.op_class,
            evidence=(evidence("gradients", "torch.inference_mode()", "recorded, no backward"),),
            calls=worst.calls,
            time_us=time_of(recorded),
        )


RULES = (
    Rule(
        id="dropout-left-on",
        gate=GateClass.SEMANTIC,
        summary="dropout in training mode although no gradient is recorded and no backward pass "
        "follows",
        remedy="call model.eval() before inference",
        check=_dropout,
    ),
    Rule(
        id="batch-norm-in-training-mode",
        gate=GateClass.SEMANTIC,
        summary="batch norm in training mode although nothing is trained",
        remedy="call model.eval() before inference",
        check=_batch_norm,
    ),
    Rule(
        id="deterministic-algorithms",
        gate=GateClass.LOST_FAST_PATH,
        summary="torch.use_deterministic_algorithms is on",
        remedy="switch it off where runs need not be equal bit for bit, or waive it",
        check=_deterministic,
    ),
    Rule(
        id="anomaly-mode",
        gate=GateClass.LOST_FAST_PATH,
        summary="torch.autograd.detect_anomaly is on",
        remedy="remove it after debugging",
        check=_anomaly,
    ),
    Rule(
        id="fused-attention-disabled",
        gate=GateClass.LOST_FAST_PATH,
        summary="fused attention is disabled by a setting or by sdpa_kernel(MATH)",
        remedy="remove enable_flash_sdp(False), or allow the fused backends in sdpa_kernel",
        check=_fused_attention_off,
    ),
    Rule(
        id="library-disabled",
        gate=GateClass.LOST_FAST_PATH,
        summary="oneDNN or cuDNN is switched off in a program that has work for it",
        remedy="remove torch.backends.mkldnn.flags(enabled=False) or cudnn.enabled = False",
        check=_libraries_off,
    ),
    Rule(
        id="gradients-unused",
        gate=GateClass.ADVICE,
        summary="autograd records the forward passes and no backward pass follows",
        remedy="run inference under torch.inference_mode()",
        check=_gradients_unused,
    ),
)
