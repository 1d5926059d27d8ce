"""Our Triton kernels beside the public ones of peers, by what they compile to.

No device is needed: ours and theirs are compiled for the same problem by the same Triton and read
by the same reader (see kernel_peers/). A peer's wheel is unpacked and its kernels are cut out of
it; nothing of it is imported, installed or kept.

  python benchmarks/peer_kernels.py                     downloads the wheels; takes half an hour
  python benchmarks/peer_kernels.py --wheels FOLDER     the same with a folder that keeps them
  python benchmarks/peer_kernels.py --target sm_90 --problem 'decode*'
  python benchmarks/peer_kernels.py --peers RESULT.json ours alone; the peers' as in that result
  python benchmarks/peer_kernels.py --problem 'layer norm' --beside RESULT.json
                                                        the others as they are in that result;
                                                        with --target its cells there alone

Results: benchmarks/results/<date>-peer-kernels.json and .md, unless only a part was asked for. Exit
status 1 if ours does not compile where a peer's does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from kernel_peers.compiling import Finding, compile_all
from kernel_peers.earlier import check_complete, load_earlier, load_others
from kernel_peers.problems import PROBLEMS
from kernel_peers.table import Cell, cells, document, markdown
from kernel_peers.wheels import download, versions

from hal_kernels.aot.targets import TARGETS as COMPILED
from hal_kernels.aot.targets import find_target

RESULTS = Path(__file__).resolve().parent / "results"
TARGETS = tuple(target.arch for target in COMPILED)


def main() -> int:
    """Compiles, prints the table and stores it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of unpacked wheels, kept")
    parser.add_argument("--target", action="append", help="only this architecture")
    parser.add_argument(
        "--problem", action="append", help="only problems of this pattern; may be repeated"
    )
    parser.add_argument(
        "--beside", type=Path, help="result in JSON that has the cells that are not asked for"
    )
    parser.add_argument(
        "--peers", type=Path, help="result in JSON whose peers are taken: their wheels are the same"
    )
    parser.add_argument("--store", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    targets: Sequence[str] = given.target or TARGETS
    patterns: Sequence[str] = given.problem or ("*",)
    kept: dict[str, str] = {}
    try:
        named, findings = (
            _beside_earlier(given.peers, targets, patterns)
            if given.peers
            else _beside_wheels(given.wheels, targets, patterns)
        )
        if given.beside:
            kept, others = load_others(given.beside, metadata.version("triton"), patterns, targets)
            findings += others
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # Kept cells come behind those that were compiled now.
    order = {arch: place for place, arch in enumerate(dict.fromkeys((*TARGETS, *targets)))}
    findings.sort(key=lambda one: order.get(one.evidence.target, len(order)))
    found = list(cells(PROBLEMS, findings))
    today = datetime.date.today().isoformat()
    text = markdown(found, named, today, kept)
    print(text)
    if given.beside or not (given.problem or given.target):
        stem = given.store / f"{today}-peer-kernels"
        content = json.dumps(document(found, named, today, kept), indent=1) + "\n"
        stem.with_suffix(".json").write_text(content, encoding="utf-8")
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
    return int(any(_is_missing(cell) for cell in found))


def _beside_wheels(
    wheels: Path | None, targets: Sequence[str], patterns: Sequence[str]
) -> tuple[dict[str, str], list[Finding]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = wheels or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        download(folder)
        findings = _findings("kernel_peers.problems", folder.resolve(), targets, patterns)
        return {"triton": metadata.version("triton"), **versions(folder)}, findings


def _beside_earlier(
    path: Path, targets: Sequence[str], patterns: Sequence[str]
) -> tuple[dict[str, str], list[Finding]]:
    named, peers = load_earlier(path, metadata.version("triton"))
    own = _findings("kernel_peers.own_problems", path.parent, targets, patterns)
    check_complete(own, peers, path)
    wanted = {(one.problem, one.evidence.target) for one in own}
    return named, [*own, *(one for one in peers if (one.problem, one.evidence.target) in wanted)]


def _findings(
    module: str, folder: Path, targets: Sequence[str], patterns: Sequence[str]
) -> list[Finding]:
    found: dict[tuple[str, str, str], Finding] = {}  # patterns may overlap
    for name in targets:
        for pattern in patterns:
            for one in compile_all(module, find_target(name), folder, pattern):
                print(f"{name} {one.problem}: {one.contender} {one.evidence.tier}", file=sys.stderr)
                found.setdefault((name, one.problem, one.contender), one)
    return list(found.values())


def _is_missing(cell: Cell) -> bool:
    compiles = any(not peer.evidence.error for peer in cell.peers)
    return bool(cell.own.evidence.error) and compiles


if __name__ == "__main__":
    sys.exit(main())
