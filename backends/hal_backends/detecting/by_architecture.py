"""A device whose product nobody listed, described by its architecture alone: what its instruction
set can do is known, its rates, bandwidth and links are not."""

from __future__ import annotations

from hal_backends.detecting.identity import Identity
from hal_backends.detecting.rules import FamilyRules
from hal_capability_db import Database, DeviceProfile, Group
from hal_capability_db.values import Fact, unknown


def profile_by_architecture(
    rules: FamilyRules, identity: Identity, database: Database
) -> DeviceProfile:
    """A profile in which only the architecture's facts have values. identity.arch is known."""
    architecture = database.architectures[identity.arch]
    nothing: Fact[float] = unknown()
    no_count: Fact[int] = unknown()
    no_text: Fact[str] = unknown()
    capability = identity.arch.removeprefix("sm_") if identity.arch.startswith("sm_") else ""
    return DeviceProfile(
        id="",
        family=rules.family,
        name=identity.name,
        arch=identity.arch,
        identity=Group(source=(), confidence="unverified", note="described by its architecture"),
        pci_devices=(),
        names=(),
        compute_capability=f"{capability[:-1]}.{capability[-1]}" if capability else None,
        torch_devices_per_card=1,
        matrix_dtypes=architecture.matrix_dtypes,
        unverified_matrix_dtypes=architecture.unverified_matrix_dtypes,
        peak={},
        measured={},
        memory_bytes=no_count,
        usable_memory_bytes=no_count,
        memory_type=no_text,
        memory_bandwidth=nothing,
        host_link=no_text,
        host_link_bytes_per_s=nothing,
        fabric=no_text,
        fabric_bytes_per_s=nothing,
        fabric_group=no_count,
        p2p=no_text,
        warp_size=unknown(),
        compute_units=no_count,
        shared_memory_per_block_bytes=no_count,
        notes=f"not in the database; {identity.basis}",
    )
