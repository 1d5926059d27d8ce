"""Measured times of candidates: ranges of tokens that come from them, and when they do not hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from absent_plans import plan, profile, sites
from hal.answers import estimate_of, estimate_source_of
from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.errors import SelectionError, SettingsError
from hal.ops import TokenRange
from hal.plan import Plan
from hal.tiers import Tier
from hal_kernels.gemm.triton import bind
from hal_kernels.tuning.candidate_times import (
    CandidateTime,
    TimesEntry,
    class_of,
    measured_time,
    save_times,
    times_path,
    versions_of,
)
from hal_kernels.tuning.candidate_timing import time_candidates
from hal_kernels.tuning.session import TuningTask
from hal_kernels.tuning.store import code_hash, user_store

LLAMA = str(Path(__file__).parents[2] / "support" / "llama_8b_like")
DEVICE, SITE = "h200-sxm", "qkv_proj"
OURS, TORCHS = "nvidia.gemm.triton", "nvidia.gemm.torch_linear"


def record(us: dict[int, tuple[float, float]], **changes: Any) -> None:
    """Times of ours and of torch's by rows, for the projection of q, k and v on the device."""
    spec = profile(DEVICE)
    op = sites(plan(LLAMA, spec, 1), SITE)[0]
    for rows, (ours, torchs) in us.items():
        known = class_of("gemm", op.site.request.with_tokens(TokenRange(rows, rows)), spec)
        assert known is not None
        times = [
            CandidateTime(candidate=OURS, us=ours),
            CandidateTime(candidate=TORCHS, us=torchs),
        ]
        fields: dict[str, Any] = {
            "kernel": known[0], "shape": known[1], "code": code_hash(known[0]),
            "versions": versions_of(spec), "made": "2026-11-30", "times": times,
        } | changes  # fmt: skip
        save_times(user_store(), DEVICE, spec.arch, "gemm", TimesEntry(**fields))


def ranges(found: Plan) -> list[tuple[int, int, str]]:
    return [(op.tokens.low, op.tokens.high, op.choice.name) for op in sites(found, SITE)]


def test_a_range_of_a_plan_comes_from_what_was_measured() -> None:
    spec = profile(DEVICE)
    before = plan(LLAMA, spec, 1)
    ((low, high, chosen),) = ranges(before)
    assert (low, chosen) == (1, TORCHS), "nobody measured: by name"
    assert all(op.decision.estimate_us is None for op in before.ops)
    sizes = [16, 32, 64, 128, 256, 512]
    assert high == sizes[-1]
    record({rows: (20.0, 40.0) if rows <= 64 else (90.0, 60.0) for rows in sizes})
    after = plan(LLAMA, spec, 1)
    assert ranges(after) == [(1, 64, OURS), (65, high, TORCHS)]
    few, many = sites(after, SITE)
    assert few.decision.estimate_us == 20.0
    assert few.decision.estimate_source == "measured 2026-11-30"
    assert few.to_dict()["estimate_source"] == "measured 2026-11-30"
    (reason,) = next(r for r in few.decision.rejected if r.name == TORCHS).reasons
    assert reason.required == f"below 20 µs, measured 2026-11-30 ({OURS})"
    assert reason.found == "40 µs, measured 2026-11-30"
    assert many.decision.estimate_us == 60.0
    # What was measured changes what runs, and only by that the plan's hash.
    assert after.to_dict()["hash"] != before.to_dict()["hash"]
    record({rows: (21.0, 43.0) if rows <= 64 else (91.0, 61.0) for rows in sizes})
    assert plan(LLAMA, spec, 1).to_dict()["hash"] == after.to_dict()["hash"]


def test_a_gain_that_is_not_worth_a_second_packing_divides_nothing() -> None:
    record({rows: (90.0 if rows < 512 else 57.0, 60.0) for rows in (16, 32, 64, 128, 256, 512)})
    ((_, _, chosen),) = ranges(plan(LLAMA, profile(DEVICE), 1))
    assert chosen == TORCHS


@pytest.mark.parametrize(
    "changes",
    [
        {"code": "0" * 16},
        {"versions": {"torch": "2.0.0"}},
        {"versions": {"triton": "3.6.0", "torch": "2.13.0"}},
    ],
    ids=["source", "torch", "triton"],
)
def test_what_was_measured_of_other_code_does_not_hold(changes: dict[str, Any]) -> None:
    record({512: (20.0, 40.0)}, **changes)
    ((_, _, chosen),) = ranges(plan(LLAMA, profile(DEVICE), 1))
    assert chosen == TORCHS


def test_a_time_is_of_its_device_and_its_class() -> None:
    record({512: (20.0, 40.0)})
    spec = profile(DEVICE)
    (op, *_) = sites(plan(LLAMA, spec, 1), SITE)
    request = op.site.request

    def found(of: Any, tokens: int, device: DeviceSpec = spec) -> Any:
        return measured_time(OURS, "gemm", of, tokens, device)

    assert found(request, 512) == (20.0, "2026-11-30")
    assert found(request, 300) == (20.0, "2026-11-30"), "of one class of rows"
    assert found(request, 128) is None
    assert found(dataclasses.replace(request, n=request.n * 2), 512) is None
    assert found(request, 512, profile("h100-sxm")) is None
    assert measured_time("nvidia.gemm.other", "gemm", request, 512, spec) is None
    unknown = dataclasses.replace(spec, software={})
    assert found(request, 512, unknown) == (20.0, "2026-11-30")


def test_a_file_that_is_not_right_is_named_and_kept() -> None:
    record({512: (20.0, 40.0)})
    spec, path = profile(DEVICE), times_path(user_store(), DEVICE, "gemm")
    sound = json.loads(path.read_text())
    entry = sound["entries"][0]
    twice = entry["times"] * 2
    for damage, told in [
        ("{", "JSONDecodeError"),
        (json.dumps(sound | {"schema": "other/1"}), "schema"),
        (json.dumps(sound | {"entries": [entry, entry]}), "each shape class once"),
        (json.dumps(sound | {"entries": [entry | {"times": twice}]}), "each candidate once"),
    ]:
        path.write_text(damage)
        with pytest.raises(SettingsError, match=told) as raised:
            plan(LLAMA, spec, 1)
        assert str(path) in str(raised.value)
        with pytest.raises(SettingsError, match=told):
            record({256: (1.0, 2.0)})
        assert path.read_text() == damage
    path.write_text(json.dumps(sound | {"device": "other"}))
    with pytest.raises(SettingsError, match="times of gemm"):
        save_times(user_store(), DEVICE, spec.arch, "gemm", TimesEntry.model_validate(entry))


def candidate(name: str, load: Callable[[], Any], **fields: Any) -> KernelCandidate:
    fields = {"tier": Tier.NATIVE, "not_supported_reasons": lambda request: ()} | fields
    return KernelCandidate(name=name, op="gemm", summary="", load=load, **fields)


def test_tuning_times_every_candidate_that_could_be_chosen(
    task: Callable[..., TuningTask], device: DeviceSpec, tmp_path: Path
) -> None:
    """Each launches the same product, by a timer that runs the call and tells a time of its own."""
    one = task("gemm.dense", "n=64,k=128,rows=4", "measured")
    results: list[torch.Tensor] = []

    def ours(request: Any, **static: Any) -> Any:
        return bind(request, device, **static)

    def torchs(request: Any, weight: torch.Tensor) -> Any:
        return lambda x: torch.nn.functional.linear(x, weight)

    def broken() -> Any:
        raise RuntimeError("no such library\nand more")

    def timer(call: Callable[[], Any]) -> float:
        results.append(call())
        return 10.0 * len(results)

    offered = [
        candidate("a.gemm.ours", lambda: ours),
        candidate("b.gemm.torch", lambda: torchs),
        candidate("c.gemm.broken", broken),
        candidate("d.gemm.slower_tier", broken, tier=Tier.TUNED),
        candidate("e.gemm.refused", broken, not_supported_reasons=lambda request: ("no",)),
    ]
    entry = time_candidates(one, lambda op, spec: offered, timer, tmp_path)
    assert entry is not None
    assert [(t.candidate, t.us, t.error) for t in entry.times] == [
        ("a.gemm.ours", 10.0, ""),
        ("b.gemm.torch", 20.0, ""),
        ("c.gemm.broken", None, "RuntimeError: no such library"),
    ]
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)
    assert times_path(tmp_path, one.key, "gemm").exists()
    (_, alone, *_) = offered
    assert time_candidates(one, lambda op, spec: [alone], timer, tmp_path) is None


def test_a_source_that_is_no_text_is_named() -> None:
    request = sites(plan(LLAMA, profile(DEVICE), 1), SITE)[0].site.request
    odd = candidate("x.gemm.odd", lambda: None, estimate_us=lambda r, t: 5.0,
                    estimate_source=lambda r, t: 5)  # fmt: skip
    assert estimate_of(odd, request) == 5.0
    with pytest.raises(SelectionError, match=r"required a text, found int"):
        estimate_source_of(odd, request)
