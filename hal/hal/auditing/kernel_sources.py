"""From which source a candidate's kernel comes: hashes that a lock keeps, made without loading it.

What `load` imports is read from its code, and what those modules import of their own package is
read from theirs: no library is imported, so that kernels of devices that are not here have hashes
too. Data beside them (tuned configurations) counts as source. A candidate of another distribution
is also known by that distribution's RECORD, which changes with each of its files.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

from hal.candidates import KernelCandidate
from hal.refusal_log import OUR_PACKAGES

# What every candidate is built on: a change there is one of halstack's version.
_FRAMEWORK: Final = ("hal",)
_MAX_DEPTH = 4
_DATA = frozenset({".json", ".toml", ".yaml", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".cl", ".s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """modules: whose files are in `source`. evidence: hash of what machine code proves about the
    kernels of that op on that architecture, "" where nothing is stored. record: hash of a foreign
    distribution's RECORD, "" for halstack's own."""

    distribution: str
    modules: tuple[str, ...]
    source: str
    evidence: str = ""
    record: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "distribution": self.distribution,
            "modules": list(self.modules),
            "source": self.source,
            "evidence": self.evidence,
            "record": self.record,
        }


def kernel_source(candidate: KernelCandidate, arch: str) -> KernelSource:
    """The hashes of one candidate on an architecture. Reads files; imports and runs nothing."""
    imported, own_modules = _imported_by(candidate.load)
    roots = {*imported, *own_modules, *candidate.modules}
    roots |= {leaf.name for leaf in candidate.leaf if leaf.kind == "symbol"}
    # Of torch and other libraries, which have versions, nothing is followed.
    own = {*map(_package_of, (*own_modules, *candidate.modules)), *OUR_PACKAGES}
    files: dict[str, Path] = {}
    waiting = sorted(name for name in roots if _package_of(name) in own)
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if path is None or name in files:
            continue
        files[name] = path
        package = _package_of(name)
        if package not in _FRAMEWORK:
            waiting += [m for m in _imports_in(path, name) if _package_of(m) == package]
    data = {item for path in files.values() for item in _data_beside(path)}
    evidence = {item for name in candidate.modules for item in _evidence(name, arch)}
    return KernelSource(
        distribution=candidate.distribution,
        modules=tuple(sorted(files)),
        source=_hash([*files.values(), *data]),
        evidence=_hash(evidence) if evidence else "",
        record="" if candidate.distribution == "halstack" else _record(candidate.distribution),
    )


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _imported_by(load: Any) -> tuple[set[str], set[str]]:
    """Names of modules that a function imports when it is called, and the modules that it and what
    it calls stand in."""
    found: set[str] = set()
    own: set[str] = set()
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(load, 0)]
    while waiting:
        item, depth = waiting.pop()
        while isinstance(item, functools.partial):
            item = item.func
        function = getattr(item, "__func__", item)
        if not isinstance(function, FunctionType) or id(function) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(function))
        waiting += [(cell, depth + 1) for cell in _cells(function)]
        if _package_of(function.__module__) in _FRAMEWORK:
            continue  # a wrapper: what it wraps is in its cells
        own.add(function.__module__)
        package = str(function.__globals__.get("__package__") or "")
        for code in _codes(function.__code__):
            found |= set(_imports_of(code, package))
            # `import_module(_KERNEL)`: a constant of the module that names another one
            found |= {
                item
                for name in code.co_names
                if isinstance(item := function.__globals__.get(name), str) and "." in item
            }
            waiting += [
                (function.__globals__[name], depth + 1)
                for name in code.co_names
                if _is_neighbour(function.__globals__.get(name), function)
            ]
    return found, own


def _is_neighbour(item: object, function: FunctionType) -> bool:
    package = _package_of(function.__module__)
    return isinstance(item, FunctionType) and _package_of(item.__module__) == package


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _imports_of(code: CodeType, package: str) -> Iterator[str]:
    """Modules of the import statements in compiled code."""
    constants: list[Any] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(step.argval)
        elif step.opname == "IMPORT_NAME" and len(constants) >= 2:
            level, names = constants[-2:]
            name = str(step.argval)
            if isinstance(level, int) and level > 0:
                name = _absolute(name, package, level)
            yield name
            yield from (f"{name}.{part}" for part in names or () if isinstance(part, str))


def _absolute(name: str, package: str, level: int) -> str:
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


@functools.cache
def _imports_in(path: Path, module: str) -> tuple[str, ...]:
    """Modules that a source file imports anywhere in it."""
    if path.suffix != ".py":
        return ()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            name = _absolute(name, package, node.level) if node.level else name
            found += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(found))


@functools.cache
def _file_of(module: str) -> Path | None:
    """The file of a module, found as the import system would, without importing its parents; None
    for what is no module, or has no file."""
    package, *parts = module.split(".")
    if not all(part.isidentifier() for part in (package, *parts)):
        return None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or (parts and not spec.submodule_search_locations):
        return None
    if not parts:
        return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder).joinpath(*parts)
        for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
    return None


@functools.cache
def _data_beside(path: Path) -> tuple[Path, ...]:
    """Data in the folder of a module, but of a package's root: it is of all its folders."""
    if not (path.parent.parent / "__init__.py").is_file():
        return ()
    return tuple(sorted(p for p in path.parent.iterdir() if p.suffix in _DATA and p.is_file()))


@functools.cache
def _evidence(module: str, arch: str) -> tuple[Path, ...]:
    """What is stored of a module's kernels: `PACKAGE/evidence/ARCH/FOLDER.*.json`."""
    package, _, rest = module.partition(".")
    root = _file_of(package)
    if root is None or not rest:
        return ()
    return tuple(sorted((root.parent / "evidence" / arch).glob(f"{rest.split('.')[0]}.*.json")))


def _hash(paths: Iterable[Path]) -> str:
    """16 hexadecimal digits over names and contents; the folder they are installed in is left
    out."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(set(paths), key=lambda path: path.as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def _record(distribution: str) -> str:
    """Hash of an installed distribution's RECORD, "" if it has none."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if not text:
        return ""
    # Files that installers write themselves differ between two installations of one wheel.
    lines = [line for line in text.splitlines() if ".dist-info/" not in line and ".pyc" not in line]
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=8).hexdigest()
