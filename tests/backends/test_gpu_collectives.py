"""The platforms' collectives: their calls over a real process group, and when each may serve."""

from __future__ import annotations

import dataclasses
import multiprocessing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

import hal_kernels.collective.triton as triton_collective
from hal.candidates import KernelCandidate
from hal.device import DevicePolicy, DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.collective import COLLECTIVE_KINDS, CollectiveRequest, reference
from hal.ops.request import TokenRange
from hal.reasons import ReasonKind
from hal.selection import SelectionRules, select
from hal.tiers import Tier
from hal.unlocks import unlocks_of
from hal_backends.amd.policy import device_policy
from hal_backends.gpu.collectives import candidates, library_name
from hal_backends.gpu.collectives_peer import peer_candidates
from hal_kernels.aot.limits import EvidenceQuery, evidence_asked
from hal_kernels.collective.triton_limits import not_supported_reasons
from library_cases import device

WORLD = 2
RTX = device("nvidia", "sm_120", "graph_capture", "matrix.fp8_e4m3fn")


def on(spec: DeviceSpec, library: str, backend: str) -> DeviceSpec:
    return dataclasses.replace(
        spec, attributes={"collective_library": library, "torch_backend": backend}
    )


NVIDIA = on(RTX, "NCCL", "nccl")


def request_of(transport: str, world: int, tokens: int = 1, **more: Any) -> CollectiveRequest:
    given: dict[str, Any] = {"kind": "all_reduce", "width": 5120, "dtype": "bfloat16"} | more
    return CollectiveRequest(
        world_size=world, transport=transport, tokens=TokenRange(1, tokens), **given
    )


def named(spec: DeviceSpec) -> dict[str, KernelCandidate]:
    return {c.name.rsplit(".", 1)[1]: c for c in candidates("collective", spec)}


class OneDevice:
    """As much of an accelerator's namespace as the runtime needs to start."""

    def device_count(self) -> int:
        return 1

    def set_device(self, _: Any) -> None:
        return None


def _wrong_kinds(rank: int, folder: str, seed: int) -> list[str]:
    """The collectives whose result differs from the reference's, in one of the processes."""
    from hal_backends.gpu.runtime import TorchRuntime
    from hal_backends.process_group import load_process_group

    spec = dataclasses.replace(RTX, torch_device="cpu", attributes={"torch_backend": "gloo"})
    group = TorchRuntime(spec, OneDevice()).create_group(rank, WORLD, f"{folder}/rendezvous")
    torch.manual_seed(seed + rank)
    wrong: list[str] = []
    for kind in COLLECTIVE_KINDS:
        request = request_of("pcie", WORLD, 8, kind=kind, width=12, dtype="float32")
        kernel = load_process_group()(request, group=group)
        if kind == "barrier":
            kernel()
            continue
        x = torch.randn(8, 12)
        want = reference(request, group=group)(x.clone())
        got = kernel(x.clone())
        if got.shape != want.shape or not torch.allclose(got, want, atol=1e-5):
            wrong.append(kind)
    group.close()
    return wrong


def _rank(rank: int, folder: str, seed: int, results: Any) -> None:
    try:
        results.put((rank, _wrong_kinds(rank, folder, seed)))
    except Exception as error:  # noqa: BLE001 - the parent shows it
        results.put((rank, f"{type(error).__name__}: {error}"))


def test_calls_over_a_real_group(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    seed = int(torch.randint(1 << 30, ()))
    ranks = [
        context.Process(target=_rank, args=(rank, str(tmp_path), seed, results), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=240) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    assert found == {rank: [] for rank in range(WORLD)}


@pytest.mark.parametrize(
    ("library", "backend", "name"),
    [
        ("NCCL", "nccl", "nccl"),
        ("HCCL (Habana)", "hccl", "hccl"),
        ("MCCL (MUSA)", "mccl", "mccl"),
        ("XCCL (Kunlunxin; also BKCL)", "nccl", "xccl"),
        ("", "nccl", "torch_distributed"),
    ],
)
def test_candidates_have_the_librarys_name(library: str, backend: str, name: str) -> None:
    spec = on(RTX, library, backend)
    assert library_name(spec) == name
    assert {name, f"{name}_through_host"} <= named(spec).keys()


def test_a_platform_whose_backend_nobody_published_is_unverified() -> None:
    spec = on(RTX, "BCCL", "")
    (reason,) = named(spec)["bccl"].not_supported_reasons(request_of("blink", 4))
    assert reason.kind is ReasonKind.UNVERIFIED


@pytest.mark.parametrize(
    ("world", "p2p", "distance", "kind"),
    [
        (2, "none", "", None),  # two devices are no worse off
        (4, "none", "", ReasonKind.HARDWARE),
        (4, "claimed", "", ReasonKind.UNVERIFIED),
        (4, "verified", "PXB", None),
        (8, "verified", "PHB", ReasonKind.SOFTWARE),  # a setting of the library
        (8, "verified", "SYS", ReasonKind.SOFTWARE),
    ],
)
def test_more_than_two_on_pcie_need_verified_peer_access(
    world: int, p2p: Any, distance: Any, kind: ReasonKind | None
) -> None:
    request = request_of("pcie", world, p2p=p2p, distance=distance)
    direct, staged = named(NVIDIA)["nccl"], named(NVIDIA)["nccl_through_host"]
    assert [r.kind for r in direct.not_supported_reasons(request)] == ([kind] if kind else [])
    assert staged.serves(request)
    assert staged.tier < direct.tier


def test_staging_costs_twice_the_bytes() -> None:
    from hal.ops.collective import bytes_moved

    request = request_of("pcie", 8, 64, p2p="claimed")
    work = named(NVIDIA)["nccl_through_host"].work(request, 64)
    assert work is not None
    assert work.bytes == 2 * bytes_moved(request, 64)


def test_a_fabric_needs_no_peer_test_for_the_library() -> None:
    for transport in ("nvlink", "xgmi", "hccs", "mlulink"):
        assert named(NVIDIA)["nccl"].serves(request_of(transport, 8, p2p="none"))
        assert not named(NVIDIA)["nccl_through_host"].serves(request_of(transport, 8))


@pytest.mark.parametrize(
    ("world", "distance", "most"),
    [(2, "", 8 << 20), (4, "", 512 << 10), (8, "", 256 << 10), (8, "SYS", 48 << 10)],
)
def test_the_size_is_part_of_the_choice(world: int, distance: Any, most: int) -> None:
    """One-shot up to its threshold, two-shot from there; beyond it is out of scope, not lost."""
    found = named(NVIDIA)
    for tokens in (1, most // 10240, most // 10240 + 1, 8192):
        request = request_of("pcie", world, tokens, p2p="verified", distance=distance)
        size = tokens * 10240
        kinds = {
            name: {r.kind for r in found[name].not_supported_reasons(request)}
            for name in ("triton_one_shot", "triton_two_shot")
        }
        assert (ReasonKind.SCOPE in kinds["triton_one_shot"]) == (size > most)
        in_two_shot = most < size <= 8 << 20
        assert (ReasonKind.SCOPE in kinds["triton_two_shot"]) != in_two_shot


@pytest.mark.parametrize("transport", ["nvlink", "xgmi"])
def test_peer_kernels_need_a_full_mesh_and_a_verified_exchange(transport: str) -> None:
    one_shot = named(NVIDIA)["triton_one_shot"]

    def kinds(**more: Any) -> set[ReasonKind]:
        reasons = one_shot.not_supported_reasons(request_of(transport, 4, **more))
        return {r.kind for r in reasons} - {ReasonKind.MISSING}

    assert kinds(p2p="verified") == set()
    assert kinds(p2p="claimed") == {ReasonKind.UNVERIFIED}
    assert kinds(p2p="verified", is_full_mesh=False) == {ReasonKind.HARDWARE}


def test_a_small_message_among_eight_on_pcie_needs_verified_peer_access() -> None:
    """A kernel over peers' memory serves where access was verified; a claim, or not knowing, is a
    lost path whose unlock is to verify."""
    rules = SelectionRules(explicit={}, policy=DevicePolicy())
    offered = candidates("collective", dataclasses.replace(NVIDIA, software={}))
    verified = select(request_of("pcie", 8, p2p="verified"), offered, rules)
    assert verified.choice.name == "nvidia.collective.triton_one_shot"
    for access in ("claimed", "unknown"):
        decision = select(request_of("pcie", 8, p2p=access), offered, rules)
        assert decision.choice.name == "nvidia.collective.nccl_through_host"
        assert decision.lost is not None
        assert decision.lost.better_tier is Tier.NATIVE
        assert ReasonKind.UNVERIFIED in {reason.kind for reason in decision.lost.reasons}
        assert any("--verify-links" in step for step in unlocks_of(decision.lost.reasons))
    nothing = select(request_of("pcie", 8, p2p="none"), offered, rules)
    assert nothing.choice.name == "nvidia.collective.nccl_through_host"
    large = select(request_of("pcie", 8, 8192, p2p="verified"), offered, rules)
    assert large.choice.name == "nvidia.collective.nccl"
    assert large.lost is None


@pytest.mark.parametrize(
    ("kind", "tokens", "name"),
    [
        ("all_reduce", 64, "triton_two_shot_fp8"),
        ("reduce_scatter", 64, "triton_reduce_scatter_fp8"),
    ],
)
def test_a_rounded_wire_is_for_those_who_ask_for_it(kind: Any, tokens: int, name: str) -> None:
    request = request_of("pcie", 8, tokens, kind=kind, p2p="verified", width=8192)
    offered = candidates("collective", dataclasses.replace(NVIDIA, software={}))
    plain = select(request, offered, SelectionRules(explicit={}, policy=DevicePolicy()))
    assert plain.choice.name == f"nvidia.collective.{name.removesuffix('_fp8')}"
    (loser,) = [x for x in plain.rejected if x.name.endswith(name)]
    assert [reason.kind for reason in loser.reasons] == [ReasonKind.SEMANTIC]
    rules = SelectionRules(
        explicit={f"collective.{kind}": f"nvidia.collective.{name}"},
        policy=DevicePolicy(),
        allowed_semantics=frozenset({"rounded_wire"}),
    )
    asked = select(request, offered, rules)
    assert asked.choice.name == f"nvidia.collective.{name}"
    assert [note.name for note in asked.semantic_notes] == ["rounded_wire"]


def test_a_rounded_wire_needs_e4m3_and_whole_groups() -> None:
    wire = named(NVIDIA)["triton_two_shot_fp8"]
    (reason,) = wire.not_supported_reasons(request_of("pcie", 8, p2p="verified", width=5000))
    assert (reason.required, reason.found) == ("a multiple of 128 (a scale)", "5000")
    older = on(device("nvidia", "sm_80", "graph_capture"), "NCCL", "nccl")
    (reason,) = named(older)["triton_two_shot_fp8"].not_supported_reasons(
        request_of("pcie", 8, p2p="verified", width=8192)
    )
    assert (reason.kind, reason.found) == (ReasonKind.HARDWARE, "sm_80")


def test_collectives_are_judged_by_the_code_of_their_direction_ranks_and_wire() -> None:
    for transport, world, wire, config in (
        ("pcie", 2, False, "w2-push-plain"),
        ("nvlink", 8, False, "w8-pull-plain"),
        ("pcie", 4, True, "w8-push-fp8"),
    ):
        asked = evidence_asked(
            lambda r, d, w=wire: not_supported_reasons(r, d, "two_shot", has_fp8_wire=w),
            request_of(transport, world),
            NVIDIA,
        )
        assert asked == (EvidenceQuery("collective.all_reduce_two_shot", "", config),)


@pytest.mark.parametrize(("arch", "wire"), [("sm_120", "fp8_e4m3fn"), ("gfx942", "fp8_e4m3fnuz")])
def test_a_rounded_wire_is_of_the_architectures_type(
    arch: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_collective, "bind", lambda *_, **given: bound.append(given))
    platform = "amd" if arch.startswith("gfx") else "nvidia"
    offered = named(on(device(platform, arch), "NCCL", "nccl"))
    for name in ("triton_two_shot_fp8", "triton_two_shot"):
        offered[name].load()(request_of("pcie", 8), group=None)
    assert [given["wire"] for given in bound] == [wire, ""]
    assert {given["algorithm"] for given in bound} == {"two_shot"}


def test_what_reads_the_memory_of_peers_is_off_by_policy_where_it_is_not_known_to_work() -> None:
    """By whatever op: the sum with a norm behind it is one of them."""
    reading = [
        candidate
        for op in CATALOGUE
        for candidate in peer_candidates(op, device("amd", "gfx1100", "triton"))
    ]
    assert {c.op for c in reading} == {"collective", "all_reduce_norm"}
    for arch, is_off in (("gfx1100", True), ("gfx1201", True), ("gfx942", False)):
        disabled = device_policy(device("amd", arch)).disabled
        for candidate in reading:
            matching = [glob for glob in disabled if fnmatchcase(candidate.name, glob)]
            assert bool(matching) == is_off, candidate.name
