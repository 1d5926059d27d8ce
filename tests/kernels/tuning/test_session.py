"""Tuning: what is kept, what an interruption loses, what invalidates, what is measured."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.device import DeviceSpec
from hal.errors import KernelTuningError, SettingsError
from hal_kernels.tuning import session as session_module
from hal_kernels.tuning.configuration_files import MODELLED_GAIN, ShapeEntry, Trial
from hal_kernels.tuning.estimating import estimate, least_us, modelled_us
from hal_kernels.tuning.session import TuningSession, TuningTask
from hal_kernels.tuning.store import find_configuration, load_configurations, user_store
from hal_kernels.tuning.tunable import configuration_name

Tasks = Callable[..., TuningTask]


def few(task: TuningTask) -> TuningTask:
    """With two configurations besides the default: each runs in the interpreter."""
    space = task.tunable.space
    tunable = dataclasses.replace(task.tunable, space=lambda *arguments: space(*arguments)[:2])
    return dataclasses.replace(task, tunable=tunable)


def silent(task: TuningTask, entry: ShapeEntry, total: int) -> None:
    return None


def test_launches_take_what_the_model_ranks_best(
    task: Tasks, compiler: Any, device: DeviceSpec
) -> None:
    one = task()
    session = TuningSession(user_store(), compile=compiler())
    (entry,) = session.run([one], silent)
    assert entry.is_complete
    assert entry.trials[0].configuration == one.configurations[0]
    best = entry.best()
    assert best is not None
    kept = find_configuration(one.tunable.kernel, device, str(one.shape))
    assert kept is not None
    assert (kept.basis, kept.trial) == ("modelled", best)
    assert (
        find_configuration(one.tunable.kernel, device, str(task(shape="n=64,k=128,rows=40").shape))
        is None
    )


def number(us: float | str) -> float:
    assert not isinstance(us, str)
    return us


@pytest.mark.parametrize("kernel", ["gemm.dense", "gemm.fp8_block", "gemm.mxfp8"])
@pytest.mark.parametrize("rows", [1, 60, 500])
def test_what_is_not_compiled_could_not_have_won(
    kernel: str, rows: int, task: Tasks, compiler: Any
) -> None:
    """Against ranking every configuration, over sizes of any kind."""
    sizes = random.choices([64, 512, 2112, 7168, 16160], k=2)
    one = task(kernel, f"n={sizes[0]},k={-(-sizes[1] // 128) * 128},rows={rows}")
    seen = compiler()
    (entry,) = TuningSession(user_store(), compile=seen).run([one], silent)
    every = compiler()
    trials = [every(kernel, one.target, one.shape, c) for c in one.configurations]
    ranked = {}
    for trial in trials:
        found = estimate(one.tunable, one.shape, trial, one.device)
        if not isinstance(found, str):
            us = modelled_us(found, trial.configuration)
            assert us >= number(
                least_us(one.tunable, one.shape, trial.configuration, one.device)
            ) * (1 - 1e-9), "no machine code makes it faster than that"
            ranked[configuration_name(trial.configuration), str(trial.configuration)] = us
    best, default = entry.best(), entry.trials[0]
    assert best is not None
    assert best.us is not None
    if best is default:
        assert min(ranked.values()) >= best.us * (1.0 - MODELLED_GAIN) - 1e-3
    else:
        assert best.us == pytest.approx(min(ranked.values()), abs=1e-3)
        assert default.us is None or best.us <= default.us * (1.0 - MODELLED_GAIN)
    assert entry.loss() <= MODELLED_GAIN
    assert len(seen.asked) <= len(one.configurations)


def test_most_configurations_are_not_compiled(task: Tasks, compiler: Any) -> None:
    one, seen = task("gemm.fp8_block", "n=2112,k=7168,rows=16"), compiler()
    TuningSession(user_store(), compile=seen).run([one], silent)
    assert 1 < len(seen.asked) < len(one.configurations) / 2


def test_a_default_stays_where_a_model_tells_nothing_apart() -> None:
    def entry(basis: Any, us: float, tier: Any = "native") -> ShapeEntry:
        launch = {"num_warps": 4, "num_stages": 2}
        trials = [
            Trial(configuration={"BLOCK_N": 64, **launch}, tier=tier, us=100.0),
            Trial(configuration={"BLOCK_N": 128, **launch}, tier="native", us=us),
        ]
        return ShapeEntry(
            shape="s", basis=basis, code="0" * 16, triton="1", made="2026-01-01", trials=trials
        )

    def taken(found: ShapeEntry) -> int:
        best = found.best()
        assert best is not None
        return found.trials.index(best)

    near, far = entry("modelled", 95.0), entry("modelled", 85.0)
    assert (taken(near), near.us_to_beat(), near.loss()) == (0, 90.0, pytest.approx(0.05))
    assert (taken(far), far.us_to_beat(), far.loss()) == (1, 85.0, 0.0)
    assert taken(entry("measured", 95.0)) == 1
    assert taken(entry("modelled", 95.0, tier="spilled")) == 1
    assert entry("modelled", 105.0, tier="spilled").us_to_beat() == 105.0
    assert entry("measured", 105.0).us_to_beat() == 100.0


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interruption_loses_one_trial_and_the_same_command_goes_on(
    at: int, task: Tasks, spilling: Any, device: DeviceSpec, tmp_path: Path
) -> None:
    one = task()
    whole = spilling()
    TuningSession(tmp_path / "whole", compile=whole).run([one], silent)
    with pytest.raises(KeyboardInterrupt):
        TuningSession(user_store(), compile=spilling(interrupted_at=at)).run([one], silent)
    path = TuningSession(user_store()).path_of(one)
    found = load_configurations(path)
    assert sum(len(entry.trials) for entry in found.entries) == at if found else at == 0
    assert find_configuration(one.tunable.kernel, device, str(one.shape)) is None  # incomplete
    again = spilling()
    (entry,) = TuningSession(user_store(), compile=again).run([one], silent)
    assert again.asked == whole.asked[at:]
    assert [trial.configuration for trial in entry.trials] == whole.asked
    third = spilling()
    TuningSession(user_store(), compile=third).run([one], silent)
    assert third.asked == []


def test_classes_of_one_form_share_their_machine_code(task: Tasks, compiler: Any) -> None:
    """Sizes are arguments of a kernel: a second class of them compiles nothing anew."""
    first, second = task(shape="n=64,k=128,rows=4"), task(shape="n=4096,k=512,rows=4")
    seen = compiler()
    entries = TuningSession(user_store(), compile=seen).run([first, second], silent)
    keys = [str(configuration) for configuration in seen.asked]
    assert len(set(keys)) == len(keys)
    assert [e.shape for e in entries] == [str(first.shape), str(second.shape)]
    assert entries[0].trials[0].us != entries[1].trials[0].us
    assert entries[0].trials[0].registers == entries[1].trials[0].registers


def test_another_source_or_compiler_is_tried_anew(
    task: Tasks, compiler: Any, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, first = task(), compiler()
    TuningSession(user_store(), compile=first).run([one], silent)
    for name, value in (("code_hash", lambda kernel: "0" * 16), ("triton_version", lambda: "0.0")):
        with monkeypatch.context() as patch:
            patch.setattr(f"hal_kernels.tuning.store.{name}", value)
            patch.setattr(session_module, name, value)
            assert find_configuration(one.tunable.kernel, device, str(one.shape)) is None
            again = compiler()
            session = TuningSession(user_store(), compile=again)
            session.run([one], silent)
            assert again.asked == first.asked
            assert session.dropped == {one.tunable.kernel: len(first.asked)}
        TuningSession(user_store(), compile=compiler()).run([one], silent)


def test_a_measurement_runs_the_very_launcher_in_each_configuration(
    task: Tasks, compiler: Any, device: DeviceSpec
) -> None:
    """In the interpreter, by a timer that runs each call and then tells times of its own."""
    one = few(task(basis="measured"))
    results: list[torch.Tensor] = []

    def timer(call: Callable[[], Any]) -> float:
        results.append(call())
        return 100.0 - len(results)

    session = TuningSession(user_store(), timer=timer, compile=compiler())
    (entry,) = session.run([one], silent)
    assert len(results) == len(one.configurations) == len(entry.trials)
    assert not [trial.error for trial in entry.trials if trial.error]
    best = entry.best()
    assert best is not None
    assert best.configuration == one.configurations[-1]  # the last was the fastest
    for other in results[1:]:  # one product, whatever its tiles
        torch.testing.assert_close(other, results[0], rtol=2e-2, atol=2e-2)
    kept = find_configuration(one.tunable.kernel, device, str(one.shape))
    assert kept is not None
    assert kept.basis == "measured"


def test_what_is_measured_wins_over_what_is_modelled(
    task: Tasks, compiler: Any, device: DeviceSpec
) -> None:
    modelled, measured = few(task()), few(task(basis="measured"))
    session = TuningSession(user_store(), timer=lambda call: 7.0, compile=compiler())
    with pytest.raises(KernelTuningError, match="another kernel"):
        session.run([measured], silent)  # a timer that calls nothing measures nothing

    def timer(call: Callable[[], Any]) -> float:
        call()
        return 7.0

    session.timer = timer
    session.run([modelled, measured], silent)
    kept = find_configuration(measured.tunable.kernel, device, str(measured.shape))
    assert kept is not None
    assert (kept.basis, kept.trial.us) == ("measured", 7.0)


def test_a_launch_that_is_refused_is_a_trial_with_its_reason(task: Tasks, compiler: Any) -> None:
    one = few(task(basis="measured"))

    def timer(call: Callable[[], Any]) -> float:
        call()
        raise RuntimeError("out of resource: shared memory\nRequired: 1")

    (entry,) = TuningSession(user_store(), timer=timer, compile=compiler()).run([one], silent)
    assert entry.best() is None
    assert {trial.error for trial in entry.trials} == {
        "RuntimeError: out of resource: shared memory"
    }


def test_a_tier_counts_before_a_time(task: Tasks, compiler: Any) -> None:
    one = task("gemm.fp8_block", "n=2112,k=7168,rows=16")

    class Spilling(compiler):  # type: ignore[misc]
        def __call__(self, *arguments: Any) -> Any:
            trial = super().__call__(*arguments)
            if len(self.asked) > 1:
                return trial.model_copy(update={"tier": "spilled", "shared_bytes": 0})
            return trial

    (entry,) = TuningSession(user_store(), compile=Spilling()).run([one], silent)
    assert len(entry.trials) > 1
    best = entry.best()
    assert best is not None
    assert best.tier == "native"
    assert best.us is not None
    assert any((trial.us or 1e9) < best.us for trial in entry.trials)


def test_a_file_that_is_not_right_is_named_and_kept(
    task: Tasks, compiler: Any, device: DeviceSpec
) -> None:
    one = task()
    session = TuningSession(user_store(), compile=compiler())
    session.run([one], silent)
    path = session.path_of(one)
    sound = json.loads(path.read_text())
    trial = sound["entries"][0]["trials"][0]
    damages: list[tuple[Any, str]] = [
        ("{", "JSONDecodeError"),
        (sound | {"schema": "other/1"}, "schema"),
        (sound | {"kernel": "gemm.dense"}, "named after"),
        (_with_trial(sound, trial | {"us": -1.0}), r"entries\.0\.trials\.0\.us"),
        (_with_trial(sound, trial | {"us": "fast"}), r"trials\.0\.us"),
        (_with_trial(sound, trial | {"configuration": {"BLOCK_M": 16}}), "num_warps"),
        (_with_trial(sound, trial | {"speed": 1}), r"trials\.0\.speed"),
        (sound | {"entries": sound["entries"] * 2}, "each shape class once"),
    ]
    for damage, told in damages:
        text = damage if isinstance(damage, str) else json.dumps(damage)
        path.write_text(text)
        with pytest.raises(SettingsError, match=told) as raised:
            TuningSession(user_store(), compile=compiler()).run([one], silent)
        assert str(path) in str(raised.value)
        with pytest.raises(SettingsError, match=told):
            find_configuration(one.tunable.kernel, device, str(one.shape))
        assert path.read_text() == text


def _with_trial(document: dict[str, Any], trial: dict[str, Any]) -> dict[str, Any]:
    entry = document["entries"][0]
    return document | {"entries": [entry | {"trials": [trial, *entry["trials"][1:]]}]}


def test_a_place_that_cannot_be_written_is_said_before_any_work(
    task: Tasks, compiler: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    seen = compiler()
    session = TuningSession(tmp_path / "file" / "below", compile=seen)
    with pytest.raises(SettingsError, match="can be written"):
        session.run([task()], silent)
    assert seen.asked == []


def test_a_device_of_another_architecture_has_other_configurations(
    task: Tasks, compiler: Any, device: DeviceSpec
) -> None:
    one = task()
    TuningSession(user_store(), compile=compiler()).run([one], silent)
    other = dataclasses.replace(device, arch="sm_120")
    assert find_configuration(one.tunable.kernel, other, str(one.shape)) is None
    named = dataclasses.replace(device, attributes={**device.attributes, "profile": "other-card"})
    assert find_configuration(one.tunable.kernel, named, str(one.shape)) is None
