"""What the stored machine code claims, over every kernel, variant and architecture.

Native is a promise: no spills, shared memory within what the architecture's blocks have, a matrix
instruction of the claimed dtype. Whatever is not native says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from hal_capability_db.loader import load_database
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.evidence import Evidence, KernelEvidence, stored_evidence
from hal_kernels.aot.explanations import find_explanation
from hal_kernels.aot.occupancy import occupancy_of_evidence
from hal_kernels.aot.targets import TARGETS


def _cells() -> Iterator[tuple[str, Evidence]]:
    for found in stored_evidence():
        for variant in found.variants:
            yield found.kernel, variant


def _told(kernel: str, variant: Evidence) -> str:
    return f"{kernel} {variant.dtype} {variant.config} on {variant.target}: {variant.describe()}"


@pytest.mark.parametrize("arch", [target.arch for target in TARGETS])
def test_native_code_spills_nothing_and_fits_in_shared_memory(arch: str) -> None:
    most = load_database().architecture(arch).shared_memory_per_block_bytes.value
    assert most is not None
    assert most >= 48 << 10
    native = [(k, v) for k, v in _cells() if v.target == arch and v.tier == "native"]
    assert len(native) > 100
    broken = [_told(k, v) for k, v in native if v.spills or v.shared_bytes > most]
    assert not broken, "\n".join(broken)


def test_native_products_end_in_matrix_instructions() -> None:
    silent = [
        _told(k, v)
        for k, v in _cells()
        if v.tier == "native" and CATALOGUE[k].uses_matrix_unit and not v.instruction_count
    ]
    assert not silent, "\n".join(silent)


def test_a_block_of_native_code_is_resident() -> None:
    """By registers and shared memory, as the occupancy of the architecture has it."""
    absent = []
    for kernel, variant in _cells():
        if variant.tier == "native":
            found = occupancy_of_evidence(variant)
            assert found is not None, _told(kernel, variant)
            if not found.blocks:
                absent.append(_told(kernel, variant))
    assert not absent, "\n".join(absent)


def test_what_is_not_native_is_explained() -> None:
    unexplained = [
        _told(k, v) for k, v in _cells() if v.tier != "native" and find_explanation(k, v) is None
    ]
    assert not unexplained, "\n".join(unexplained)


def test_without_a_configuration_the_worst_variant_speaks() -> None:
    """Whichever form a kernel is launched in, a plan promises no more than it is."""
    native = Evidence(target="sm_90", dtype="bfloat16", config="a", tier="native", registers=8)
    wide = dataclasses.replace(native, config="wide", shared_bytes=1 << 18)
    spilled = dataclasses.replace(native, config="b", tier="spilled", spills=2)

    def stored(*variants: Evidence) -> KernelEvidence:
        return KernelEvidence(
            kernel="k", op="gemm", target="sm_90", source_hash="1", triton="3.9", variants=variants
        )

    assert stored(wide, native).find("bfloat16") == wide
    found = stored(native, spilled, wide)
    assert found.find("bfloat16") == spilled
    assert found.find("bfloat16", "a") == native
    assert found.find("float16") is None
    assert found.find("bfloat16", "c") is None
