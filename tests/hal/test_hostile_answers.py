"""What plug-ins answer about devices and candidates: figures that no device has, text that is none,
names that two have. Each is an error that names its plug-in, and hides nothing of the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hal.answers import SemanticNotes, estimate_of, reasons_of, work_of
from hal.candidates import KernelCandidate, Work
from hal.device import DetectedDevice, DevicePolicy, DeviceSpec
from hal.errors import DeviceClaimError, DeviceNotFoundError, SelectionError
from hal.host import RecordedHost
from hal.ops import TokenRange
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.plugins.manager import PluginLoader, load_backends
from hal.plugins.survey import survey_plugins
from hal.plugins.validation import (
    checked_candidates,
    checked_measured,
    checked_policy,
    checked_profiles,
    checked_spec,
)
from hal.reasons import Reason
from plugin_sites import Site

MakeCandidate = Callable[..., KernelCandidate]
SPEC = DeviceSpec(
    device_id="acme-one", vendor="Acme", backend="acme", name="One", arch="a1", torch_device="cpu"
)
REQUEST = GemmRequest(
    n=64, k=64, dtype="bfloat16", weight_format=FORMATS["bfloat16"], tokens=TokenRange(1, 8)
)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_cores": -1},
        {"memory_bytes": -1},
        {"memory_bytes": 10**400},
        {"memory_bandwidth": -1e12},
        {"memory_bandwidth": 5e-324},
        {"memory_bandwidth": math.nan},
        {"memory_bandwidth": math.inf},
        {"peak_flops": {"bfloat16": -1.0}},
        {"peak_flops": {"bfloat16": 1e300}},
        {"attributes": {"link_bytes_per_s.8": "fast"}},
        {"attributes": {"fabric_bytes_per_s": -5}},
        {"attributes": {"link_latency_us.8": "soon"}},
    ],
    ids=str,
)
def test_figures_that_no_device_has_are_refused(fields: Mapping[str, Any]) -> None:
    spec = dataclasses.replace(SPEC, **fields)
    device = DetectedDevice(device_id=spec.device_id, vendor="Acme", name="One", arch="a1")
    with pytest.raises((ValueError, TypeError), match="required"):
        checked_spec(spec, device, "acme")
    with pytest.raises((ValueError, TypeError), match="required"):
        checked_measured(spec)
    with pytest.raises((ValueError, TypeError), match="required"):
        checked_profiles([SPEC, dataclasses.replace(spec, device_id="other")], "acme")


def test_figures_of_devices_pass() -> None:
    spec = dataclasses.replace(
        SPEC,
        num_cores=132,
        memory_bytes=80 << 30,
        memory_bandwidth=3.35e12,
        peak_flops={"bfloat16": 989e12},
        attributes={"link_bytes_per_s.8": 4.5e11, "link_latency_us.8": 0, "fabric": "nvlink"},
    )
    assert checked_profiles([spec], "acme") == (spec,)


@pytest.mark.parametrize(
    "fields",
    [{"name": "acme.gemm.\x1b[2J"}, {"untuned": ["x"]}, {"summary": None}, {"weight_layout": 1}],
    ids=str,
)
def test_candidates_have_printable_names_and_texts(
    candidate: MakeCandidate, fields: Mapping[str, Any]
) -> None:
    bad = dataclasses.replace(candidate("acme.gemm.one"), **fields)
    with pytest.raises((ValueError, TypeError), match="required"):
        checked_candidates([bad], "gemm", "acme", "hal-acme")


@pytest.mark.parametrize("feature", ["egaer", "sparse_attention ", ""])
def test_a_policy_that_nothing_would_read_is_refused(feature: str) -> None:
    with pytest.raises(ValueError, match="sparse_attention, eager"):
        checked_policy(DevicePolicy(forced_features={feature: "because"}))
    fine = DevicePolicy(forced_features={"eager": "because"})
    assert checked_policy(fine) == fine


def _exits(*_: object) -> Any:
    raise SystemExit(0)


def _recurses(*arguments: object) -> Any:
    return _recurses(*arguments)


def test_an_answer_that_is_none_names_the_candidate(candidate: MakeCandidate) -> None:
    def work(**fields: Any) -> Any:
        values: dict[str, Any] = {"flops": 1.0, "bytes": 1.0, "unit": "x"}
        return lambda request, tokens: Work(**(values | fields))

    works = [
        *(work(flops=value) for value in (math.nan, math.inf, -1, 1e300, 10**400, "1", None, 1j)),
        work(unit=["bfloat16"]),
        lambda request, tokens: "much",
        _exits,
        _recurses,
    ]
    for answer in works:
        with pytest.raises(SelectionError, match=r"acme\.one"):
            work_of(candidate("acme.one", work=answer), REQUEST, 1)
    estimates: list[Any] = [math.nan, math.inf, -1, 1e300, "1", [], 1j]
    for estimate in estimates:
        asked = candidate("acme.one", estimate_us=lambda request, tokens, us=estimate: us)
        with pytest.raises(SelectionError, match=r"acme\.one"):
            estimate_of(asked, REQUEST)
    reason: Any = Reason(what="limit", required=["64"], found="32")  # type: ignore[arg-type]
    for reasons in (lambda request: [reason], lambda request: "no", lambda request: None, _exits):
        with pytest.raises(SelectionError, match=r"acme\.one"):
            reasons_of(candidate("acme.one", not_supported_reasons=reasons), REQUEST)
    for notes in (lambda request: ["fast"], lambda request: 1, _exits):
        with pytest.raises(SelectionError, match=r"acme\.one"):
            SemanticNotes(candidate("acme.one", semantic_notes=notes), REQUEST).get()


PROFILES = """
from hal.device import DetectedDevice, DevicePolicy, DeviceSpec
from hal.hookspecs import BackendInfo, hookimpl

@hookimpl
def hal_backend_info():
    return BackendInfo(
        name={name!r}, vendor="Acme", api_range=">=1", provides=frozenset({{"devices"}})
    )

@hookimpl
def hal_device_profiles():
    {body}
"""
OF = (
    'return [DeviceSpec(device_id=i, vendor="Acme", backend={name!r}, name=i, arch="a", '
    'torch_device="cpu") for i in {ids!r}]'
)


def test_a_name_that_two_know_and_plugins_that_fail_hide_no_other_profile(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    site = Site(tmp_path)
    bodies = {
        "one": OF.format(name="one", ids=["shared", "first"]),
        "two": OF.format(name="two", ids=["second", "shared"]),
        "liar": OF.format(name="another", ids=["third"]),
        "same": OF.format(name="one", ids=["fourth"]),
        "exits": "raise SystemExit(0)",
        "text": "return 'many'",
        "many": 'return [DeviceSpec(device_id=str(i), vendor="", backend="many", name="", '
        'arch="", torch_device="cpu") for i in range(100000)]',
        "escape": OF.format(name="escape", ids=["a\x1b[2Jb"]),
    }
    for name, body in bodies.items():
        entry = "one" if name == "same" else name
        site.add(entry, PROFILES.format(name=entry, body=body), distribution=f"acme-of-{name}")
    survey = survey_plugins(RecordedHost(), entries=site.entries())
    registry = load_backends(loader=PluginLoader(survey))
    assert list(registry.profiles) == ["first", "fourth", "second"]
    assert registry.profile("first").backend == "one"
    with pytest.raises(DeviceClaimError, match="shared") as raised:
        registry.profile("shared")
    assert "plugins.disable" in raised.value.remedy
    with pytest.raises(DeviceNotFoundError, match="third") as absent:
        registry.profile("third")
    assert "plug-ins failed, so that more may be known" in absent.value.found
    # Two plug-ins of one name: each answers for its own.
    for known, owner in (("first", "acme-of-one"), ("fourth", "acme-of-same")):
        assert registry.plugin_for(registry.profile(known)).entry.distribution == owner
    failed = {str(error.who) for error in registry.failures}
    assert all(any(name in who for who in failed) for name in ("liar", "exits", "text", "many"))
    assert all("\x1b" not in str(error) for error in registry.failures)
