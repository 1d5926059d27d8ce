"""What cannot be routed is refused by name, before or at the call, and nothing stays changed."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.errors import BindingError, PlanError, RoutingError, WaiverError
from hal.integrations.router import Router
from hal.integrations.transformers import route
from routed_models import VOCAB, attention_waivers, make_model, registry


def routed(model: Any, **options: Any) -> Any:
    use = {"gemm": "cpu.gemm.linear_fp32", "embedding": "cpu.embedding.index_select"}
    return route(model, **{"max_tokens": 256, "registry": registry(), "use": use, **options})


def state(model: Any) -> list[object]:
    """What routing changes of a model."""
    modules: list[object] = []
    for module in model.modules():
        modules += [type(module), sorted(module.__dict__), len(module._forward_pre_hooks)]
    return [model.config._attn_implementation_internal, *modules]


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)


def _training(model: Any) -> None:
    model.train()


def _half_offloaded(model: Any) -> None:
    model.lm_head.to("meta")


def _hooked(model: Any) -> None:
    model.lm_head.forward = lambda x: x


def _quantised(model: Any) -> None:
    kind = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model.lm_head.__class__ = kind


def _doubled(model: Any) -> None:
    model.double()


def _adapter(model: Any) -> None:
    model.lm_head.lora_A = torch.nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_training, "training mode"),
        (_half_offloaded, "meta"),
        (_hooked, "forward of its own"),
        (_quantised, "bitsandbytes.nn.modules.Linear4bit.*quantised"),
        (_adapter, "adapter"),
        (_doubled, "required: a weight of float32.*found:    float64"),
    ],
)
def test_models_that_cannot_be_routed(spoil: Callable[[Any], None], said: str) -> None:
    model = make_model("Llama")
    spoil(model)
    before = state(model)
    with pytest.raises(RoutingError, match=f"(?s){said}"):
        routed(model)
    assert state(model) == before


def test_compiled_and_foreign_models() -> None:
    with pytest.raises(RoutingError, match="not compiled"):
        routed(torch.compile(make_model("Llama")))
    with pytest.raises(RoutingError, match=r"torch\.nn\.modules\.linear\.Linear"):
        routed(torch.nn.Linear(4, 4))


class WithConvolution(torch.nn.Module):
    """A linear layer that also convolves by itself."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.kernel = torch.nn.Parameter(torch.ones(64, 1, 3) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.nn.functional.conv1d(
            x.transpose(1, 2), self.kernel, padding=1, groups=x.shape[-1]
        )
        y: torch.Tensor = self.inner(mixed.transpose(1, 2))
        return y


def _with_convolution() -> Any:
    model = make_model("Llama")
    model.model.layers[1].mlp.up_proj = WithConvolution(model.model.layers[1].mlp.up_proj).eval()
    return model


def test_what_has_no_op_is_an_error_with_its_line_unless_allowed() -> None:
    model = _with_convolution()
    before = state(model)
    with pytest.raises(RoutingError, match=r"aten::convolution at \S*_refusals\.py:\d+") as raised:
        routed(model)
    assert "kernel (3,)" in str(raised.value)
    assert state(model) == before
    with routed(model, allow=["aten::convolution"]):
        assert state(model) != before
        with torch.inference_mode():
            model(ids(1, 5))
    assert state(model) == before
    with pytest.raises(RoutingError, match=r"allow='aten::gru'"):
        routed(model, allow=["aten::convolution", "aten::gru"])


def test_a_lost_fast_path_raises_before_any_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama").half()  # the CPU has no product of float16

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a forward")

    monkeypatch.setattr(Router, "rehearse", forbidden)
    with pytest.raises(PlanError, match="reference"):
        routed(model, use={})


def test_soft_capped_attention_needs_a_waiver_on_the_cpu() -> None:
    model = make_model("Gemma2")
    with pytest.raises(PlanError, match="softcap"):
        routed(model)
    with routed(model, strict=False) as loose:
        assert {v.label for v in loose.plan.violations} == {
            "dense_attention.prefill",
            "dense_attention.decode",
        }
    with routed(model, waivers=attention_waivers()) as waived:
        assert waived.plan.waivers_in_use()
    with pytest.raises(WaiverError):
        routed(make_model("Llama"), waivers=attention_waivers())


def test_calls_that_are_refused() -> None:
    model = make_model("Llama")
    with routed(model) as held:
        with pytest.raises(RoutingError, match="without gradients"):
            model(ids(1, 4))
        with torch.inference_mode():
            with pytest.raises(RoutingError, match="output_attentions"):
                model(ids(1, 4), output_attentions=True)
            with pytest.raises(RoutingError, match="larger max_tokens"):
                model(ids(1, 300))
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RoutingError):
                model(ids(1, 4))
            model.train()
            with pytest.raises(RoutingError, match="training mode"):
                model(ids(1, 4))
            model.eval()
            model(ids(1, 4))
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RoutingError, match="copy of a routed"):
                copying(model)
        with pytest.raises(RoutingError, match="not routed yet"):
            routed(model)
        model.set_attn_implementation("eager")
        with torch.inference_mode(), pytest.raises(RoutingError, match="eager"):
            model(ids(1, 4))
        held.undo()
        held.undo()
    with torch.inference_mode():
        model(ids(1, 4))


def test_a_changed_weight_is_seen() -> None:
    model = make_model("Llama")
    with routed(model), torch.inference_mode():
        model(ids(1, 4))
        with torch.inference_mode(False), torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        with pytest.raises(RoutingError, match="moved or changed"):
            model(ids(1, 4))


def test_an_unrouted_copy_that_names_the_implementation_is_an_error() -> None:
    model = make_model("Llama")
    with routed(model):
        other = make_model("Llama")
        other.config._attn_implementation_internal = "hal"
        with torch.inference_mode(), pytest.raises(RoutingError, match="merely names"):
            other(ids(1, 4))


def test_an_error_midway_undoes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Qwen2Moe")
    before = state(model)

    def failing(*args: Any) -> None:
        raise BindingError("test", "nothing", "something", "nothing")

    for step in ("rehearse", "plan", "bind", "check_routed"):
        with monkeypatch.context() as patched:
            patched.setattr(Router, step, failing)
            with pytest.raises(BindingError):
                routed(model)
        assert state(model) == before, step


def test_counts_hold_over_threads() -> None:
    model = make_model("Llama")
    with routed(model) as held:
        prompt = ids(2, 6)
        wanted: list[torch.Tensor] = []
        got: list[torch.Tensor] = []

        def run() -> None:
            with torch.inference_mode():
                for _ in range(5):
                    got.append(model(prompt)[0])

        with torch.inference_mode():
            wanted.append(model(prompt)[0])
        before = {row.site: row.calls for row in held.counts() if row.op == "gemm"}
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        totals: dict[str, int] = {}
        for row in held.counts():
            if row.op == "gemm":
                totals[row.site] = totals.get(row.site, 0) + row.calls
    assert len(got) == 20
    assert all(torch.allclose(one, wanted[0], atol=1e-5) for one in got)
    assert set(totals.values()) == {21}
    assert before


def test_modules_of_torch_that_hide_their_products_are_named() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    model = SiglipVisionModel(config).eval()
    before = state(model)
    with pytest.raises(RoutingError) as raised:
        route(model, max_tokens=256, registry=registry())
    assert "head.attention (MultiheadAttention)" in str(raised.value)
    assert state(model) == before
