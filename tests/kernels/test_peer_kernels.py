"""The comparison of kernels cuts, compiles and judges a package made here; no wheel, no network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from kernel_peers import compiling
from kernel_peers.compiling import Finding, compile_all
from kernel_peers.earlier import load_others
from kernel_peers.launches import specialised
from kernel_peers.problems import PROBLEMS
from kernel_peers.slicing import CutError, Cutter
from kernel_peers.table import cells, document, markdown
from triton.runtime.jit import JITFunction

from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.targets import TARGETS, Target, find_target
from tiny_kernel_problems import PROBLEMS as TINY

SUPPORT = Path(__file__).resolve().parents[1] / "support"
_KERNELS = '''
"""A package that cannot be imported without its device."""
import a_library_for_one_device
import torch
import triton
from tiny.compat import tl
from .helpers import doubled
from tiny import compat as own

IS_FAST = a_library_for_one_device.is_fast()
SCALE: tl.constexpr = tl.constexpr(3.0)


@a_library_for_one_device.counted
@triton.autotune(configs=[], key=["N"])
@triton.jit(do_not_specialize=["first"], repr=lambda _: "name")
def scaled_copy(x_ptr, y_ptr, N, first, stride, BLOCK: tl.constexpr, FAST: tl.constexpr = IS_FAST):
    offs = own.row(0) * BLOCK * stride + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    tl.store(y_ptr + offs + first, doubled(x) * SCALE, mask=offs < N)


def launch(x):
    return scaled_copy[(1,)](x)
'''
_HELPERS = "import triton\n\n\n@triton.jit\ndef doubled(x):\n    return x * 2\n"
_COMPAT = """
import triton
try:
    import triton.language as tl
except ImportError:
    tl = None


@triton.jit
def row(axis):
    return tl.program_id(axis)
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    package = tmp_path / "wheels" / "tiny_wheel" / "tiny"
    package.mkdir(parents=True)
    for name, text in (("kernels", _KERNELS), ("helpers", _HELPERS), ("compat", _COMPAT)):
        (package / f"{name}.py").write_text(text)
    (package / "__init__.py").write_text("raise ImportError('needs a device')\n")
    return tmp_path / "wheels"


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cut"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx942", marks=pytest.mark.long)])
def test_kernels_are_cut_out_compiled_and_read(
    wheels: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))  # of the compiling process
    found = list(compile_all("tiny_kernel_problems", find_target(arch), wheels, "co*"))
    own, wide, chosen, renamed = found  # and one that its launcher does not take there
    assert [f.contender for f in found] == ["halstack", "Wide", "Chosen", "Renamed"]
    for one in (own, wide, chosen):
        assert (one.evidence.tier, one.evidence.spills, one.evidence.error) == ("native", 0, "")
        assert one.evidence.target == arch
        assert one.evidence.registers > 0
    assert (wide.evidence.widest_load_bytes, wide.evidence.num_warps) == (16, 2)
    # Of two configurations the one of fewer registers.
    assert (wide.tried, chosen.tried) == (1, 2)
    assert chosen.evidence.config == "BLOCK=64 num_warps=2"
    assert chosen.moved_bytes == 256
    assert chosen.evidence.registers < wide.evidence.registers
    assert renamed.evidence.tier == "error"
    assert "not in this version" in renamed.evidence.error


def test_what_cannot_be_cut_is_said(wheels: Path, cut: Path) -> None:
    path = wheels / "tiny_wheel" / "tiny" / "kernels.py"
    with pytest.raises(CutError, match="a_library_for_one_device"):
        Cutter(wheels, cut).cut(path, ["scaled_copy"])
    with pytest.raises(CutError, match="launch is no function of Triton"):
        Cutter(wheels, cut).cut(path, ["launch"])
    with pytest.raises(CutError, match="'absent' is defined nowhere"):
        Cutter(wheels, cut).cut(path, ["absent"])
    text = (
        cut / f"{Cutter(wheels, cut, {'IS_FAST': 'False'}).cut(path, ['scaled_copy'])}.py"
    ).read_text()
    assert "a_library_for_one_device" not in text
    assert "autotune" not in text
    assert "SCALE: tl.constexpr = tl.constexpr(3.0)" in text


def _kernel(x_ptr, y_ptr, N, first, stride, BLOCK: tl.constexpr, FAST: tl.constexpr = False):  # type: ignore[no-untyped-def]
    tl.store(y_ptr, tl.load(x_ptr))


def test_arguments_are_specialised_as_by_the_launcher() -> None:
    function = JITFunction(_kernel, do_not_specialize=["first"])
    given = {"x_ptr": "*bf16", "y_ptr": None, "N": 48, "first": 16, "stride": 1, "BLOCK": 64}
    signature, constants, aligned = specialised(function, given)
    assert signature == {
        "x_ptr": "*bf16", "y_ptr": "constexpr", "N": "i32", "first": "i32",
        "stride": "constexpr", "BLOCK": "constexpr", "FAST": "constexpr",
    }  # fmt: skip
    assert constants == {"y_ptr": None, "stride": 1, "BLOCK": 64, "FAST": False}
    assert set(aligned) == {(0,), (2,)}  # `first` is not specialised
    with pytest.raises(ValueError, match="has no"):
        specialised(function, given | {"other": 1})
    with pytest.raises(ValueError, match="needs N"):
        specialised(function, {key: value for key, value in given.items() if key != "N"})


def _finding(contender: str, moved: int, **fields: Any) -> Finding:
    values: dict[str, Any] = {
        "target": "sm_90", "dtype": "", "config": "c", "tier": "native", "registers": 32,
        "num_warps": 4, "widest_load_bytes": 16,
    }  # fmt: skip
    return Finding(
        problem="copy",
        contender=contender,
        evidence=Evidence(**values | fields),
        moved_bytes=moved,
    )


def test_a_cell_says_who_is_better_in_what() -> None:
    problem = TINY[0]
    findings = [
        _finding("halstack", 1000, registers=64),
        _finding("spills", 900, tier="spilled", spills=4, registers=64),
        _finding("all better", 900, registers=32),
        _finding("nearly", 990, registers=64, widest_load_bytes=8),
        _finding("broken", 0, tier="error", error="no such type"),
    ]
    (cell,) = cells([problem], findings)
    assert cell.beaten_by == ("all better",)
    assert cell.better == ("nearly", "broken")
    assert set(cell.worse) == {"bytes", "resident warps"}
    assert not cell.traded
    text = markdown([cell], {"triton": "3.9.0"}, "2026-11-30")
    assert "**beaten**: all better" in text
    assert "no such type" in text
    assert "`scaled_copy` as in here; not on sm_90, gfx942: of another maker." in text
    (plain,) = document([cell], {}, "2026-11-30")["cells"]
    assert [found["contender"] for found in plain["findings"]][:2] == ["halstack", "spills"]
    assert plain["findings"][0]["resident_warps"] == 32


# Of sm_90: 128 registers let 16 warps in, 255 8, 168 12, 64 32.
OURS = {"registers": 128}


@pytest.mark.parametrize(
    ("moved", "fields", "metric", "price"),
    [
        (400, {"tier": "spilled", "spills": 198, "registers": 128}, "bytes", "spilled, 198 words"),
        (400, {"tier": "emulated", "registers": 128}, "bytes", "emulated"),
        (400, {"registers": 128, "shared_bytes": 240 << 10}, "bytes", "no block of it fits"),
        (700, {"registers": 255}, "bytes", "it pays with resident warps: 8, ours 16"),
        (2100, {"registers": 64}, "resident warps", "it pays with bytes: 0.0 MiB, ours 0.0 MiB"),
    ],
)
def test_what_a_peer_pays_for_is_a_trade_with_its_price(
    moved: int, fields: dict[str, Any], metric: str, price: str
) -> None:
    findings = [_finding("halstack", 1000, **OURS), _finding("theirs", moved, **fields)]
    (cell,) = cells([TINY[0]], findings)
    assert not cell.worse
    assert not cell.beaten_by
    assert set(cell.traded) == {metric}
    assert price in cell.traded[metric]
    text = markdown([cell], {}, "2026-11-30")
    assert f"traded: {metric} (theirs" in text
    assert "in 1 what one has better is traded, in 0 ours is worse" in text
    assert document([cell], {}, "2026-11-30")["cells"][0]["traded"] == dict(cell.traded)


@pytest.mark.parametrize(
    ("moved", "fields", "metric"),
    [
        (400, {"registers": 255}, "bytes"),  # half the warps, each with less to move
        (1900, {"registers": 64}, "resident warps"),  # twice the warps, each with less to move
        (970, {"registers": 168}, "bytes"),  # as many warps but for the margin
        (400, {"registers": 128, "widest_load_bytes": 4}, "bytes"),  # no price that belongs to it
    ],
)
def test_what_a_peer_pays_too_little_for_is_worse(
    moved: int, fields: dict[str, Any], metric: str
) -> None:
    findings = [_finding("halstack", 1000, **OURS), _finding("theirs", moved, **fields)]
    (cell,) = cells([TINY[0]], findings)
    assert set(cell.worse) == {metric}
    assert not cell.traded


def test_a_peer_that_pays_hides_none_that_does_not() -> None:
    findings = [
        _finding("halstack", 1000, **OURS),
        _finding("spills", 300, tier="spilled", spills=9, registers=128),
        _finding("honest", 900, registers=128),
    ]
    (cell,) = cells([TINY[0]], findings)
    assert cell.worse["bytes"].startswith("honest ")
    assert cell.beaten_by == ("honest",)
    assert not cell.traded
    # Ours of a lower tier too is compared with all of its own.
    findings[0] = _finding("halstack", 1000, tier="spilled", spills=9, registers=128)
    (cell,) = cells([TINY[0]], findings)
    assert cell.worse["bytes"].startswith("spills ")


def test_problems_that_are_not_compiled_now_are_kept_whole_with_their_date(tmp_path: Path) -> None:
    found = [
        _finding("halstack", 1000), _finding("theirs", 2000),
        dataclasses.replace(_finding("halstack", 7), problem="other"),
        dataclasses.replace(_finding("theirs", 9), problem="other"),
    ]  # fmt: skip
    problems = [TINY[0], dataclasses.replace(TINY[0], name="other")]
    versions = {"triton": "3.9.0", "fla": "1"}
    earlier = tmp_path / "result.json"
    earlier.write_text(json.dumps(document(list(cells(problems, found)), versions, "2026-01-02")))
    kept, others = load_others(earlier, "3.9.0", ["cop*"], {"sm_90"})
    assert kept == {"other": "2026-01-02"}
    assert others == found[2:]
    renewed = [_finding("halstack", 500), _finding("theirs", 2000), *others]
    whole = list(cells(problems, renewed))
    plain = document(whole, versions, "2026-03-04", kept)
    assert [cell["problem"] for cell in plain["cells"]] == ["copy", "other"]
    assert "earlier result, ours as it was then: other (2026-01-02)" in markdown(
        whole, versions, "2026-03-04", kept
    )
    earlier.write_text(json.dumps(plain))
    assert load_others(earlier, "3.9.0", ["none"], {"sm_90"})[0] == {
        "copy": "2026-03-04", "other": "2026-01-02",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"triton 3\.8\.0, found 3\.9\.0"):
        load_others(earlier, "3.8.0", ["*"], {"sm_90"})


def test_of_a_problem_the_cells_of_other_targets_are_kept(tmp_path: Path) -> None:
    found = [
        _finding(contender, 1000, target=arch)
        for arch in ("sm_90", "gfx942")
        for contender in ("halstack", "theirs")
    ]
    earlier = tmp_path / "result.json"
    earlier.write_text(json.dumps(document(list(cells([TINY[0]], found)), {"triton": "3.9.0"}, "")))
    assert load_others(earlier, "3.9.0", ["copy"], {"sm_90"}) == ({"copy": ""}, found[2:])
    assert load_others(earlier, "3.9.0", ["copy"], {"sm_90", "gfx942"}) == ({}, [])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_every_problem_has_a_variant_of_ours_and_a_peer(target: Target) -> None:
    from hal_kernels.aot.catalogue import find_kernel

    for problem in PROBLEMS:
        if target.arch in problem.skips:
            continue
        kernel = find_kernel(problem.own.kernel_on(target))
        variants = {(v.config, v.dtype): v.constants for v in kernel.variants(target)}
        own = variants[problem.own.config(target), problem.own.dtype(target)]
        assert problem.own.moves(own) > 0
        peers = [peer for peer in problem.peers if target.arch not in peer.skips]
        assert peers, f"{problem.name} on {target.arch} would read as level, compared with nobody"
        for peer in peers:
            arguments = peer.arguments(target)
            for configuration in peer.configurations(target):
                assert peer.moves({**arguments, **configuration}) > 0


def test_the_names_of_problems_and_of_their_skipped_targets_are_right() -> None:
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS)
    known = {target.arch for target in TARGETS}
    for problem in PROBLEMS:
        assert set(problem.skips) <= known
        for peer in problem.peers:
            assert set(peer.skips) <= known


def test_settings_of_the_compiler_hold_for_one_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton import knobs

    seen = []

    def refuse(*_: object, **__: object) -> None:
        seen.append(knobs.amd.use_async_copy)
        raise NotImplementedError("refused")

    function = JITFunction(_kernel, do_not_specialize=["first"])
    monkeypatch.setattr(compiling, "_function", lambda *_: function)
    monkeypatch.setattr(triton, "compile", refuse)
    launch = dataclasses.replace(
        TINY[0].peers[0],
        arguments=lambda _: {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": 48, "first": 1, "stride": 2},
        amd_knobs=lambda target: {"use_async_copy": False} if target.arch == "gfx950" else {},
    )
    before = knobs.amd.use_async_copy
    for arch in ("gfx950", "gfx942"):
        found = compiling.compile_peer(TINY[0], launch, find_target(arch), tmp_path, tmp_path)
        assert "refused" in found.evidence.error
    assert seen == [False, before]
    assert knobs.amd.use_async_copy is before
