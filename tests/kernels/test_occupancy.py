"""Occupancy against published figures: NVIDIA's guide and calculator, and LLVM's for AMD."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import SettingsError
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.occupancy import (
    ArchitectureLimits,
    Occupancy,
    occupancy_limits,
    occupancy_of,
    occupancy_of_evidence,
)
from hal_kernels.aot.targets import TARGETS
from hal_kernels.located_documents import read_document


def of(arch: str, registers: int, shared: int, warps: int) -> Occupancy:
    limits = occupancy_limits()[arch]
    return occupancy_of(limits, registers=registers, shared_bytes=shared, num_warps=warps)


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "blocks", "by"),
    [
        # CUDA programming guide, section on multiprocessor level: 512 threads of 64 registers fit
        # twice into 64 K registers, of 65 once.
        ("sm_80", 64, 0, 16, 2, "registers"),
        ("sm_80", 65, 0, 16, 1, "registers"),
        ("sm_90", 64, 0, 16, 2, "registers"),
        # NVIDIA's occupancy calculator: 256 threads of 32 registers fill 2048 threads, not 1536.
        ("sm_80", 32, 0, 8, 8, "warps"),
        ("sm_89", 32, 0, 8, 6, "warps"),
        ("sm_120", 32, 0, 8, 6, "warps"),
        # Blocks of one warp: at most 32 of them are resident, 24 on 8.9 and 12.0.
        ("sm_90", 16, 0, 1, 32, "blocks"),
        ("sm_89", 16, 0, 1, 24, "blocks"),
        # 99 KiB is the most that a block of 12.0 can have, and 1 KiB is the system's: one block.
        ("sm_120", 32, 99 << 10, 4, 1, "shared memory"),
        ("sm_90", 32, 113 << 10, 4, 2, "shared memory"),
        ("sm_90", 32, 114 << 10, 4, 1, "shared memory"),
        # LLVM, documentation of llvm-calc-occupancy: gfx90a, work-groups of 512, 50 VGPRs: 8 waves
        # of a SIMD, the most there are.
        ("gfx90a", 50, 0, 8, 4, "warps"),
    ],
)
def test_published_figures(
    arch: str, registers: int, shared: int, warps: int, blocks: int, by: str
) -> None:
    found = of(arch, registers, shared, warps)
    assert (found.blocks, found.limited_by) == (blocks, by)
    assert found.warps == blocks * warps


# Waves of a SIMD by VGPRs as LLVM writes them into the assembly of our kernels ("; Occupancy:"),
# and as the ROCm guide to MI300X lists them.
@pytest.mark.parametrize(
    ("arch", "registers", "waves"),
    [
        ("gfx942", 84, 5), ("gfx942", 72, 7), ("gfx950", 86, 5), ("gfx90a", 308, 1),
        ("gfx942", 64, 8), ("gfx942", 80, 6), ("gfx942", 96, 5), ("gfx942", 128, 4),
        ("gfx942", 168, 3), ("gfx942", 256, 2), ("gfx942", 512, 1),
        ("gfx1100", 197, 7), ("gfx1100", 237, 6), ("gfx1100", 62, 16),
        ("gfx1201", 147, 9), ("gfx1201", 136, 10), ("gfx1201", 117, 12), ("gfx1201", 68, 16),
    ],
)  # fmt: skip
def test_waves_of_a_simd_are_those_of_llvm(arch: str, registers: int, waves: int) -> None:
    schedulers = occupancy_limits()[arch].schedulers
    assert of(arch, registers, 0, 1).warps == waves * schedulers


def test_what_does_not_fit_has_no_block_and_says_what_it_lacks() -> None:
    assert of("sm_120", 32, 101 << 10, 4).blocks == 0
    assert of("sm_120", 32, 101 << 10, 4).limited_by == "shared memory"
    assert of("gfx1100", 257, 0, 4).limited_by == "registers"
    assert of("gfx1100", 257, 0, 4).warps == 0
    with pytest.raises(ValueError, match="at least one warp"):
        of("sm_90", 32, 0, 0)


@given(
    st.sampled_from(sorted(occupancy_limits())),
    st.integers(1, 255),
    st.integers(0, 64 << 10),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_more_of_anything_never_leaves_more_resident(
    arch: str, registers: int, shared: int, warps: int
) -> None:
    found, limits = of(arch, registers, shared, warps), occupancy_limits()[arch]
    assert found.warps * limits.warp_lanes * registers <= limits.registers
    assert found.blocks * shared <= limits.shared_bytes
    assert found.warps <= limits.max_warps
    assert found.blocks <= limits.max_blocks
    assert of(arch, registers + 8, shared, warps).blocks <= found.blocks
    assert of(arch, registers, shared + 4096, warps).blocks <= found.blocks


def test_every_target_has_limits_with_their_source() -> None:
    assert occupancy_limits().keys() == {target.arch for target in TARGETS}
    for target in TARGETS:
        limits = occupancy_limits()[target.arch]
        assert limits.warp_lanes == target.warp_size
        assert limits.max_warps % limits.schedulers == 0
        assert any(word in limits.source for word in ("CUDA programming guide", "LLVM"))


def test_evidence_that_does_not_compile_has_no_occupancy() -> None:
    fields = {"dtype": "", "config": "a", "tier": "native", "registers": 64, "num_warps": 16}
    assert occupancy_of_evidence(Evidence(target="sm_90", **fields)) is not None  # type: ignore[arg-type]
    assert occupancy_of_evidence(Evidence(target="sm_999", **fields)) is None  # type: ignore[arg-type]
    broken = Evidence(target="sm_90", dtype="", config="a", tier="error", error="no")
    assert occupancy_of_evidence(broken) is None


def test_a_wrong_limit_is_an_error_at_its_place(tmp_path: Path) -> None:
    sound = next(iter(occupancy_limits().values())).model_dump()
    path = tmp_path / "limits.json"
    for change, place in (
        ({"registers": 0}, "registers"),
        ({"registers": "64 K"}, "registers"),
        ({"regs": 5}, "regs"),
        ({"source": ""}, "source"),
    ):
        path.write_text(json.dumps(sound | change))
        with pytest.raises(SettingsError, match=rf"at {place}"):
            read_document(ArchitectureLimits, path)
    for text in ("{", "[" * 100_000, "[]", '{"arch": 1e999}'):
        path.write_text(text)
        with pytest.raises(SettingsError, match=str(path)):
            read_document(ArchitectureLimits, path)
    with pytest.raises(SettingsError, match="absent"):
        read_document(ArchitectureLimits, tmp_path / "absent.json")
