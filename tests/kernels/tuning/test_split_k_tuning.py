"""Parts of products of few rows: what is tuned of them is what is launched, judged and planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hal_kernels.gemm.triton_split_k as split_k
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal.reasons import Reason
from hal_kernels.aot.limits import evidence_of
from hal_kernels.aot.targets import find_target
from hal_kernels.gemm.split_k_variants import FORMS
from hal_kernels.gemm.triton import bind
from hal_kernels.gemm.triton_limits import choose_kernels, not_supported_reasons
from hal_kernels.gemm.triton_tuning import shape_of
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.session import TuningSession, TuningTask
from hal_kernels.tuning.shapes import shape_class
from hal_kernels.tuning.store import find_configuration, user_store
from hal_kernels.tuning.tunable_kernels import TUNABLE
from hal_kernels.tuning.uses import kernel_uses

KERNEL, SHAPE = "gemm.split_k", "dtype=bfloat16,form=w4g32,n=96,k=4096,rows=16"
Tasks = Callable[..., TuningTask]


class Launches:
    """What parts are launched with, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []
        launch = split_k.SplitK.launch

        def noted(one: split_k.SplitK, *arguments: Any) -> None:
            self.seen.append((one.splits, dict(one.config)))
            launch(one, *arguments)

        monkeypatch.setattr(split_k.SplitK, "launch", noted)


def few(task: TuningTask) -> TuningTask:
    """With three configurations besides the default: each runs in the interpreter."""
    others = [{"SPLIT_K": 4}, {"BLOCK_N": 32, "num_warps": 2}, {"BLOCK_K": 128, "SPLIT_K": 8}]
    tunable = dataclasses.replace(task.tunable, space=lambda *_: others)
    return dataclasses.replace(task, tunable=tunable)


def exact_of(call: Any) -> torch.Tensor:
    (x,), weight = call.args, call.static["weight"]
    return x.double() @ weight.dequantize().double().T


def test_what_was_measured_is_launched_judged_and_planned(
    task: Tasks, compiler: Any, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, launches = few(task(KERNEL, SHAPE, basis="measured")), Launches(monkeypatch)
    assert one.configurations[0]["SPLIT_K"] == 8  # a few tiles on 128 multiprocessors
    results: list[torch.Tensor] = []

    def timer(call: Callable[[], Any]) -> float:
        results.append(call())
        return 50.0 if launches.seen[-1][0] == 4 else 100.0

    session = TuningSession(user_store(), timer=timer, compile=compiler())
    (entry,) = session.run([one], lambda *_: None)
    assert not [trial.error for trial in entry.trials if trial.error]
    tried = [{n: config[n] for n in one.configurations[0] if n != "SPLIT_K"} | {"SPLIT_K": parts}
             for parts, config in launches.seen]  # fmt: skip
    assert tried == one.configurations
    best = entry.best()
    assert best is not None
    assert best.configuration["SPLIT_K"] == 4

    call = one.tunable.call(one.shape, "cpu")
    launches.seen.clear()
    found = bind(call.request, device, **call.static)(*call.args)
    assert [parts for parts, _ in launches.seen] == [4]
    exact = exact_of(call)
    peak = exact.abs().amax(dim=-1, keepdim=True)
    assert ((found.double() - exact).abs() <= 3 * 4096**0.5 * 2.0**-8 * peak + 1e-6).all()

    choices = choose_kernels(call.request, device)
    assert not isinstance(choices, Reason)
    assert [choice.config for choice in choices] == ["w4g32", "split4-plain"]
    parts, total = kernel_uses("gemm", not_supported_reasons, call.request, device)
    assert (parts.kernel, parts.basis, parts.shape) == (KERNEL, "measured", str(one.shape))
    assert "split4" in parts.configuration
    assert total.kernel == "gemm.split_k_sum"


def test_without_one_a_plan_has_the_default_with_its_loss(device: DeviceSpec) -> None:
    call = TUNABLE[KERNEL].call(shape_class("bfloat16", "w4g32", 16, {"n": 96, "k": 4096}), "cpu")
    shape = shape_of(call.request, device)
    assert shape is not None
    assert shape[0] == KERNEL
    use, _ = kernel_uses("gemm", not_supported_reasons, call.request, device)
    assert (use.basis, use.shape) == ("default", str(shape[1]))
    assert "split8" in use.configuration
    assert use.loss is not None
    assert 0.0 <= use.loss < 1.0
    more = dataclasses.replace(call.request, tokens=TokenRange(1, 64))
    whole = shape_of(more, device)
    assert whole is not None
    assert whole[0] == "gemm.weight_only"


def test_a_fused_product_keeps_its_default(
    task: Tasks, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan says of the parts that nothing of them is chosen."""
    one, launches = task(KERNEL, SHAPE, basis="measured"), Launches(monkeypatch)
    keep(one, one.configurations[0] | {"SPLIT_K": 4})
    call = one.tunable.call(one.shape, "cpu")
    request: GemmRequest = call.request  # type: ignore[assignment]
    fused = FusedGemmRequest(
        n=request.n, k=request.k, dtype=request.dtype, weight_format=request.weight_format,
        has_residual=True, tokens=request.tokens,
    )  # fmt: skip
    from hal_kernels.fused_gemm.triton import bind as bind_fused
    from hal_kernels.fused_gemm.triton_limits import not_supported_reasons as fused_reasons

    bind_fused(fused, device, **call.static)(*call.args, torch.zeros(16, 96).bfloat16())
    assert [parts for parts, _ in launches.seen] == [8]
    uses = kernel_uses("fused_gemm", fused_reasons, fused, device)
    assert [use.config for use in uses] == ["bfloat16 w4g32", "split8-residual"]
    assert {use.basis for use in uses} == {"fixed"}


def keep(one: TuningTask, configuration: dict[str, int]) -> None:
    """As if only this one had been tried."""
    tunable = dataclasses.replace(
        one.tunable, space=lambda *_: (), default=lambda *_: default_of(configuration),
        default_of_units=None,
    )  # fmt: skip
    alone = dataclasses.replace(one, tunable=tunable, basis="modelled")

    def compiled(*_: Any) -> Trial:
        return Trial(configuration=configuration, tier="native", registers=32, shared_bytes=1024)

    TuningSession(user_store(), compile=compiled).run([alone], lambda *_: None)
    assert find_configuration(KERNEL, one.device, str(one.shape)) is not None


def default_of(configuration: dict[str, int]) -> Any:
    from hal_kernels.tuning.tunable import Default

    return Default(config="w4g32", configuration=configuration)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_reference_takes_the_call_of_each_form(name: str) -> None:
    """Of a weight in the format whose parts are of that form, on some device."""
    for form in (name, f"{name}-gated"):
        shape = shape_class("bfloat16", form, 16, {"n": 64, "k": 256})
        call = TUNABLE[KERNEL].call(shape, "cpu")
        got = CATALOGUE["gemm"].reference(call.request, **call.static)(*call.args)
        assert got.shape == (16, 32 if form.endswith("gated") else 64)
        assert torch.isfinite(got).all()
        assert got.abs().max() > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx950", "gfx1100"])
def test_a_call_of_a_form_is_of_its_class(arch: str, device: DeviceSpec) -> None:
    """Blocks of 32 in FP8 too where the matrix unit scales by powers of two by itself."""
    on = dataclasses.replace(device, arch=arch)
    target, tunable, seen = find_target(arch), TUNABLE[KERNEL], 0
    for dtype in tunable.dtypes(target):
        for form in tunable.forms:
            shape = shape_class(dtype, form, 16, {"n": 256, "k": 4096})
            try:
                default = tunable.default(target, shape)
            except KeyError:
                continue
            call = tunable.call(shape, "cpu")
            found = shape_of(call.request, on)  # type: ignore[arg-type]
            code = evidence_of(KERNEL, on, dtype, form)
            if code is None or code.tier != "native":  # nothing of it is split
                assert found is None or found[0] != KERNEL
                continue
            assert found == (KERNEL, shape)
            assert default.config == form
            seen += 1
    assert seen >= 10
