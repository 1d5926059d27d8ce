"""Every candidate of every accelerator over every device of the database and real requests.

A predicate is wrong if it never holds, always holds, holds with less and not with more, or tells
kin apart; each finding is an error unless predicate_allowances.yaml says why it is right.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.formats import unit_of

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
ALLOWED: Mapping[str, Mapping[str, str]] = yaml.safe_load(
    (HERE / "predicate_allowances.yaml").read_text(encoding="utf-8")
)
# Letters of the matrix that a fix could turn into "serves".
WITHIN_REACH = "Snimu"
# Architectures so close that a difference needs a reason.
KIN = (("sm_100", "sm_103"), ("ascend-910b", "ascend-910c"))


@pytest.fixture(scope="module")
def matrix() -> Iterator[ModuleType]:
    import importlib

    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("support_matrix")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def requests(matrix: ModuleType) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = matrix.REQUESTS
    return found


@pytest.fixture(scope="module")
def answers(matrix: ModuleType) -> Sequence[tuple[DeviceSpec, str, str]]:
    """(device with all software, candidate, letters); policies apart, which are no predicates."""
    found = []
    for plain in matrix.devices():
        device = matrix.with_software(plain)
        for op in CATALOGUE:
            for candidate in matrix.candidates(device, op):
                letters = "".join(
                    matrix.letter(
                        candidate.not_supported_reasons(r),
                        is_disabled=False,
                        changes_meaning=bool(candidate.semantic_notes(r)),
                    )
                    for r in matrix.REQUESTS[op].values()
                )
                found.append((device, candidate.name, letters))
    return found


def judge(kind: str, found: Mapping[str, str]) -> None:
    """Each finding (candidate -> text) needs an allowance, and each allowance a finding."""
    allowed = ALLOWED[kind]
    unexplained = {
        name: text
        for name, text in found.items()
        if not any(fnmatchcase(name, glob) for glob in allowed)
    }
    idle = [g for g in allowed if not any(fnmatchcase(name, g) for name in found)]
    assert not unexplained, f"{kind}, without a stated reason: {unexplained}"
    assert not idle, f"{kind}: allowances that nothing needs: {idle}"


def test_every_op_and_format_is_in_the_grid(requests: Mapping[str, Mapping[str, Any]]) -> None:
    assert set(requests) == set(CATALOGUE)
    for op, named in requests.items():
        assert all(request.op == op for request in named.values())
        assert len(set(named.values())) == len(named), f"{op}: one request twice"


def test_no_predicate_never_holds(answers: Sequence[tuple[DeviceSpec, str, str]]) -> None:
    reachable: dict[str, bool] = {}
    for _, name, letters in answers:
        reachable[name] = reachable.get(name, False) or any(c in WITHIN_REACH for c in letters)
    judge("never", {name: "no device can take it" for name, is_ in reachable.items() if not is_})


def test_no_predicate_always_holds(answers: Sequence[tuple[DeviceSpec, str, str]]) -> None:
    always: dict[str, bool] = {}
    for _, name, letters in answers:
        always[name] = always.get(name, True) and set(letters) <= {"S", "n"}
    judge("always", {name: "takes everything" for name, is_ in always.items() if is_})


def test_siblings_differ_for_a_stated_reason_only(
    answers: Sequence[tuple[DeviceSpec, str, str]],
) -> None:
    by_arch: dict[tuple[str, str], dict[str, str]] = {}
    for device, name, letters in answers:
        by_arch.setdefault((device.arch, name), {})[device.device_id] = letters
    found = {
        name: f"{arch}: {verdicts}"
        for (arch, name), verdicts in by_arch.items()
        if len(set(verdicts.values())) > 1
    }
    for one, other in KIN:
        for (arch, name), verdicts in by_arch.items():
            if arch == one and _apart(name, verdicts) != _apart(name, by_arch[other, name]):
                found[name] = f"{one} {verdicts}, {other} {by_arch[other, name]}"
    judge("siblings", found)


def _apart(name: str, verdicts: Mapping[str, str]) -> set[str]:
    """For our kernels without the state of the evidence, which exists per architecture."""
    is_ours = name.split(".")[-1].startswith("triton")
    return {text.replace("S", "u") if is_ours else text for text in verdicts.values()}


def test_no_predicate_is_inverted(matrix: ModuleType) -> None:
    """What serves with nothing, no feature and no library, serves with everything too."""
    inverted = []
    for device in matrix.devices():
        full = matrix.with_software(device)
        bare = dataclasses.replace(
            full, features=frozenset(), unverified_features=frozenset(), software={}
        )
        for op in CATALOGUE:
            by_name = {c.name: c for c in matrix.candidates(full, op)}
            for poor in matrix.candidates(bare, op):
                rich = by_name[poor.name]
                inverted += [
                    (device.device_id, poor.name, name)
                    for name, request in matrix.REQUESTS[op].items()
                    if poor.serves(request) and not rich.serves(request)
                ]
    assert not inverted


def test_peer_access_never_takes_something_away(matrix: ModuleType) -> None:
    order = ("none", "claimed", "verified")
    for device in matrix.devices():
        for candidate in matrix.candidates(matrix.with_software(device), "collective"):
            for name, request in matrix.REQUESTS["collective"].items():
                serves = [
                    candidate.serves(dataclasses.replace(request, p2p=level)) for level in order
                ]
                assert serves == sorted(serves), (device.device_id, candidate.name, name)


def stated_architectures(reasons: Sequence[Reason]) -> set[str]:
    """The architectures that a rejection for another one names."""
    texts = [r.required.split("(")[0] for r in reasons if r.what == "arch"]
    return set(re.findall(r"[\w.-]+", " ".join(texts).replace(" or ", " ")))


def test_an_unknown_architecture_gets_only_what_features_decide(matrix: ModuleType) -> None:
    """No "at least": a chip that nobody has heard of, with every feature, is on no list."""
    found: dict[str, str] = {}
    for device in matrix.devices():
        newer = dataclasses.replace(matrix.with_software(device), arch="sm_999")
        for op in CATALOGUE:
            for candidate in matrix.candidates(newer, op):
                for name, request in matrix.REQUESTS[op].items():
                    if candidate.tier >= Tier.TUNED and candidate.serves(request):
                        found[candidate.name] = f"{device.device_id}: {name}"
    libraries = {
        name: text
        for name, text in found.items()
        if name.split(".")[-1].startswith(("flash", "deep", "sgl", "npu", "aiter"))
    }
    assert not libraries


def test_what_names_its_architectures_serves_no_other(matrix: ModuleType) -> None:
    """So sm_120 is never served by a kernel of sm_100, nor gfx950 by one of gfx942."""
    wrong = []
    for plain in matrix.devices():
        device = matrix.with_software(plain)
        stranger = dataclasses.replace(device, arch="none")
        for op in CATALOGUE:
            by_name = {c.name: c for c in matrix.candidates(stranger, op)}
            for candidate in matrix.candidates(device, op):
                for name, request in matrix.REQUESTS[op].items():
                    stated = stated_architectures(
                        by_name[candidate.name].not_supported_reasons(request)
                    )
                    if stated and candidate.serves(request) and device.arch not in stated:
                        wrong.append((device.arch, candidate.name, name, stated))
    assert not wrong


def test_consumer_blackwell_is_its_own_family(matrix: ModuleType) -> None:
    """Kernels of tcgen05 and of Hopper's wgmma are out of sm_120's reach, whatever is installed."""
    for device in matrix.devices():
        if device.arch != "sm_120":
            continue
        full = matrix.with_software(device)
        assert not {"tcgen05", "wgmma"} & full.features
        for op in CATALOGUE:
            for candidate in matrix.candidates(full, op):
                tied = [leaf.name for leaf in candidate.leaf if leaf.kind == "instruction"]
                if any("tcgen05" in name or "wgmma" in name for name in tied):
                    served = [r for r in matrix.REQUESTS[op].values() if candidate.serves(r)]
                    assert not served, candidate.name


def test_fp8_encodings_are_not_mixed_up(matrix: ModuleType) -> None:
    kinds = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn", "gfx1201": "fp8_e4m3fn"}
    for device in matrix.devices():
        kind = kinds.get(device.arch)
        if kind is None:
            continue
        assert {f for f in device.features if "e4m3" in f} == {f"matrix.{kind}"}
        for reason in _reasons(matrix, device, "gemm", "fp8_block128_a8"):
            assert not reason.what.startswith("matrix.fp8"), (device.device_id, reason)


def _reasons(matrix: ModuleType, device: DeviceSpec, op: str, name: str) -> list[Reason]:
    request = matrix.REQUESTS[op][name]
    return [
        reason
        for candidate in matrix.candidates(matrix.with_software(device), op)
        for reason in candidate.not_supported_reasons(request)
    ]


NO_FP8 = ("sm_80", "gfx90a", "gfx1100", "bmg-g21")


def test_no_native_fp8_without_the_instruction(matrix: ModuleType) -> None:
    """FP8 is never native on sm_80, gfx90a, gfx1100 and Arc B60, in no state of its software."""
    seen = set()
    devices = list(matrix.devices())
    mi250 = next(d for d in devices if d.arch == "gfx942")
    without = frozenset(f for f in mi250.features if "fp8" not in f)
    devices.append(dataclasses.replace(mi250, arch="gfx90a", features=without))
    for device in devices:
        if device.arch not in NO_FP8:
            continue
        seen.add(device.arch)
        full = matrix.with_software(device)
        assert not [f for f in full.features | full.unverified_features if "fp8" in f]
        for op in ("gemm", "grouped_gemm"):
            for candidate in matrix.candidates(full, op):
                for name, request in matrix.REQUESTS[op].items():
                    if unit_of(request) != "fp8" or candidate.tier is not Tier.NATIVE:
                        continue
                    kinds = {r.kind for r in candidate.not_supported_reasons(request)}
                    is_out = kinds & {ReasonKind.HARDWARE, ReasonKind.SCOPE}
                    assert is_out, (device.device_id, candidate.name, name, kinds)
    assert seen == set(NO_FP8)


def test_widened_products_say_on_which_unit_they_compute(matrix: ModuleType) -> None:
    request = matrix.REQUESTS["gemm"]["fp8_block128_a8"]
    for device in matrix.devices():
        for candidate in matrix.candidates(device, "gemm"):
            work = candidate.work(request, 64)
            if "widened" in candidate.name or "weight_only" in candidate.name:
                assert work is not None, candidate.name
                assert work.unit in ("bfloat16", "float16")
            if "dequantize" in candidate.name:
                assert work is not None
                assert work.unit == "bfloat16"
                assert work.bytes > 4 * request.n * request.k


def test_no_candidate_compares_architectures() -> None:
    """No source of a candidate reads a capability number or orders architectures."""
    backends = HERE.parent.parent / "backends" / "hal_backends"
    apart = {"cpu", "detecting"}
    files = [path for path in backends.rglob("*.py") if not apart & set(path.parts)]
    assert len(files) > 60
    for path in files:
        text = path.read_text(encoding="utf-8")
        is_described = path.name in ("spec.py", "detection.py")
        assert "compute_capability" not in text or is_described, path
        assert not re.search(r"\barch\s*(<|>)=?", text), path


def test_disabled_globs_meet_only_what_they_name(matrix: ModuleType) -> None:
    """A policy's pattern disables mechanisms of other vendors, never the platform's own library."""
    own = ("npu_", "moe_", "swiglu", "silu", "add_rms", "fused_rms", "vendor_", "torch_", "triton")
    for device in matrix.devices():
        globs = matrix.disabled(device)
        assert all(reason for reason in globs.values())
        for op in CATALOGUE:
            for candidate in matrix.candidates(device, op):
                last = candidate.name.split(".")[-1]
                if op == "collective" or not last.startswith(own):
                    continue
                hit = [g for g in globs if fnmatchcase(candidate.name, g)]
                assert not hit, (candidate.name, hit)


def test_sparse_attention_is_forced_on_chinese_accelerators(matrix: ModuleType) -> None:
    import importlib

    forced = set()
    for device in matrix.devices():
        policy = importlib.import_module(f"hal_backends.{device.backend}.policy")
        if "sparse_attention" in policy.device_policy(device).forced_features:
            forced.add(device.backend)
    assert forced == set(matrix.BACKENDS) - {"nvidia", "amd", "intel_xpu", "gaudi", "thead"}
    # No product of T-Head is in the database; its policy is the same.
    thead = importlib.import_module("hal_backends.thead.policy")
    assert "sparse_attention" in thead.device_policy(matrix.devices()[0]).forced_features


def test_every_question_is_answered(matrix: ModuleType) -> None:
    """Strange arguments get reasons, never an exception: an op's requests with any two arguments
    off the beaten track, on a device of each backend and on one of which nothing is known."""
    import support

    by_backend = {device.backend: device for device in matrix.devices()}
    for backend, device in by_backend.items():
        unknown = dataclasses.replace(
            device, arch="", features=frozenset(), unverified_features=frozenset(), attributes={}
        )
        for each in (device, unknown):
            for op in CATALOGUE:
                requests_of_op = support.probes_of(op)[:: 7 if backend != "nvidia" else 3]
                for candidate in matrix.candidates(each, op):
                    for request in requests_of_op:
                        reasons = candidate.not_supported_reasons(request)
                        empty = [r for r in reasons if not (r.required and r.found and r.what)]
                        assert not empty, (candidate.name, request, empty)
                        if not reasons:
                            candidate.work(request, 8)
                            candidate.semantic_notes(request)
