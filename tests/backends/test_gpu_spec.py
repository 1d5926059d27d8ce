"""A device's specification from its profile, and the limits that candidates state with it."""

from __future__ import annotations

import dataclasses

import pytest

from hal.device import Confidence, DeviceSpec
from hal.device_group import group_link_of
from hal.reasons import Reason, ReasonKind
from hal_backends.gpu import limits
from hal_backends.gpu.spec import device_spec, peer_access
from hal_capability_db import DeviceProfile, Fact, load_database

DATABASE = load_database()


def spec_of(device: str, **changes: object) -> DeviceSpec:
    profile = dataclasses.replace(DATABASE.device(device), **changes)  # type: ignore[arg-type]
    return device_spec(profile, device_id=device, backend="nvidia", software={"torch": "2.13.0"})


def dtypes(names: str, confidence: str) -> Fact[frozenset[str]]:
    return Fact(frozenset(names.split()), "", ("somebody",), confidence)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", sorted(DATABASE.devices))
def test_every_profile_becomes_a_specification(device: str) -> None:
    spec = spec_of(device)
    profile: DeviceProfile = DATABASE.device(device)
    assert spec.arch == profile.arch
    assert not spec.features & spec.unverified_features
    architecture = DATABASE.architectures[profile.arch]
    for fact in (profile.matrix_dtypes, architecture.matrix_dtypes):
        for dtype in fact.value or ():
            known = spec.features if fact.is_verified else spec.features | spec.unverified_features
            is_absent = dtype in (architecture.absent_matrix_dtypes.value or ())
            assert (f"matrix.{dtype}" in known) != is_absent
    for dtype, rate in profile.peak.items():
        if not rate.is_known:
            continue
        assert spec.peak_flops.get(dtype) == rate.value
        vouched = spec.evidence[f"peak_flops.{dtype}"].confidence is Confidence.DATABASE
        assert vouched == rate.is_verified
    assert spec.to_dict()["device_id"] == device  # survives JSON
    assert spec.attributes["p2p"] in ("none", "unknown", "claimed")


def test_a_rate_that_only_somebody_measured_is_taken_and_named() -> None:
    profile, spec = DATABASE.device("bi-v150"), spec_of("bi-v150")
    assert not profile.memory_bandwidth.is_known
    assert spec.memory_bandwidth == profile.measured["memory_bandwidth"].value
    assert spec.peak_flops["bfloat16"] == profile.measured["bfloat16"].value
    named = str(spec.attributes["rates_measured_elsewhere"]).split()
    assert {"memory_bandwidth", "peak_flops.bfloat16"} <= set(named)
    # Where the maker states a rate, what somebody measured is no rate of the product.
    stated = spec_of("metax-c550")
    assert stated.memory_bandwidth == DATABASE.device("metax-c550").memory_bandwidth.value
    assert "rates_measured_elsewhere" not in stated.attributes


@pytest.mark.parametrize(
    ("device", "world", "is_full", "is_known"),
    [
        ("mi300x", 8, True, True),
        ("h200-sxm", 8, True, True),
        ("h200-sxm", 16, False, True),
        ("ascend-910b3", 8, True, True),
        ("metax-c550", 8, False, False),
        ("metax-c550", 2, True, True),
        ("h100-nvl", 4, False, False),
    ],
)
def test_a_fabric_links_as_many_as_somebody_vouches_for(
    device: str, world: int, is_full: bool, is_known: bool
) -> None:
    link = group_link_of(spec_of(device), world)
    assert (link.is_full_mesh, link.is_mesh_known) == (is_full, is_known)
    assert link.kind not in ("pcie", "host")


def test_an_unverified_number_of_linked_devices_links_none() -> None:
    spec = spec_of("h100-nvl", fabric_group=Fact(4, "", ("a leaflet",), "unverified"))
    assert not group_link_of(spec, 4).is_full_mesh
    spec = spec_of("h100-nvl", fabric_group=Fact(4, "", ("a manual",), "vendor-doc"))
    assert group_link_of(spec, 4).is_full_mesh


def test_a_fabric_counts_one_way_and_a_card_may_be_several_devices() -> None:
    """The database has the fabric's rate both ways; a collective's bus bandwidth is one way."""
    both = DATABASE.device("h200-sxm").fabric_bytes_per_s
    spec = spec_of("h200-sxm")
    assert both.value is not None
    assert spec.attributes["fabric_bytes_per_s"] == both.value / 2
    assert "each way" in spec.evidence["attributes.fabric_bytes_per_s"].source
    assert "devices_per_card" not in spec.attributes
    assert spec_of("bi-v150").attributes["devices_per_card"] == 2


def test_an_unverified_claim_is_no_feature() -> None:
    spec = spec_of("h20", matrix_dtypes=dtypes("bfloat16 fp6_imagined", "unverified"))
    assert "matrix.fp6_imagined" in spec.unverified_features
    assert "matrix.fp6_imagined" not in spec.features
    # The architecture vouches for this one, so the product's doubtful list takes nothing away.
    assert "matrix.bfloat16" in spec.features
    evidence = spec.evidence["features.matrix.fp6_imagined"]
    assert evidence.confidence is Confidence.UNVERIFIED


def test_what_an_architecture_lacks_is_not_claimed_by_a_product() -> None:
    absent = DATABASE.architectures["sm_80"].absent_matrix_dtypes.value or frozenset()
    assert "fp8_e4m3fn" in absent
    spec = spec_of("a100-pcie-80g", matrix_dtypes=dtypes("bfloat16 fp8_e4m3fn", "vendor-doc"))
    assert not [f for f in spec.features | spec.unverified_features if "fp8" in f]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("enabled", "claimed"),
        ("enabled (measured ~53-54 GB/s one way)", "claimed"),
        ("disabled by stock driver", "none"),
        ("conditional", "unknown"),
        (None, "unknown"),
    ],
)
def test_peer_access_is_never_verified_by_a_document(text: str | None, want: str) -> None:
    assert peer_access(Fact(text, "", ("a document",), "measured")) == want


def test_the_group_link_has_its_measurements() -> None:
    spec = spec_of("l40s")
    rates = {
        name: float(rate)
        for name, rate in spec.attributes.items()
        if name.startswith("link_bytes_per_s.")
    }
    assert rates
    assert all(rate > 1e8 for rate in rates.values())


DEVICE = DeviceSpec(
    device_id="x",
    vendor="x",
    backend="nvidia",
    name="x",
    arch="sm_90",
    torch_device="cuda",
    features=frozenset({"wgmma"}),
    unverified_features=frozenset({"matrix.fp8_e4m3fn"}),
    software={"flash-attn": "2.8.3", "odd": "main-branch", "fork": "2.6.3+metax3.8"},
)


def kinds(reasons: list[Reason]) -> list[ReasonKind]:
    return [reason.kind for reason in reasons]


def test_features() -> None:
    assert limits.feature(DEVICE, "wgmma", "") == []
    assert kinds(limits.feature(DEVICE, "tcgen05")) == [ReasonKind.HARDWARE]
    (claimed,) = limits.feature(DEVICE, "matrix.fp8_e4m3fn")
    assert claimed.kind is ReasonKind.UNVERIFIED
    assert claimed.kind.is_attainable
    assert limits.any_feature(DEVICE, "tcgen05", "wgmma") == []
    assert kinds(limits.any_feature(DEVICE, "tma", "tcgen05")) == [ReasonKind.HARDWARE]
    mixed = limits.any_feature(DEVICE, "tma", "matrix.fp8_e4m3fn")
    assert kinds(mixed) == [ReasonKind.UNVERIFIED]


@pytest.mark.parametrize(
    ("name", "versions", "is_met"),
    [
        ("flash-attn", "", True),
        ("flash-attn", ">=2.7,<3", True),
        ("flash-attn", ">=2.9", False),
        ("flash-attn", ">=3", False),
        ("fork", ">=2.6.3", True),  # what follows the number is the build, not the version
        ("fork", ">=2.7", False),
        ("odd", ">=1", False),  # no version that can be compared
        ("odd", "", True),
        ("absent", "", False),
    ],
)
def test_software(name: str, versions: str, is_met: bool) -> None:
    reasons = limits.software(DEVICE, name, versions)
    assert (not reasons) == is_met
    for reason in reasons:
        assert reason.kind is ReasonKind.SOFTWARE
        assert "pip install" in reason.required
        assert reason.found == DEVICE.software.get(name, "not installed")


def test_a_vendors_build_is_told_by_its_tag() -> None:
    assert limits.build_tag(DEVICE, "fork", "+metax", install="the vendor's wheel") == []
    (other,) = limits.build_tag(DEVICE, "flash-attn", "+metax", install="the vendor's wheel")
    assert (other.kind, other.found) == (ReasonKind.SOFTWARE, "2.8.3")


def test_architectures_are_members_of_a_set() -> None:
    assert limits.architecture(DEVICE, ("sm_90", "sm_100"), why="wgmma") == []
    newer = dataclasses.replace(DEVICE, arch="sm_999")
    (reason,) = limits.architecture(newer, ("sm_90", "sm_100"), why="wgmma")
    assert (reason.kind, reason.found) == (ReasonKind.HARDWARE, "sm_999")
    assert reason.required == "sm_90 or sm_100 (wgmma)"
    (claimed,) = limits.claimed_architecture(newer, ("sm_90",), ("sm_999",), why="wgmma")
    assert claimed.kind is ReasonKind.UNVERIFIED


def test_a_kernel_that_is_not_written_is_missing() -> None:
    assert limits.missing_kernel("hal_kernels.gemm.cpu_dense") == []
    for module in ("hal_kernels.gemm.nonesuch", "hal_kernels.nonesuch.triton"):
        (reason,) = limits.missing_kernel(module)
        assert (reason.kind, reason.required) == (ReasonKind.MISSING, module)


@pytest.mark.parametrize(
    ("reasons", "kind"),
    [
        (limits.scope("dtype", "float32", ("bfloat16",)), ReasonKind.SCOPE),
        (limits.multiple("K", 100, 16), ReasonKind.ARGUMENT),
        (limits.at_most("K", 100, 16), ReasonKind.ARGUMENT),
        (limits.one_of("heads", 5, (1, 2)), ReasonKind.ARGUMENT),
        (limits.flag("sinks", True, required=False), ReasonKind.ARGUMENT),
    ],
)
def test_limits_of_arguments(reasons: list[Reason], kind: ReasonKind) -> None:
    assert kinds(reasons) == [kind]
    assert all(reason.required and reason.found for reason in reasons)
