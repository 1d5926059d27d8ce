"""`hal kernels list|check|tune`: every Triton kernel with what its machine code proves."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.errors import KernelEvidenceError, UsageError
from hal.text_files import write_user_text
from hal_kernels.aot.catalogue import CATALOGUE, find_kernel
from hal_kernels.aot.checking import check_kernel
from hal_kernels.aot.compile_times import load_compile_times, variant_name
from hal_kernels.aot.evidence import STORE, KernelEvidence, read_evidence
from hal_kernels.aot.evidence_tables import print_evidence, print_overview, stored
from hal_kernels.aot.explanations import explain
from hal_kernels.aot.narrow_loads import explain_narrow_load
from hal_kernels.aot.occupancy import occupancy_of_evidence
from hal_kernels.aot.source_state import outdated
from hal_kernels.aot.targets import TARGETS, Target, find_target
from hal_kernels.aot.triton_versions import (
    REFERENCE,
    STORES,
    minor_version,
    reference_variant,
    store_of,
)
from hal_kernels.aot.variant import TritonKernel
from hal_kernels.tuning.cli import tune_kernels
from hal_kernels.tuning.store import triton_version

KERNELS_SCHEMA = "halstack.kernels/1"

Names = Annotated[
    list[str] | None, typer.Option("--kernel", help="Only this kernel; may be repeated.")
]
Archs = Annotated[
    list[str] | None, typer.Option("--target", help="Only this architecture; may be repeated.")
]


def register_commands(cli: typer.Typer) -> None:
    """Adds `kernels` with its commands to `cli`."""
    app = typer.Typer(name="kernels", help="Triton kernels and what their machine code proves.")
    app.command("list")(list_kernels)
    app.command("check")(check_kernels)
    app.command("tune")(tune_kernels)
    cli.add_typer(app)


def list_kernels(
    kernel: Names = None,
    target: Archs = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write JSON; - is standard output.")
    ] = None,
    triton: Annotated[
        str, typer.Option("--triton", help="Evidence of this version of Triton.")
    ] = REFERENCE,
) -> None:
    """Every kernel with what its machine code proves, target by target. With --kernel or --target
    each variant: tier, instruction, registers, spills, shared memory."""
    kernels, targets = _selected(kernel, target)
    store = _store_named(triton)
    if json_ is not None:
        _write_json(kernels_document(kernels, targets, store), json_)
    elif kernel or target:
        print_evidence(kernels, targets, store)
    else:
        print_overview(kernels, targets, store)


def kernels_document(
    kernels: Sequence[TritonKernel], targets: Sequence[Target], store: Path = STORE
) -> dict[str, Any]:
    """Every kernel with its evidence on the targets, as plain data."""
    return {
        "schema": KERNELS_SCHEMA,
        "kernels": [
            {
                "name": kernel.name,
                "op": kernel.op,
                "evidence": [
                    document
                    for found in stored([kernel], targets, store)
                    for document in _evidence_documents(found)
                ],
            }
            for kernel in kernels
        ],
    }


def _evidence_documents(found: KernelEvidence) -> Iterator[dict[str, Any]]:
    """Every variant with its occupancy, the seconds that it took to compile on this machine, and
    whether it is of another source than is here now."""
    old = outdated(found)
    seconds = load_compile_times(
        found.kernel, found.target, source=found.source_hash, triton=found.triton
    )
    for variant in found.variants:
        held, reference = occupancy_of_evidence(variant), reference_variant(found, variant)
        yield {
            **dataclasses.asdict(variant),
            "occupancy": None if held is None else dataclasses.asdict(held),
            "explanation": explain(found.kernel, variant, reference),
            "narrow_load": explain_narrow_load(found.kernel, variant, reference),
            "compile_s": seconds.get(variant_name(variant.dtype, variant.config)),
            "outdated": old or None,
        }


def check_kernels(
    kernel: Names = None,
    target: Archs = None,
    update: Annotated[bool, typer.Option("--update", help="Store what was found.")] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only kernels whose source changed since.")
    ] = False,
) -> None:
    """Compile the kernels for their targets, without a device, and compare with what is stored of
    the Triton that is installed.

    Exit code 1 if something differs, unless --update stores it, or if a block fits nowhere.
    """
    kernels, targets = _selected(kernel, target)
    store = store_of(triton_version())
    try:
        found = [
            check_kernel(one, arch, store, update=update, changed=changed)
            for one in kernels
            for arch in targets
        ]
    finally:
        read_evidence.cache_clear()
    differing = [difference for difference in found if difference]
    if differing:
        raise KernelEvidenceError(
            "hal kernels check",
            "machine code as the stored evidence says, of which a multiprocessor holds a block",
            "\n    ".join(differing),
            "look at the difference, then store it: hal kernels check --update",
        )


def _store_named(version: str) -> Path:
    if minor_version(version) not in STORES:
        raise UsageError(
            "option --triton",
            f"a version that evidence is kept of: {', '.join(STORES)}",
            repr(version),
            "name one of them",
        )
    return store_of(version)


def _selected(
    kernels: Sequence[str] | None, archs: Sequence[str] | None
) -> tuple[list[TritonKernel], list[Target]]:
    chosen = [find_kernel(name) for name in kernels or CATALOGUE]
    return chosen, [find_target(arch) for arch in archs or [t.arch for t in TARGETS]]


def _write_json(document: dict[str, Any], path: Path) -> None:
    text = json.dumps(document, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        write_user_text(path, text)
    except OSError as error:
        found = f"{path}: {error.strerror or error}"
        raise UsageError(
            "option --json", "a file that can be written", found, "name another"
        ) from error
