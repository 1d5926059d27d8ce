"""Cuts a Triton kernel out of a package that cannot be imported here.

A package of kernels imports its device libraries, its platform detection and its configuration
files when it is imported. A compiler needs none of it: it needs the function, the functions that
it calls and the constants that it reads. `cut` follows those through the files of an unpacked
wheel and writes them, and nothing else, into modules of a temporary folder. Only decorators of
Triton's compiler stay; autotuning is the caller's business.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Modules that are imported as they are; everything else is cut out of the wheel or is an error.
_PLAIN = ("triton", "math")
# What packages re-export of Triton under one of their own modules, guarded against its absence.
_REEXPORTED: Mapping[str, str] = {
    "tl": "import triton.language as {name}",
    "triton": "import triton as {name}",
    "libdevice": "from triton.language.extra import libdevice as {name}",
    "tldevice": "from triton.language.extra import libdevice as {name}",
}
_COMPILED = ("jit", "constexpr_function")


class CutError(Exception):
    """Something that a kernel reads is not in its package, or not as a constant."""


@dataclass(slots=True)
class Cutter:
    """Cuts out of the wheels under `wheels` into modules under `target`.

    given: name -> Python expression for what a package finds out about its host when it is
    imported. modules: what was cut so far, so that two kernels share their helpers.
    """

    wheels: Path
    target: Path
    given: Mapping[str, str] = field(default_factory=dict)
    modules: dict[tuple[Path, tuple[str, ...]], str] = field(default_factory=dict)

    def cut(self, path: Path, names: Iterable[str]) -> str:
        """The name of a module that has these names of the file. Raises CutError."""
        key = (path, tuple(sorted(set(names))))
        if key not in self.modules:
            text = f"{path.relative_to(self.wheels)} {key[1]} {sorted(self.given.items())}"
            digest = hashlib.blake2b(text.encode() + path.read_bytes(), digest_size=6).hexdigest()
            self.modules[key] = f"cut_{digest}"
            lines = _Slice(self, path).lines(key[1])
            (self.target / f"cut_{digest}.py").write_text("\n\n".join(lines) + "\n", "utf-8")
        return self.modules[key]


class _Slice:
    def __init__(self, cutter: Cutter, path: Path) -> None:
        self._cutter = cutter
        self._path = path
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._defined = dict(_definitions(self._tree.body))

    def lines(self, names: Iterable[str]) -> list[str]:
        done: dict[str, str] = {}
        for name in names:
            self._add(name, done, self._tree)
        return ["import triton", *done.values()]

    def _add(self, name: str, done: dict[str, str], reader: ast.AST) -> None:
        if name in done or name == "triton":
            return
        done[name] = ""  # it may call itself
        if name in self._cutter.given:
            text = f"{name} = {self._cutter.given[name]}"
        elif name not in self._defined:
            raise CutError(f"{self._path.name}: {name!r} is defined nowhere in it")
        else:
            node = self._defined[name]
            text = self._imported(node, name, reader) or self._own(node, done)
        done.pop(name)  # behind what it needs
        done[name] = text

    def _own(self, node: ast.stmt, done: dict[str, str]) -> str:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [d for d in map(_compiler_decorator, node.decorator_list) if d]
            if not node.decorator_list:
                raise CutError(f"{self._path.name}: {node.name} is no function of Triton")
        for name in sorted(_free_names(node)):
            self._add(name, done, node)
        return ast.unparse(node)

    def _imported(self, node: ast.stmt, name: str, reader: ast.AST) -> str:
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            if alias.name.split(".")[0] not in _PLAIN:
                raise CutError(f"{self._path.name}: it needs the module {alias.name}")
            return f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        if not isinstance(node, ast.ImportFrom):
            return ""
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        if (node.module or "").split(".")[0] in _PLAIN and not node.level:
            return f"from {node.module} import {original} as {name}"
        if original in _REEXPORTED:
            return _REEXPORTED[original].format(name=name)
        return self._cut_elsewhere(node, original, name, reader)

    def _cut_elsewhere(
        self, node: ast.ImportFrom, original: str, name: str, reader: ast.AST
    ) -> str:
        folder = self._folder(node)
        for module in (folder / f"{original}.py", folder / original / "__init__.py"):
            if module.exists():
                used = {
                    n.attr
                    for n in ast.walk(reader)
                    if isinstance(n, ast.Attribute)
                    and isinstance(n.value, ast.Name)
                    and n.value.id == name
                }
                return f"import {self._cutter.cut(module, used)} as {name}"
        for module in (folder.with_suffix(".py"), folder / "__init__.py"):
            if module.exists():
                return f"from {self._cutter.cut(module, [original])} import {original} as {name}"
        raise CutError(f"{self._path.name}: it needs {node.module}.{original}")

    def _folder(self, node: ast.ImportFrom) -> Path:
        parts = node.module.split(".") if node.module else []
        if node.level:
            return self._path.parents[node.level - 1].joinpath(*parts)
        root = self._path.relative_to(self._cutter.wheels).parts[0]
        return (self._cutter.wheels / root).joinpath(*parts)


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Name -> statement of a module, conditional branches included; the first branch counts."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name.split(".")[0], node)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, (ast.If, ast.Try)):
            for name, inner in (*_definitions(node.body), *_definitions(node.orelse)):
                found.setdefault(name, inner)
    yield from found.items()


def _compiler_decorator(node: ast.expr) -> ast.expr | None:
    """A decorator without what only its launches need; None for one that is not the compiler's."""
    function = node.func if isinstance(node, ast.Call) else node
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _COMPILED:
        return None
    bare = ast.Attribute(ast.Name("triton", ast.Load()), name, ast.Load())
    if not isinstance(node, ast.Call):
        return bare
    kept = [k for k in node.keywords if k.arg == "do_not_specialize"]
    return ast.Call(bare, [], kept) if kept else bare


def _free_names(node: ast.stmt) -> set[str]:
    bound = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    stored = {
        n.id
        for n in ast.walk(node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))
    }
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return read - bound - stored - set(dir(builtins))
