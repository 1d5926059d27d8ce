"""Parts of documents that are cut out of source files: what a file decides, and code to show."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "hal-example" / "src" / "hal_example" / "plugin.py"
OPENCL = ROOT / "examples" / "hal-opencl" / "src" / "hal_opencl"


def files(folder: str) -> str:
    """A line per Python file of a folder, from its docstring's first paragraph.

    Raises ValueError for a file without one: nobody can say what is decided there.
    """
    base = ROOT / folder
    lines = []
    for path in sorted(base.rglob("*.py"), key=lambda p: (p.parent, p.name != "__init__.py", p)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not docstring:
            raise ValueError(f"{path.relative_to(ROOT)}: required a docstring, found none")
        summary = " ".join(docstring.split("\n\n")[0].split())
        lines.append(f"- `{path.relative_to(ROOT).as_posix()}`: {summary}")
    return "\n".join(lines)


def example(names: str) -> str:
    """Code of the example plug-in: `imports`, or the definitions of these names.

    Raises ValueError for a name that the example does not define.
    """
    return _code(EXAMPLE, names)


def opencl(arguments: str) -> str:
    """Code of the OpenCL plug-in: a file's name, then names of definitions in it. The block says
    to the tests which file it is from.

    Raises ValueError for a name that the file does not define.
    """
    file, _, names = arguments.partition(" ")
    return f"<!-- test: opencl {file} -->\n" + _code(OPENCL / file, names)


def _code(file: Path, names: str) -> str:
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    nodes = ast.parse(text).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {"imports": lines[imports[0].lineno - 1 : imports[-1].end_lineno]}
    for node in nodes:
        part = lines[_first_line(node) - 1 : node.end_lineno]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = part
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = part
    missing = [name for name in names.split() if name not in found]
    if missing:
        raise ValueError(f"{file.name}: required {sorted(found)}, found {missing}")
    parts = ["\n".join(found[name]) for name in names.split()]
    return "```python\n" + "\n\n\n".join(parts) + "\n```"


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def whole_file(path: str) -> str:
    """A text file as it is, e.g. the example's pyproject.toml."""
    text = (ROOT / path).read_text(encoding="utf-8").strip()
    return f"```{Path(path).suffix.removeprefix('.')}\n{text}\n```"
