"""Roofline bounds and kept measurements: by the formulas, never without a measured rate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hal.device import Confidence, DeviceSpec, Evidence
from hal.measurements import (
    fingerprint,
    measurements_folder,
    save_measurements,
    with_measurements,
)
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.roofline import bound_of, measured_elsewhere, step_bound_us, unverified_rates

BARE = DeviceSpec(
    device_id="cpu:0", vendor="v", backend="cpu", name="n", arch="a", torch_device="cpu"
)
MEASURED = dataclasses.replace(
    BARE,
    memory_bandwidth=10e9,
    peak_flops={"float32": 100e9, "int8": 400e9},
    evidence={
        "memory_bandwidth": Evidence(
            source="test", found="10 GB/s", confidence=Confidence.MEASURED
        ),
        "num_cores": Evidence(source="/proc", found="2"),
    },
)


def _gemm(name: str) -> GemmRequest:
    return GemmRequest(n=1000, k=500, dtype="float32", weight_format=FORMATS[name])


def test_one_row_is_bound_by_the_weight_and_many_by_the_products() -> None:
    one, many = bound_of(_gemm("float32"), 1, MEASURED), bound_of(_gemm("float32"), 512, MEASURED)
    assert one is not None
    assert many is not None
    assert one.by == "memory"
    assert one.us == pytest.approx((1000 * 500 + 500 + 1000) * 4 / 10e9 * 1e6)
    assert many.by == "compute"
    assert many.us == pytest.approx(2 * 512 * 1000 * 500 / 100e9 * 1e6)


def test_int8_activations_are_bound_by_the_int8_rate() -> None:
    bound = bound_of(_gemm("int8_channel_a8"), 4096, MEASURED)
    assert bound is not None
    assert bound.us == pytest.approx(2 * 4096 * 1000 * 500 / 400e9 * 1e6)


def test_no_bound_without_any_rate() -> None:
    assert bound_of(_gemm("float32"), 1, BARE) is None
    assert step_bound_us([(_gemm("float32"), 3)], 1, BARE) is None
    other = dataclasses.replace(BARE, peak_flops={"int8": 4e11})
    assert bound_of(_gemm("float32"), 1, other) is None


@pytest.mark.parametrize("tokens", [1, 512])
def test_one_rate_alone_bounds_its_half_and_says_so(tokens: int) -> None:
    whole = bound_of(_gemm("float32"), tokens, MEASURED)
    bytes_only = bound_of(
        _gemm("float32"), tokens, dataclasses.replace(MEASURED, peak_flops={"int8": 4e11})
    )
    flops_only = bound_of(
        _gemm("float32"), tokens, dataclasses.replace(MEASURED, memory_bandwidth=None)
    )
    assert whole is not None
    assert bytes_only is not None
    assert flops_only is not None
    assert (bytes_only.by, flops_only.by) == ("memory only", "compute only")
    assert max(bytes_only.us, flops_only.us) == pytest.approx(whole.us)
    assert bytes_only.is_partial
    assert flops_only.is_partial
    assert not whole.is_partial


def test_what_has_no_arithmetic_is_whole_without_a_rate() -> None:
    gather = EmbeddingRequest(vocab_size=100, hidden_size=64, dtype="float32")
    bound = bound_of(gather, 3, dataclasses.replace(MEASURED, peak_flops={}))
    assert bound is not None
    assert bound.by == "memory"


def test_rates_that_others_measured_are_named() -> None:
    claim = Evidence(source="a bench", found="1", confidence=Confidence.DATABASE)
    device = dataclasses.replace(
        MEASURED,
        evidence={"peak_flops.float32": claim},
        attributes={"rates_measured_elsewhere": "peak_flops.float32 peak_flops.int8"},
    )
    assert measured_elsewhere([_gemm("float32")], device) == ["peak rate of float32 (a bench)"]
    assert measured_elsewhere([_gemm("float32")], MEASURED) == []


def test_rates_that_nobody_states_are_no_unverified_figures() -> None:
    claim = Evidence(source="a leaflet", found="1", confidence=Confidence.UNVERIFIED)
    claims = {"memory_bandwidth": claim, "peak_flops.float32": claim}
    known = dataclasses.replace(MEASURED, evidence=claims)
    requests = [_gemm("float32")]
    assert unverified_rates(requests, known) == [
        "memory bandwidth (a leaflet)",
        "peak rate of float32 (a leaflet)",
    ]
    slow = dataclasses.replace(known, peak_flops={})
    assert unverified_rates(requests, slow) == ["memory bandwidth (a leaflet)"]
    assert unverified_rates(requests, dataclasses.replace(known, memory_bandwidth=None)) == [
        "peak rate of float32 (a leaflet)"
    ]


def test_a_step_is_the_sum_of_its_calls() -> None:
    norm = RmsNormRequest(hidden_size=64, dtype="float32")
    parts = [bound_of(r, 2, MEASURED) for r in (norm, _gemm("float32"))]
    total = step_bound_us([(norm, 2), (_gemm("float32"), 3)], 2, MEASURED)
    assert total == pytest.approx(sum(p.us * n for p, n in zip(parts, (2, 3), strict=True) if p))


def test_measurements_come_back_for_the_same_device_only(tmp_path: Path) -> None:
    save_measurements(MEASURED, tmp_path)
    again = with_measurements(BARE, tmp_path)
    assert again.memory_bandwidth == 10e9
    assert again.peak_flops == {"float32": 100e9, "int8": 400e9}
    assert again.evidence["memory_bandwidth"].confidence is Confidence.MEASURED
    assert "num_cores" not in again.evidence  # only what was measured is kept
    for change in ({"num_cores": 9}, {"features": frozenset({"avx2"})}, {"name": "other"}):
        other = dataclasses.replace(BARE, **change)  # type: ignore[arg-type]
        assert fingerprint(other) != fingerprint(BARE)
        assert with_measurements(other, tmp_path).memory_bandwidth is None


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"schema": "other"}',
        '{"memory_bandwidth": -1}',
        '{"memory_bandwidth": true}',
        '{"peak_flops": {"float32": "fast"}}',
        '{"peak_flops": {"float32": NaN}}',
        '{"evidence": {"memory_bandwidth": 3}}',
    ],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: str) -> None:
    file = save_measurements(MEASURED, tmp_path)
    try:
        change = json.loads(damage)
    except ValueError:
        change = None
    if isinstance(change, dict):
        damage = json.dumps(json.loads(file.read_text()) | change)
    file.write_text(damage)
    assert with_measurements(BARE, tmp_path) == BARE


def test_the_folder_follows_the_environment() -> None:
    assert measurements_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/halstack/measurements")
