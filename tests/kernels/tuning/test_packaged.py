"""Configurations in the package: valid data of known devices, and plans show them, stale or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from absent_plans import plan, profile, profiles
from hal.candidates import KernelUse
from hal.kernel_uses import planned_uses
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.targets import find_target
from hal_kernels.tuning import store
from hal_kernels.tuning.configuration_files import ConfigurationFile
from hal_kernels.tuning.shapes import parse_shape
from hal_kernels.tuning.store import PACKAGED, is_current, load_configurations, tuned_rows
from hal_kernels.tuning.tunable_kernels import TUNABLE
from packaged_configurations import GROUPS, LARGE, SMALL, a_line_an_entry

FILES = sorted(PACKAGED.glob("*/*.json"))
DEVICES = {path.parent.name for path in FILES}
_ORDER = ("native", "spilled", "emulated", "scalar", "error")


def document(path: Path) -> ConfigurationFile:
    found = load_configurations(path)
    assert found is not None
    return found


def test_devices_are_those_of_the_groups() -> None:
    assert DEVICES == set(GROUPS) <= set(profiles())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_is_of_a_known_device_and_of_classes_that_a_call_can_have(path: Path) -> None:
    found = document(path)
    spec, target = profiles()[found.device], find_target(found.arch)
    assert spec.arch == found.arch
    assert path.read_text(encoding="utf-8") == a_line_an_entry(found), "as the script writes it"
    tunable = TUNABLE[found.kernel]
    assert [entry.shape for entry in found.entries] == sorted(e.shape for e in found.entries)
    for entry in found.entries:
        shape = parse_shape(
            entry.shape,
            size_names=tunable.size_names,
            forms=tunable.forms,
            dtypes=tunable.dtypes(target),
        )
        assert str(shape) == entry.shape
        units = int(spec.attributes.get("compute_units", 0)) or None
        assert not tunable.why_never(target, shape, units), "a class that no launch is of"
        assert (entry.basis, entry.is_complete) == ("modelled", True)
        best = entry.best()
        assert best is not None
        assert best.us is not None
        assert 1 <= len(entry.trials) <= 2, "the default and the best"
        assert _ORDER.index(best.tier) <= _ORDER.index(entry.trials[0].tier)
        if not is_current(entry, found.kernel):
            continue
        default = tunable.default_on(target, shape, spec)
        assert entry.trials[0].configuration == default.configuration
        assert best.configuration in tunable.configurations(target, shape, spec)
        variants = find_kernel(found.kernel).variants(target)
        assert tunable.variant(variants, target, shape, best.configuration)


def uses_of(device: str, model: str) -> dict[tuple[str, str], KernelUse]:
    """Of the kernels that can be tuned, by kernel and class."""
    tp = GROUPS[device] if model in LARGE else 1
    found = plan(model, profile(device), tp)
    return {(u.kernel, u.shape): u for op in found.ops for u in planned_uses(op) if u.shape}


def check_uses(device: str, model: str, *, least: float) -> None:
    """A class that is kept is a row with its basis, and one that is not has its loss. least: share
    of the classes that are kept, whether or not they hold."""
    uses = uses_of(device, model)
    covered = 0
    for (kernel, shape), use in uses.items():
        entry = document(PACKAGED / device / f"{kernel}.json").find(shape, "modelled") if (
            PACKAGED / device / f"{kernel}.json"
        ).exists() else None  # fmt: skip
        if entry is None:
            assert use.basis == "default"
            assert use.loss is not None or use.note
            continue
        covered += 1
        if is_current(entry, kernel):
            assert use.basis == "modelled"
            assert f"modelled {entry.made}" in use.note
            assert use.loss is not None
            assert use.loss <= 0.1
        else:
            assert use.basis == "default"
            assert f"kept: modelled {entry.made} for another" in use.note
    assert covered >= least * len(uses), f"{covered} of {len(uses)} classes are kept"


@pytest.mark.parametrize("device", ["rtx-pro-6000-blackwell-server", "mi300x"])
def test_a_plan_shows_what_is_kept(device: str) -> None:
    check_uses(device, "deepseek-v3.2", least=0.75)


@pytest.mark.long
@pytest.mark.parametrize("model", [*LARGE, *SMALL], ids=lambda name: Path(name).name)
@pytest.mark.parametrize("device", sorted(DEVICES))
def test_every_plan_shows_what_is_kept(device: str, model: str) -> None:
    check_uses(device, model, least=0.0)


def test_a_stale_one_is_seen_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = "rtx-pro-6000-blackwell-server", "deepseek-v4.1-flash"
    kept = {key for key, use in uses_of(device, model).items() if use.basis == "modelled"}
    assert kept
    assert all(launches_what_is_kept(device, *key) for key in kept)
    monkeypatch.setattr(store, "code_hash", lambda kernel: "0" * 16)
    after: dict[Any, KernelUse] = uses_of(device, model)
    for key in kept:
        assert after[key].basis == "default"
        assert "for another source and not used" in after[key].note
        assert not launches_what_is_kept(device, *key)


def launches_what_is_kept(device: str, kernel: str, text: str) -> bool:
    """Whether a launcher that is bound for a class takes a configuration that is kept for it, and
    not its own default."""
    spec, tunable = profile(device), TUNABLE[kernel]
    target = find_target(spec.arch)
    shape = parse_shape(
        text,
        size_names=tunable.size_names,
        forms=tunable.forms,
        dtypes=tunable.dtypes(target),
    )
    default = tunable.default_on(target, shape, spec).configuration
    found = tuned_rows((kernel, shape), spec)
    chosen = found.choose(shape.rows, default)
    entry = document(PACKAGED / device / f"{kernel}.json").find(text, "modelled")
    best = entry.best() if entry else None
    assert best is not None
    assert chosen == (best.configuration if found.covers(shape.rows) else default)
    return found.covers(shape.rows)
