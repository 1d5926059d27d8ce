"""What no candidate may do, whatever the device and whatever is installed: rules over the sweep."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.formats import unit_of

HERE = Path(__file__).resolve().parent


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
                # Sums through the memory of peers are off where it is not known to work.
                if op in ("collective", "all_reduce_norm") or not last.startswith(own):
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
