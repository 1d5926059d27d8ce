"""Programs of other libraries, audited unchanged: the same bits, and the findings that were
checked by hand in docs/audited-libraries.md."""

from __future__ import annotations

import importlib.metadata
import runpy
from pathlib import Path

import pytest

import hal
from hal.auditing.document import AuditReport

FOLDER = Path(__file__).parents[3] / "examples/audited-libraries"
CHECKED_WITH = {"transformers": "5.24", "diffusers": "0.42", "sentence-transformers": "6.2"}
"""Versions whose findings were read at their lines; of others only the results are compared."""

_CACHE = {("kv-cache-concatenated", "DynamicLayer.update")}
_FOUND = {
    "llama_generate.py": _CACHE | {("kv-heads-expanded", "repeat_kv")},
    "t5_translate.py": _CACHE | {("kv-cache-reordered", "CacheLayerMixin.reorder_cache")},
    "gpt_neox_score.py": {("cat-with-nothing", "DynamicLayer.update")},
    "unet_denoise.py": {("same-product-again", "AttnProcessor2_0.__call__")},
    "dit_sample.py": set(),
    "sentence_embed.py": set(),
}
Found = set[tuple[str, str]]


def _audited(program: str, capsys: pytest.CaptureFixture[str]) -> AuditReport:
    """The report of a program that gave the same bits without one."""
    path = str(FOLDER / program)
    runpy.run_path(path, run_name="__main__")
    alone = capsys.readouterr().out
    with hal.audit() as report:
        runpy.run_path(path, run_name="__main__")
    assert len(alone.split()[-1]) == 64
    assert capsys.readouterr().out.split()[-1] == alone.split()[-1]
    assert report.result is not None
    return report.result


def _found(report: AuditReport) -> Found:
    """Rules and functions; variables of the tests' own environment have no place."""
    return {(f.rule, f.location.function) for f in report.findings if f.location is not None}


def _is_checked(library: str) -> bool:
    return importlib.metadata.version(library).startswith(CHECKED_WITH[library] + ".")


@pytest.mark.parametrize("program", ["llama_generate.py", "t5_translate.py", "gpt_neox_score.py"])
def test_transformers(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    report = _audited(program, capsys)
    assert {row.implementation for row in report.rows if row.op == "attention"} == {"sdpa: flash"}
    if _is_checked("transformers"):
        assert _found(report) == _FOUND[program]


@pytest.mark.parametrize("program", ["unet_denoise.py", "dit_sample.py"])
def test_diffusers(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers")
    report = _audited(program, capsys)
    if _is_checked("diffusers"):
        assert _found(report) == _FOUND[program]


def test_sentence_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "sentence_transformers",
        reason="sentence-transformers is not installed: pip install sentence-transformers",
    )
    report = _audited("sentence_embed.py", capsys)
    if _is_checked("sentence-transformers"):
        assert _found(report) == _FOUND["sentence_embed.py"]
