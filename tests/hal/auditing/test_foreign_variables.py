"""Variables of others: which are known, what their values mean, where they are shown."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase

import pytest

from hal.auditing.foreign_variable_table import foreign_variable_table
from hal.auditing.foreign_variables import (
    foreign_variables,
    known_variable,
    locked_environment,
    variable_findings,
)
from hal.auditing.gates import GateClass


def is_slow(name: str, value: str) -> bool:
    (found,) = foreign_variables({name: value})
    return found.is_slow


def test_the_table_is_sound() -> None:
    table = foreign_variable_table()
    names = [entry.name for entry in table]
    assert len(names) == len(set(names)) >= 40
    for entry in table:
        if entry.is_ignored:
            assert known_variable(entry.name) is None
            continue
        assert entry.effect
        assert entry.owner
        assert entry.source.startswith("https://")
        assert re.fullmatch(r"[A-Z0-9_]+\*?|DISABLE_\*_FUSION", entry.name), entry.name
        words = (entry.slow,) if isinstance(entry.slow, str) else entry.slow
        if isinstance(entry.slow, str):
            assert entry.slow in ("", "on", "off", "few-threads")
        assert all(word == word.lower() for word in words)
    for number, name in enumerate(names):  # no pattern hides a later pattern
        for earlier in names[:number]:
            if "*" in earlier and "*" in name:
                assert not fnmatchcase(name, earlier), (earlier, name)


@pytest.mark.parametrize(
    ("name", "slow", "not_slow"),
    [
        ("NCCL_P2P_DISABLE", ["1", "yes", "TRUE"], ["0", "", "false", "OFF"]),
        ("CUDA_LAUNCH_BLOCKING", ["1"], ["0"]),
        ("NVIDIA_TF32_OVERRIDE", ["0"], ["1", ""]),
        ("PYTORCH_ENABLE_MPS_FALLBACK", ["1"], ["0"]),
        ("TRITON_INTERPRET", ["1"], ["0"]),
        ("NCCL_DEBUG", ["TRACE"], ["WARN", "INFO"]),
        ("CUBLAS_WORKSPACE_CONFIG", [":16:8"], [":4096:8"]),
        ("TORCH_NCCL_BLOCKING_WAIT", ["1"], ["0"]),
        ("TORCH_NCCL_SOMETHING_NEW", [], ["1"]),
        ("TORCHDYNAMO_DISABLE", ["1"], ["0"]),
        ("PYTORCH_JIT", ["0"], ["1"]),
        ("VLLM_DISABLE_SOMETHING", ["1"], ["0"]),
        ("VLLM_USE_DEEP_GEMM", ["0"], ["1"]),
        ("MKL_CBWR", ["COMPATIBLE", "sse2,strict"], ["auto"]),
        ("ATEN_CPU_CAPABILITY", ["default"], ["avx512"]),
        ("HSA_OVERRIDE_GFX_VERSION", ["10.3.0"], [""]),
    ],
)
def test_values_that_make_it_slow(name: str, slow: list[str], not_slow: list[str]) -> None:
    assert [value for value in [*slow, *not_slow] if is_slow(name, value)] == slow


def test_threads_are_judged_by_the_cpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, slow in ((1, []), (2, ["1"]), (16, ["1", "4"])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cpus: set(range(n)))
        values = ["1", "4", "8", "16", "32", "", "many", "0"]
        assert [v for v in values if is_slow("OMP_NUM_THREADS", v)] == slow, cpus


def test_the_very_name_wins_over_patterns() -> None:
    for name in ("NCCL_ALGO", "TORCH_NCCL_BLOCKING_WAIT", "PYTORCH_TUNABLEOP_TUNING"):
        entry = known_variable(name)
        assert entry is not None
        assert entry.name == name
    pattern = known_variable("NCCL_NEVER_HEARD_OF")
    assert pattern is not None
    assert pattern.name == "NCCL_*"
    assert known_variable("PATH") is None
    assert known_variable("HAL_CONFIG") is None


def test_only_what_concerns_the_device_is_listed() -> None:
    environment = {
        "NCCL_P2P_DISABLE": "1",
        "ASCEND_LAUNCH_BLOCKING": "1",
        "OMP_NUM_THREADS": "64",
        "PATH": "/bin",
        "TRITON_INTERPRET": "1",
    }
    for device_type, names in (
        ("cpu", ["OMP_NUM_THREADS", "TRITON_INTERPRET"]),
        ("cuda", ["NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "TRITON_INTERPRET"]),
        ("npu", ["ASCEND_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "TRITON_INTERPRET"]),
        ("", sorted(environment.keys() - {"PATH"})),
    ):
        found = foreign_variables(environment, device_type=device_type)
        assert [variable.name for variable in found] == names


def test_values_are_short_and_grant_nothing() -> None:
    found = locked_environment(
        {
            "HAL_SERVE_API_KEY": "a secret",
            "VLLM_API_KEY": "another",
            "HAL_ENGINE_TP": "2",
            "HF_TOKEN": "not ours, not listed",
            "NCCL_ALGO": "Ring" * 200,
            "HOME": "/root",
        }
    )
    assert found["HAL_ENGINE_TP"] == "2"
    assert found["HAL_SERVE_API_KEY"] == "(set; not shown)"
    assert found.keys() == {"HAL_SERVE_API_KEY", "HAL_ENGINE_TP", "NCCL_ALGO"}
    assert len(found["NCCL_ALGO"]) == 200


def test_a_slow_variable_is_an_ignored_setting() -> None:
    environment = {"TRITON_INTERPRET": "1", "NCCL_ALGO": "Ring", "OMP_PROC_BIND": "true"}
    (found,) = variable_findings(foreign_variables(environment))
    assert found.gate is GateClass.IGNORED_SETTING
    assert "TRITON_INTERPRET=1" in found.title
    assert found.remedy == "unset TRITON_INTERPRET (Triton)"
