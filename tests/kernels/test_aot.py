"""Evidence from machine code: how it is read, what it is worth, that what is stored is current."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_devices import gpu
from hal.errors import KernelSourceError, PlanError, SettingsError
from hal.ops import CATALOGUE as OPS
from hal.ops import TokenRange
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.reasons import ReasonKind
from hal_kernels.aot.catalogue import CATALOGUE, find_kernel
from hal_kernels.aot.checking import differences
from hal_kernels.aot.cli import kernels_document
from hal_kernels.aot.compiling import compile_kernel
from hal_kernels.aot.evidence import (
    Evidence,
    KernelEvidence,
    evidence_path,
    read_evidence,
    stored_evidence,
    tier_of,
    write_evidence,
)
from hal_kernels.aot.evidence_tables import print_evidence, print_overview, short_instruction
from hal_kernels.aot.leaves import kernel_functions, matrix_instructions
from hal_kernels.aot.limits import evidence_of, evidence_reasons
from hal_kernels.aot.machine_code import MachineCode, read_amd, read_nvidia
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.gemm.triton_limits import KernelChoice, choose_kernel
from hal_kernels.grouped_gemm.triton_limits import choose_kernel as choose_grouped

PTX = """
	@%p1 cp.async.cg.shared.global [ %r29 + 0 ], [ %rd12 + 0 ], 0x10, %r30;
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
	mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
	mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %f2 }, { %r1 }, { %r2 }, { %f2 };
"""
USAGE = " Function k:\n  REG:176 STACK:12 SHARED:1024 LOCAL:4 CONSTANT[0]:960 TEXTURE:0\n"
AMDGCN = """
	global_load_dwordx4 v[0:3], v[4:5], off
	v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]
    .agpr_count:     16
    .sgpr_spill_count: 2
    .vgpr_count:     122
    .vgpr_spill_count: 3
"""


def test_nvidia_code_is_read() -> None:
    code = read_nvidia(PTX, USAGE, 5000)
    assert code.matrix == {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": 2}
    assert code.load_bytes == {16: 2, 2: 1}
    assert (code.registers, code.spills, code.code_bytes) == (176, 4, 5000)
    assert code.runs_on_unit_of("fp8_e4m3fn", "cuda")
    assert not code.runs_on_unit_of("bfloat16", "cuda")
    with pytest.raises(ValueError, match="resource usage"):
        read_nvidia(PTX, "", 0)


def test_amd_code_is_read() -> None:
    code = read_amd(AMDGCN, 700)
    assert code.load_bytes == {16: 1}
    assert (code.registers, code.spills) == (138, 5)
    assert code.runs_on_unit_of("float16", "hip")
    assert not code.runs_on_unit_of("bfloat16", "hip")
    assert not code.runs_on_unit_of("fp8_e4m3fnuz", "hip")
    with pytest.raises(ValueError, match="vgpr_count"):
        read_amd("", 0)


@pytest.mark.parametrize(
    ("instruction", "dtype", "backend"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "fp8_e4m3fn", "cuda"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4", "fp8_e4m3fn", "cuda"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "bfloat16", "cuda"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "float16", "cuda"),
        ("tcgen05.mma.cta_group::1.kind::f16", "bfloat16", "cuda"),
        ("v_mfma_f32_32x32x64_f8f6f4", "fp8_e4m3fn", "hip"),
        ("v_mfma_f32_32x32x16_fp8_fp8", "fp8_e4m3fnuz", "hip"),
        ("v_wmma_f32_16x16x16_fp8_fp8", "fp8_e4m3fn", "hip"),
        ("v_mfma_f32_32x32x8bf16_1k", "bfloat16", "hip"),
        ("v_mfma_f32_32x32x8f16", "float16", "hip"),
        ("v_wmma_f32_16x16x16_bf16", "bfloat16", "hip"),
    ],
)
def test_an_instruction_belongs_to_one_16_or_8_bit_type(
    instruction: str, dtype: str, backend: str
) -> None:
    code = MachineCode(matrix={instruction: 1}, load_bytes={}, registers=1, spills=0, code_bytes=1)
    assert code.runs_on_unit_of(dtype, backend)
    is_shared = "kind::f16" in instruction  # one kind of instruction for both 16-bit types
    for other in ("fp8_e4m3fn", "bfloat16", "float16"):
        if other != dtype and not is_shared and {other, dtype} != {"fp8_e4m3fn", "fp8_e4m3fnuz"}:
            assert not code.runs_on_unit_of(other, backend), other


def test_the_tier_follows_from_the_code() -> None:
    def tier(matrix: dict[str, int], spills: int = 0, uses: bool = True) -> str:
        code = MachineCode(matrix=matrix, load_bytes={}, registers=1, spills=spills, code_bytes=1)
        return tier_of(code, dtype="fp8_e4m3fn", backend="hip", uses_matrix_unit=uses)

    fp8, f16 = {"v_wmma_f32_16x16x16_fp8_fp8": 4}, {"v_wmma_f32_16x16x16_f16": 4}
    assert tier(fp8) == "native"
    assert tier(fp8, spills=1) == "spilled"
    assert tier(f16) == "emulated"
    assert tier(fp8 | f16) == "emulated"  # in part is not native
    assert tier({}) == "scalar"
    assert tier({}, uses=False) == "native"


@pytest.mark.parametrize(
    ("arch", "tier"), [("gfx90a", "emulated"), ("sm_120", "native")], ids=lambda v: v
)
def test_fp8_that_a_compiler_widens_without_a_word_is_found(arch: str, tier: str) -> None:
    """The compiler trap: gfx90a has no FP8 matrix instruction, and nothing says so but the code."""
    kernel, target = find_kernel("grouped_gemm.mxfp4"), find_target(arch)
    (found,) = compile_kernel(kernel, target, only="small").variants
    assert found.tier == tier
    assert ("f16" in found.instruction) == (tier == "emulated")
    reasons = evidence_reasons("grouped_gemm.mxfp4", gpu("gfx90a"), dtype="fp8_e4m3fn")
    assert [reason.kind for reason in reasons] == [ReasonKind.HARDWARE]
    assert "emulated" in reasons[0].found


def test_an_error_of_the_sources_is_no_evidence() -> None:
    """A module that cannot be imported for a moment would say for ever that a target refuses it."""
    kernel = dataclasses.replace(find_kernel("embedding.gather"), name="embedding.gathers")
    with pytest.raises(KernelSourceError, match=r"compiling embedding\.gathers for sm_90"):
        compile_kernel(kernel, find_target("sm_90"))


def test_every_kernel_has_current_evidence_for_every_target() -> None:
    missing = []
    for kernel in CATALOGUE.values():
        for target in TARGETS:
            wanted = {(v.dtype, v.config) for v in kernel.variants(target)}
            if not wanted:
                continue
            stored = read_evidence(kernel.name, target.arch)
            if stored is None or stored.source_hash != kernel.source_hash(target):
                missing.append(f"{kernel.name} {target.arch}")
            elif {(v.dtype, v.config) for v in stored.variants} != wanted:
                missing.append(f"{kernel.name} {target.arch}: other variants")
    assert not missing, "run: hal kernels check --changed --update"


def test_nothing_is_stored_that_is_not_in_the_catalogue() -> None:
    for found in stored_evidence():
        assert found.kernel in CATALOGUE
        assert evidence_path(found.kernel, found.target).exists()


def test_no_kernel_of_a_native_product_spills_where_it_counts() -> None:
    """Products in 16 bits are native everywhere: without this a plan has no fast path at all."""
    for target in TARGETS:
        stored = read_evidence("gemm.dense", target.arch)
        assert stored is not None
        for dtype in ("bfloat16", "float16"):
            best = stored.find(dtype, "large")
            assert best is not None
            assert best.tier == "native", f"{target.arch}: {best.describe()}"


def test_the_document_lists_every_kernel_with_the_promised_fields() -> None:
    document = kernels_document(list(CATALOGUE.values()), list(TARGETS))
    assert {kernel["name"] for kernel in document["kernels"]} == set(CATALOGUE)
    wanted = {"target", "dtype", "config", "tier", "instruction", "registers", "spills"}
    for kernel in document["kernels"]:
        assert kernel["evidence"], kernel["name"]
        for evidence in kernel["evidence"]:
            assert wanted | {"shared_bytes"} <= evidence.keys()


def stored_example() -> KernelEvidence:
    variant = Evidence(target="sm_90", dtype="bfloat16", config="a", tier="native", registers=8)
    return KernelEvidence(
        kernel="k", op="gemm", target="sm_90", source_hash="1", triton="3.9", variants=(variant,)
    )


def test_evidence_survives_its_file_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = write_evidence(stored_example(), tmp_path)
    assert read_evidence("k", "sm_90", tmp_path) == stored_example()
    document = json.loads(path.read_text())
    (variant,) = document["variants"]
    damages = [
        document | {"schema": "other/1"},
        document | {"variants": [{"tier": 1, "x": 2}]},
        document | {"variants": 3},
        document | {"variants": [variant | {"tier": "golden"}]},
        document | {"variants": [variant | {"spills": "none"}]},
        [document],
        "[" * 100_000,
    ]
    for damage in damages:
        path.write_text(damage if isinstance(damage, str) else json.dumps(damage))
        read_evidence.cache_clear()
        with pytest.raises(PlanError, match=r"k\.json of sm_90"):
            read_evidence("k", "sm_90", tmp_path)
    path.write_text("{")
    read_evidence.cache_clear()
    with pytest.raises(PlanError, match="hal kernels check --kernel k --target sm_90 --update"):
        read_evidence("k", "sm_90", tmp_path)


def test_what_decides_makes_a_difference_and_registers_do_not() -> None:
    stored = stored_example()
    (variant,) = stored.variants

    def with_variant(**changes: object) -> KernelEvidence:
        changed = dataclasses.replace(variant, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(stored, variants=(changed,))

    assert differences(stored, with_variant(registers=99)) == ""
    assert "emulated" in differences(stored, with_variant(tier="emulated"))
    assert differences(stored, with_variant(spills=3))
    assert differences(stored, with_variant(shared_bytes=1024))
    assert differences(stored, with_variant(widest_load_bytes=2))
    assert differences(stored, with_variant(config="b"))
    assert "nothing is stored" in differences(None, stored)
    assert "source" in differences(stored, dataclasses.replace(stored, source_hash="2"))


def test_a_leaf_is_a_kernel_that_there_is_and_an_instruction_that_was_seen() -> None:
    assert {kernel.op for kernel in CATALOGUE.values()} <= set(OPS)
    assert kernel_functions("attention") == (
        "_attention_prefill_kernel", "_attention_decode_kernel", "_attention_merge_kernel",
    )  # fmt: skip
    assert kernel_functions("dense_attention") == ()  # torch's own alone
    # Tiles of few rows leave wgmma for mma.sync: a leaf that named one of them would be untrue.
    assert matrix_instructions("gemm", "sm_90") == ("mma.sync", "wgmma.mma_async")
    assert matrix_instructions("gemm", "gfx942") == ("v_mfma",)
    assert matrix_instructions("gemm", "gfx1201") == ("v_wmma",)
    assert matrix_instructions("norm.rms", "sm_90") == ()
    assert matrix_instructions("gemm", "sm_999") == ()


@pytest.mark.parametrize(
    ("name", "tokens", "k", "epilogue", "config"),
    [
        ("bfloat16", (1, 16), 4096, "none", "split"),
        ("bfloat16", (1, 16), 1024, "silu_gated", "small-gated"),
        ("bfloat16", (17, 512), 4096, "silu_gated", "large-gated"),
        ("int4_g32_asym", (1, 8), 4096, "none", "small-w4g32-asym"),
        ("int8_channel", (1, 512), 4096, "none", "large-w8"),
        ("fp8_block128_a8", (1, 1), 4096, "none", "g128-small"),
        ("fp8_block128_a8", (1, 64), 4096, "none", "g128"),
    ],
)
def test_the_evidence_asked_for_is_that_of_the_code_that_will_run(
    name: str, tokens: tuple[int, int], k: int, epilogue: Any, config: str
) -> None:
    """A range is judged by its own tiles: that large ones do not spill says nothing of small."""
    request = GemmRequest(
        n=8192, k=k, dtype="bfloat16", weight_format=FORMATS[name], epilogue=epilogue,
        tokens=TokenRange(*tokens),
    )  # fmt: skip
    choice = choose_kernel(request, gpu("sm_90"))
    assert isinstance(choice, KernelChoice)
    assert choice.config == config
    assert evidence_of(choice.kernel, gpu("sm_90"), choice.dtype, choice.config) is not None


@pytest.mark.parametrize(("most", "size"), [(4, "small"), (1024, "large")])
def test_experts_are_judged_by_their_share_of_the_rows(most: int, size: str) -> None:
    request = GroupedGemmRequest(
        num_experts=64, experts_per_token=8, n=512, k=4096, dtype="bfloat16",
        weight_format=FORMATS["bfloat16"], epilogue="silu_gated", tokens=TokenRange(1, most),
    )  # fmt: skip
    choice = choose_grouped(request, gpu("sm_90"))
    assert isinstance(choice, KernelChoice)
    assert choice.config == f"{size}-gated"


def test_unknown_kernels_and_targets_suggest_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"gemm\.dense"):
        find_kernel("gemm.dens")
    with pytest.raises(SettingsError, match="sm_120"):
        find_target("sm_121")


def test_a_device_without_evidence_or_room_is_told_so() -> None:
    (reason,) = evidence_reasons("gemm.dense", gpu("sm_999"), dtype="bfloat16")
    assert reason.kind is ReasonKind.UNVERIFIED
    small = dataclasses.replace(gpu("sm_90"), attributes={"shared_memory_per_block_bytes": 1024})
    reasons = evidence_reasons("gemm.dense", small, dtype="bfloat16", config="large")
    assert any("shared memory" in reason.what for reason in reasons)


@pytest.mark.parametrize("forms", ["", pytest.param("--all", marks=pytest.mark.long)])
def test_every_integer_of_a_kernel_may_be_one(forms: str) -> None:
    """One row, one split: the launch makes a constant of it. In a process that compiles."""
    script = Path(__file__).resolve().parents[1] / "support" / "specialised_to_one.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, str(script), *forms.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "mma.m16n8k16.bf16"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", "mma.m16n8k32.e4m3.e5m2"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4", "tcgen05.mma.f8f6f4"),
        ("v_mfma_f32_32x32x16_fp8_fp8", "mfma_32x32x16_fp8"),
        ("v_wmma_f32_16x16x16_bf16", "wmma_16x16x16_bf16"),
        ("v_mfma_f32_16x16x16bf16_1k", "mfma_16x16x16bf16_1k"),
    ],
)
def test_instructions_are_short_in_tables(name: str, short: str) -> None:
    assert short_instruction(name) == short


@pytest.mark.parametrize("columns", [80, 100])
def test_evidence_fits_a_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_overview(list(CATALOGUE.values()), TARGETS)
    overview = capsys.readouterr().out
    assert set(CATALOGUE) <= set(overview.split())
    print_evidence(list(CATALOGUE.values()), TARGETS)
    tables = capsys.readouterr().out
    assert max(map(len, (overview + tables).splitlines())) <= columns
    assert {"fp8_e4m3fnuz", "g128-small"} <= set(tables.split())
