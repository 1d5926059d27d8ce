"""The generated parts of the documents are what the code makes now."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest

from document_blocks import ROOT
from hal.candidates import KernelCandidate
from hal.ops import CATALOGUE
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier

Modules = dict[str, ModuleType]


def test_documents_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_edited_part_is_restored(generator: Modules) -> None:
    document = "docs/support.md"
    text = (ROOT / document).read_text(encoding="utf-8")
    edited = text.replace("| `auto` | `float32` |", "| `auto` | `bfloat16` |")
    assert edited != text
    assert generator["generate"].render(edited, document) == text


@pytest.mark.parametrize(
    "text",
    ["<!-- generated: tiers -->\n", "<!-- generated: nonsense -->\n<!-- end generated -->\n"],
    ids=["no end", "unknown part"],
)
def test_a_malformed_part_is_an_error(generator: Modules, text: str) -> None:
    with pytest.raises(ValueError, match="required"):
        generator["generate"].render(text, "a.md")


def test_limits_are_found_by_asking(generator: Modules) -> None:
    """A limit that holds for one format only is found, and for which it holds."""

    def reasons(request: object) -> list[Reason]:
        unmet = []
        if request.dtype != "float16":
            unmet.append(
                Reason(what="dtype", required="float16", found=request.dtype, kind=ReasonKind.SCOPE)
            )
        if request.weight_format.name == "int8_g32" and request.k % 32:
            unmet.append(Reason(what="K", required="a multiple of 32", found=str(request.k)))
        return unmet

    candidate = KernelCandidate(
        name="test.gemm.one",
        op="gemm",
        tier=Tier.TUNED,
        summary="for this test",
        not_supported_reasons=reasons,
        load=lambda: lambda request, **static: lambda x: x,
    )
    found = generator["support"].requirements(CATALOGUE["gemm"], candidate)
    assert sorted(found) == [
        (ReasonKind.ARGUMENT, "K: a multiple of 32 (for int8_g32)"),
        (ReasonKind.SCOPE, "dtype: float16"),
    ]


def test_a_limit_of_a_format_that_is_not_served_is_none(generator: Modules) -> None:
    """Of two that are, each is said of its own."""
    served = ("int8_channel", "int4_g32", "int4_g128", "int4_g128_zero")

    def reasons(request: object) -> list[Reason]:
        form, unmet = request.weight_format, []
        if form.name not in served:
            found = Reason(what="format", required=" or ".join(served), found=form.name,
                           kind=ReasonKind.SCOPE)  # fmt: skip
            unmet.append(found)
        if form.group_size and request.k % form.group_size:
            required = f"a multiple of {form.group_size}"
            unmet.append(Reason(what="K", required=required, found=str(request.k)))
        if request.k > 65535:
            unmet.append(Reason(what="K", required="at most 65535", found=str(request.k)))
        return unmet

    candidate = KernelCandidate(
        name="test.gemm.two",
        op="gemm",
        tier=Tier.TUNED,
        summary="for this test",
        not_supported_reasons=reasons,
        load=lambda: lambda request, **static: lambda x: x,
    )
    (told,) = [
        text
        for kind, text in generator["support"].requirements(CATALOGUE["gemm"], candidate)
        if kind is ReasonKind.ARGUMENT
    ]
    assert told == (
        "K: a multiple of 128 (for int4_g128 or int4_g128_zero), a multiple of 32 (for int4_g32), "
        "at most 65535"
    )


def test_every_op_and_candidate_is_listed(generator: Modules) -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    for op in CATALOGUE:
        assert f"### `{op}`" in text
        for _, candidate in generator["support"].offers(op):
            assert len(re.findall(rf"^\| `{re.escape(candidate.name)}` \|", text, re.M)) == 1


def test_architecture_lists_every_file_once() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `([^`]+\.py)`: \S", text, re.MULTILINE)
    folders = ("hal", "backends", "kernels", "capability_db", "engine")
    files = [p.relative_to(ROOT).as_posix() for f in folders for p in (ROOT / f).rglob("*.py")]
    assert sorted(listed) == sorted(files)


def test_paths_of_the_documents_exist() -> None:
    """Paths from the root, as ARCHITECTURE.md and CONTRIBUTING.md name them."""
    for document in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = re.findall(
            r"`((?:hal|backends|kernels|engine|tests|docs|capability_db)/[^`*<]*)`", text
        )
        assert len(named) > 3
        missing = [path for path in named if not (ROOT / path).exists()]
        assert not missing, document
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    life = text[text.index("## The life of a request") : text.index("## Where is it decided?")]
    short = re.findall(r"`([\w/]+\.py)`", life)
    assert len(short) > 10
    assert not [name for name in short if not (ROOT / "engine" / "hal_engine" / name).is_file()]
