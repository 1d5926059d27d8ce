"""Which stored machine code a change touches, as git has it: that is what is compiled anew.

The change is what lies between the working tree and the commit where a branch left the main one; on
the main branch, between the working tree and the last commit that was a day old when the newest was
made: work lands in many commits. Where all of them are younger, it is the commit before the last.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hal.plugins.validation import from_document
from hal_kernels.aot.evidence import Evidence, KernelEvidence, evidence_path, stored_evidence
from hal_kernels.aot.variant import TritonKernel

_DAY_S = 24 * 3600
_MAIN = ("origin/HEAD", "origin/main", "main", "origin/master", "master")


class NoHistory(Exception):
    """There is nothing to compare with: no git, no repository, no earlier commit."""


class Change:
    """root: of the repository, or within it. Raises NoHistory."""

    def __init__(self, root: Path) -> None:
        if shutil.which("git") is None:
            raise NoHistory("git is not installed")
        self._root = root
        self._root = Path(self._git("rev-parse", "--show-toplevel").strip())
        self.base = self._base()
        self.files = frozenset(
            self._root / name
            for name in (
                *self._git("diff", "--name-only", self.base).splitlines(),
                *self._git("ls-files", "--others", "--exclude-standard").splitlines(),
            )
        )

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise NoHistory(f"git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def _base(self) -> str:
        head = self._git("rev-parse", "HEAD").strip()
        for branch in _MAIN:
            try:
                base = self._git("merge-base", "HEAD", branch).strip()
            except NoHistory:
                continue
            if base != head:
                return base
        newest = int(self._git("show", "--no-patch", "--format=%ct", "HEAD"))
        earlier = self._git("rev-list", "--max-count=1", f"--before={newest - _DAY_S}", "HEAD")
        return earlier.strip() or self._git("rev-parse", "--verify", "HEAD~1").strip()

    def evidence(
        self, kernels: Mapping[str, TritonKernel], store: Path
    ) -> Iterator[KernelEvidence]:
        """The stored evidence of kernels whose sources or own file changed, with the variants that
        are not as they were; with all, where none is."""
        for found in stored_evidence(store):
            path = evidence_path(found.kernel, found.target, store).resolve()
            kernel = kernels.get(found.kernel)
            if kernel is None or not found.variants:
                continue
            if not self.files & {path, *sources_of(kernel)}:
                continue
            before = self._variants_before(path)
            new = tuple(variant for variant in found.variants if variant not in before)
            yield dataclasses.replace(found, variants=new or found.variants)

    def _variants_before(self, path: Path) -> Sequence[Evidence]:
        """Of the file at the base; none where it was not there, or of another form."""
        name = path.relative_to(self._root).as_posix()
        try:
            document = json.loads(self._git("show", f"{self.base}:{name}"))
            return [from_document(Evidence, variant) for variant in document["variants"]]
        except (NoHistory, ValueError, KeyError, TypeError):
            return []


def sources_of(kernel: TritonKernel) -> frozenset[Path]:
    """The files that a kernel is made of."""
    specs = [importlib.util.find_spec(name) for name in (kernel.module, *kernel.sources)]
    return frozenset(
        Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin
    )
