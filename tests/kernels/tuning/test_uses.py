"""What a plan says of compiled kernels: code and configuration of the variants it is judged by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hal.device import DeviceSpec
from hal.kernel_uses import planned_uses
from hal.ops import TokenRange
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.limits import EvidenceQuery, evidence_asked, evidence_of
from hal_kernels.gemm import triton_limits as gemm_limits
from hal_kernels.norm import triton_limits as norm_limits
from hal_kernels.tuning.session import TuningSession, TuningTask
from hal_kernels.tuning.store import user_store
from hal_kernels.tuning.tunable import Default
from hal_kernels.tuning.uses import kernel_uses


def product(n: int, k: int, rows: int, name: str = "fp8_block128_a8") -> GemmRequest:
    return GemmRequest(
        n=n, k=k, dtype="bfloat16", weight_format=FORMATS[name], tokens=TokenRange(rows, rows)
    )


def test_the_kernels_are_those_whose_code_the_limits_ask_about(device: DeviceSpec) -> None:
    asked = evidence_asked(gemm_limits.not_supported_reasons, product(64, 128, 4), device)
    assert asked == (EvidenceQuery("gemm.fp8_block", "fp8_e4m3fn", "g128-small"),)
    (use,) = kernel_uses("gemm", gemm_limits.not_supported_reasons, product(64, 128, 4), device)
    stored = evidence_of("gemm.fp8_block", device, "fp8_e4m3fn", "g128-small")
    assert stored is not None
    assert use.code == stored.brief()
    assert use.code.startswith("native: ")
    assert "mma.m16n8k32.e4m3, " in use.code
    assert ", 0 spills, " in use.code
    # Nothing is noted outside of a question.
    gemm_limits.not_supported_reasons(product(64, 128, 4), device)
    assert evidence_asked(lambda *arguments: (), product(64, 128, 4), device) == ()


def test_a_class_without_a_configuration_has_a_default_with_its_loss(device: DeviceSpec) -> None:
    request = product(65_536, 7168, 4)
    (use,) = kernel_uses("gemm", gemm_limits.not_supported_reasons, request, device)
    assert use.basis == "default"
    assert use.shape == "dtype=fp8_e4m3fn,form=g128,k=7168,n=65536,rows=16"
    assert use.loss is not None
    assert 0.0 <= use.loss < 0.5, "no configuration of this kernel would save more"
    assert "by the model" in use.note
    assert "the rates allow" in use.note
    unknown = dataclasses.replace(device, attributes={"warp_size": 32})
    (use,) = kernel_uses("gemm", gemm_limits.not_supported_reasons, request, unknown)
    assert use.loss is None
    assert "multiprocessors" in use.note


def test_a_kept_configuration_is_what_a_plan_says(
    device: DeviceSpec, task: Callable[..., TuningTask], compiler: Any
) -> None:
    one = task()
    (entry,) = TuningSession(user_store(), compile=compiler()).run([one], lambda *_: None)
    best = entry.best()
    assert best is not None
    (use,) = kernel_uses("gemm", gemm_limits.not_supported_reasons, product(64, 128, 4), device)
    assert use.basis == "modelled"
    assert f"n{best.configuration['BLOCK_N']} " in use.configuration
    assert use.code == "native: 4× mma, " + use.code.partition("mma, ")[2]
    (other,) = kernel_uses("gemm", gemm_limits.not_supported_reasons, product(64, 256, 4), device)
    assert other.basis == "default"


@pytest.mark.parametrize("k", [1024, 4096])  # by default whole, and in four parts
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("out_dtype", ["", "float32"])
def test_a_kept_product_is_judged_by_the_parts_that_it_has(
    k: int, splits: int, out_dtype: str, device: DeviceSpec, task: Callable[..., TuningTask],
    compiler: Any,
) -> None:  # fmt: skip
    one = task("gemm.dense", f"n=64,k={k},rows=4")
    kept = one.configurations[0] | {"SPLIT_K": splits}
    tunable = dataclasses.replace(
        one.tunable, space=lambda *_: (), default_of_units=None,
        default=lambda *_: Default(config="small", configuration=kept),
    )  # fmt: skip
    alone = dataclasses.replace(one, tunable=tunable)
    TuningSession(user_store(), compile=compiler()).run([alone], lambda *_: None)
    request = dataclasses.replace(product(64, k, 4, "bfloat16"), out_dtype=out_dtype)
    ending = "-float32" * bool(out_dtype)
    parts, *total = kernel_uses("gemm", gemm_limits.not_supported_reasons, request, device)
    assert (parts.kernel, parts.basis) == ("gemm.dense", "modelled")
    if splits == 1:
        assert (parts.config, total) == (f"bfloat16 small{ending}", [])
    else:
        assert parts.config == "bfloat16 split"
        assert [use.config for use in total] == [f"split8-plain{ending}"]
    assert not gemm_limits.not_supported_reasons(request, device)


def test_what_is_kept_for_another_source_is_told_and_not_used(
    device: DeviceSpec, task: Callable[..., TuningTask], compiler: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    TuningSession(user_store(), compile=compiler()).run([task()], lambda *_: None)
    limits, request = gemm_limits.not_supported_reasons, product(64, 128, 4)
    for name, value, told in (
        ("code_hash", lambda kernel: "0" * 16, "another source"),
        ("triton_version", lambda: "0.0", "another Triton"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"hal_kernels.tuning.store.{name}", value)
            (use,) = kernel_uses("gemm", limits, request, device)
            assert use.basis == "default"
            assert "kept: modelled" in use.note
            assert told in use.note


def test_a_kernel_with_nothing_to_choose_is_fixed(device: DeviceSpec) -> None:
    request = RmsNormRequest(hidden_size=64, dtype="bfloat16")
    (use,) = kernel_uses("norm.rms", norm_limits.not_supported_reasons, request, device)
    assert (use.kernel, use.basis, use.loss, use.shape) == ("norm.rms", "fixed", None, "")
    assert use.code.startswith("native: ")
    split = kernel_uses("gemm", gemm_limits.not_supported_reasons, product(1536, 7168, 4), device)
    assert [use.kernel for use in split] == ["gemm.split_k", "gemm.split_k_sum"]
    parts, total = split
    assert (parts.basis, parts.shape) == (
        "default", "dtype=fp8_e4m3fn,form=g128,k=7168,n=1536,rows=16",
    )  # fmt: skip
    assert (total.basis, total.loss, total.shape) == ("fixed", None, "")
    elsewhere = dataclasses.replace(device, arch="sm_75")
    (use,) = kernel_uses("norm.rms", norm_limits.not_supported_reasons, request, elsewhere)
    assert use.code == ""
    assert "no machine code" in use.note


@pytest.mark.parametrize(
    ("fields", "brief"),
    [
        (
            {"tier": "native", "instruction": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
             "instruction_count": 64, "registers": 200, "shared_bytes": 99 << 10},
            "native: 64× mma.m16n8k32.e4m3, 200 registers, 0 spills, 99 KiB",
        ),
        ({"tier": "spilled", "registers": 255, "spills": 3},
         "spilled: 255 registers, 3 spills"),
        ({"tier": "error", "error": "Boom: no"}, "does not compile: Boom: no"),
    ],
)  # fmt: skip
def test_code_is_told_in_a_line(fields: dict[str, Any], brief: str) -> None:
    assert Evidence(target="sm_90", dtype="", config="", **fields).brief() == brief


def test_a_plan_lists_the_kernels_of_both_ends_of_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from absent_plans import plan, profile

    monkeypatch.setattr("hal_kernels.tuning.store.PACKAGED", tmp_path / "none")
    found = plan("qwen3-30b-a3b", profile("h200-sxm"), 1)
    op = next(o for o in found.ops if any(u.shape for u in planned_uses(o)))
    assert op.tokens.low < op.tokens.high
    document = op.to_dict()
    rows = {use["shape"].rpartition("rows=")[2] for use in document["kernels"] if use["shape"]}
    assert rows == {"16", "512"}
    assert all(use["code"].startswith("native: ") for use in document["kernels"])
    assert {use["basis"] for use in document["kernels"]} <= {"default", "fixed"}
    # What is known of code decides nothing: the hash is of what runs.
    from hal.plan import plan_hash

    whole = found.to_dict()
    bare = whole | {"ops": [{**o, "kernels": []} for o in whole["ops"]]}
    assert plan_hash(bare) == whole["hash"]
    tuned = [{**use, "basis": "measured"} for use in document["kernels"]]
    ops = [{**o, "kernels": tuned} if o["site"] == document["site"] else o for o in whole["ops"]]
    assert plan_hash(whole | {"ops": ops}) != whole["hash"]
