"""The data that is shipped: it loads, it is found, and what nobody has checked gates nothing."""

from __future__ import annotations

import pytest

from hal_capability_db import CONFIDENCES, MATRIX_DTYPES, Database, DatabaseError, load_database
from hal_capability_db.facts import database_facts, entry_facts
from hal_capability_db.loader import draft_database

FAMILIES = {
    *("nvidia", "amd", "ascend", "cambricon", "mthreads", "metax", "iluvatar", "hygon"),
    *("kunlunxin", "biren", "enflame", "tecorigin", "intel-xpu", "intel-hpu", "thead-ppu"),
}
FP8 = {"fp8_e4m3fn", "fp8_e5m2"}
FNUZ = {"fp8_e4m3fnuz", "fp8_e5m2fnuz"}
MX = {"mxfp8", "mxfp6", "mxfp4"}
# Sources that nobody may rely on: memory, and a page that mixes guesses with facts.
GUESSES = {"unchecked", "mirrorfrog"}


@pytest.fixture(scope="module")
def database() -> Database:
    return load_database(())


def test_every_file_is_valid() -> None:
    draft = draft_database(())
    assert [problem.one_line() for problem in draft.problems] == []


def test_families_and_devices(database: Database) -> None:
    assert set(database.families) == FAMILIES
    assert len(database.devices) >= 48
    with_devices = {device.family for device in database.devices.values()}
    assert with_devices == FAMILIES - {"thead-ppu"}


def test_every_fact_has_a_confidence_and_known_sources(database: Database) -> None:
    cited = set()
    for name, fact in database_facts(database).items():
        assert fact.confidence in CONFIDENCES, name
        assert set(fact.source) <= database.sources.keys(), name
        cited |= set(fact.source)
    assert "unchecked" in cited


def test_what_rests_on_guesses_alone_is_unverified(database: Database) -> None:
    for name, fact in database_facts(database).items():
        if fact.source and set(fact.source) <= GUESSES:
            assert fact.confidence == "unverified", name
            assert not fact.is_verified


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "gfx908", "gfx90a", "gfx1100"])
def test_no_fp8_where_the_matrix_units_have_none(database: Database, arch: str) -> None:
    architecture = database.architecture(arch)
    assert architecture.matrix_dtypes.value is not None
    assert not architecture.matrix_dtypes.value & (FP8 | FNUZ | MX)
    assert architecture.absent_matrix_dtypes.value is not None
    assert architecture.absent_matrix_dtypes.value >= FP8 | FNUZ
    assert architecture.absent_matrix_dtypes.is_verified
    assert not architecture.fp8_kind.is_known


def test_arc_b60_has_no_fp8(database: Database) -> None:
    device = database.device("intel-arc-pro-b60")
    assert device.matrix_dtypes.value == {"float16", "bfloat16", "int8"}
    assert "fp8" not in device.peak
    assert "memory only" in device.notes


@pytest.mark.parametrize(
    ("arch", "kind", "has_mx", "has_nvfp4"),
    [
        ("sm_89", "fn", False, False),
        ("sm_90", "fn", False, False),
        ("sm_100", "fn", True, True),
        ("sm_103", "fn", True, True),
        ("sm_120", "fn", True, True),
        ("gfx942", "fnuz", False, False),
        ("gfx950", "fn", True, False),
        ("gfx1201", "fn", False, False),
        ("ascend-950", "fn", True, False),
    ],
)
def test_fp8_encodings_and_4_bit_formats(
    database: Database, arch: str, kind: str, has_mx: bool, has_nvfp4: bool
) -> None:
    architecture = database.architecture(arch)
    dtypes = architecture.matrix_dtypes
    assert dtypes.is_verified
    assert dtypes.value is not None
    assert architecture.fp8_kind.value == kind
    assert architecture.fp8_kind.is_verified
    assert bool(architecture.mx.value) is has_mx
    assert ("nvfp4" in dtypes.value) is has_nvfp4
    other = FNUZ if kind == "fn" else FP8
    assert not dtypes.value & other


@pytest.mark.parametrize(
    ("arch", "kib", "warp"),
    [
        ("sm_80", 163, 32),
        ("sm_86", 99, 32),
        ("sm_89", 99, 32),
        ("sm_90", 227, 32),
        ("sm_100", 227, 32),
        ("sm_103", 227, 32),
        ("sm_120", 99, 32),
        ("gfx942", 64, 64),
        ("gfx950", 160, 64),
        ("gfx1201", 64, 32),
        ("ivcore11", 128, 64),
    ],
)
def test_shared_memory_and_warps(database: Database, arch: str, kib: int, warp: int) -> None:
    architecture = database.architecture(arch)
    assert architecture.shared_memory_per_block_bytes.value == kib * 1024
    assert architecture.warp_size.value == warp


def test_sm_120_is_a_family_of_its_own(database: Database) -> None:
    datacentre, workstation = database.architecture("sm_100"), database.architecture("sm_120")
    hopper = database.architecture("sm_90")
    assert (hopper.wgmma.value, datacentre.wgmma.value, workstation.wgmma.value) == (
        True,
        False,
        False,
    )
    assert (hopper.tcgen05.value, datacentre.tcgen05.value, workstation.tcgen05.value) == (
        False,
        True,
        False,
    )
    assert workstation.tma.value is True
    assert workstation.multicast.value is False


def test_triton_targets_are_those_of_their_backends(database: Database) -> None:
    for architecture in database.architectures.values():
        target = architecture.triton_target.value
        family = database.families[architecture.family]
        if target is None:
            continue
        backend, _, warp = target.split(":")
        assert backend == family.triton.target
        known = architecture.warp_size.value
        assert known is None or str(known) == warp, architecture.id


def test_dtypes_are_the_vocabulary(database: Database) -> None:
    for device in database.devices.values():
        for fact in (device.matrix_dtypes, device.unverified_matrix_dtypes):
            assert (fact.value or set()) <= set(MATRIX_DTYPES)


def test_int8_of_b300_is_slow(database: Database) -> None:
    device = database.device("b300-sxm")
    int8, bfloat16 = device.peak["int8"].value, device.peak["bfloat16"].value
    assert int8 is not None
    assert bfloat16 is not None
    assert int8 < bfloat16 / 10


def test_a_card_of_two_devices_counts_per_device(database: Database) -> None:
    device = database.device("bi-v150")
    assert device.torch_devices_per_card == 2
    assert device.usable_memory_bytes.value == 32 << 30
    assert device.measured["bfloat16"].value == pytest.approx(98.4e12)
    assert "of a card of 2 devices" in device.measured["bfloat16"].note
    assert device.peak == {}


def test_lookup_by_id_suggests(database: Database) -> None:
    with pytest.raises(DatabaseError) as caught:
        database.device("rtx-pro-6000-blackwell-sever")
    assert "rtx-pro-6000-blackwell-server" in caught.value.remedy
    for lookup in (database.family, database.architecture):
        with pytest.raises(DatabaseError):
            lookup("nothing like it")


@pytest.mark.parametrize("spelling", [("0x10de", "0x2bb5"), ("10DE", "2BB5"), ("0x10DE", "2bb5")])
def test_lookup_by_pci(database: Database, spelling: tuple[str, str]) -> None:
    (profile,) = database.by_pci(*spelling)
    assert profile.id == "rtx-pro-6000-blackwell-server"
    assert profile == database.device(profile.id)


def test_pci_ids_of_other_vendors_do_not_match(database: Database) -> None:
    assert database.by_pci("0x1002", "0x2bb5") == ()
    assert database.by_pci("0x10de", "0xffff") == ()


def test_every_pci_id_finds_its_device(database: Database) -> None:
    for device in database.devices.values():
        vendor = database.families[device.family].pci_vendor
        for pci in device.pci_devices:
            assert vendor is not None
            found = {profile.id for profile in database.by_pci(vendor, pci.id)}
            assert device.id in found


def test_a_variant_keeps_the_architecture_and_doubts_the_figures(database: Database) -> None:
    (variant,) = database.by_pci("0x10de", "0x2685")
    assert variant.id == "rtx-4090"
    assert "4090 D" in variant.name
    assert variant.matrix_dtypes.is_verified
    assert variant.peak
    assert not any(fact.is_verified for fact in variant.peak.values())
    assert not variant.memory_bytes.is_verified
    assert variant.memory_bytes.value == database.device("rtx-4090").memory_bytes.value
    (virtual,) = database.by_pci("0x1002", "0x74b5")
    assert virtual.peak == database.device("mi300x").peak


def test_lookup_by_name_takes_whole_names_only(database: Database) -> None:
    (profile,) = database.by_name("nvidia", "  nvidia  H200 nvl ")
    assert profile.id == "h200-nvl"
    (module,) = database.by_name("nvidia", "NVIDIA H200")
    assert module.id == "h200-sxm"
    assert database.by_name("nvidia", "NVIDIA H2") == ()
    assert database.by_name("nvidia", "NVIDIA L40S-48Q") == ()
    assert database.by_name("amd", "NVIDIA H200") == ()


def test_names_are_of_one_device(database: Database) -> None:
    for device in database.devices.values():
        for name in device.names:
            assert database.by_name(device.family, name) == (device,)


def test_masqueraders_are_named(database: Database) -> None:
    looks = {name: family.detection.masquerades_as for name, family in database.families.items()}
    assert {name for name, look in looks.items() if look == "cuda"} == {
        "metax",
        "iluvatar",
        "kunlunxin",
        "thead-ppu",
    }
    assert looks["hygon"] == "hip"
    for name, look in looks.items():
        assert not look or database.families[name].detection.tells, name


def test_links_are_measured_points(database: Database) -> None:
    busbw = {
        link.world_size: link.value.value
        for link in database.links
        if link.device == "l40s" and link.metric == "all_reduce_busbw"
    }
    assert busbw == {2: 20.1e9, 4: 5.2e9, 8: 1.45e9}
    latency = [
        link.value.value
        for link in database.links
        if link.metric == "all_reduce_latency"
        and link.implementation.startswith("NCCL")
        and (link.device, link.world_size, link.message_bytes)
        == ("rtx-pro-6000-blackwell-server", 8, 524288)
    ]
    assert latency == [pytest.approx(156.1e-6)]


def test_entry_facts_say_nothing_of_what_is_not_there(database: Database) -> None:
    for device in database.devices.values():
        for name, fact in entry_facts(device).items():
            assert fact.is_known, (device.id, name)
