"""Writes the skeleton of a plug-in: what `hal plugin new` makes, from templates in this package.

A template is a file of `plugin_template/` whose name ends in `.in`; `$name`, `$package`, `$title`,
`$distribution` and the like are filled in, in its text and in its path.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from hal.errors import UsageError
from hal.plugins.listing import list_plugins

WHO = "hal plugin new"
_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")
# Names that other things have in candidate names, settings and imports.
_RESERVED = frozenset({"hal", "halstack", "test", "tests", "backend", "kernels"})


def checked_name(name: str) -> str:
    """`name`, if a new backend can be called so.

    Raises:
        UsageError: it is no lower-case identifier, reserved, or an installed plug-in has it.
    """
    if _NAME.fullmatch(name) is None or keyword.iskeyword(name):
        plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:31].strip("_")
        is_usable = _NAME.fullmatch(plain) is not None and not keyword.iskeyword(plain)
        remedy = f"for example {plain!r}" if is_usable else "for example 'acme'"
        raise UsageError(
            WHO,
            "a name of 2 to 31 characters: a-z, 0-9 and _, a letter first, no word of Python",
            repr(name),
            remedy,
        )
    if name in _RESERVED:
        raise UsageError(WHO, "a name of its own", f"{name!r}, which is reserved", "choose another")
    for entry in list_plugins():
        if name == entry.name:
            raise UsageError(
                WHO,
                "a name that no installed plug-in has",
                f"{name!r}, the name of {entry.key} {entry.version}",
                "choose another, or uninstall that one",
            )
    return name


def skeleton_files(name: str) -> dict[str, str]:
    """Relative path -> text of every file of the skeleton of `name`.

    Raises:
        UsageError: see `checked_name`.
    """
    checked_name(name)
    values = {
        "name": name,
        "title": name.replace("_", " ").title(),
        "title_joined": name.replace("_", " ").title().replace(" ", ""),
        "package": f"hal_{name}",
        "distribution": f"hal-{name.replace('_', '-')}",
        "version": version("halstack"),
    }
    root = resources.files("hal") / "plugin_template"
    return {
        Template(path.removesuffix(".in")).substitute(values): Template(text).substitute(values)
        for path, text in sorted(_templates(root, ""))
    }


def write_skeleton(name: str, directory: Path) -> list[Path]:
    """Writes the skeleton below `directory`, in a new folder named after the distribution.

    Raises:
        UsageError: see `checked_name`; a file is already there, or cannot be written. Nothing that
            exists is ever changed.
    """
    texts = skeleton_files(name)
    target = directory / f"hal-{name.replace('_', '-')}"
    if target.is_symlink() or target.exists():
        raise UsageError(
            WHO,
            f"no {target} yet: nothing is overwritten",
            "it exists",
            "choose another name or --directory, or move it away",
        )
    written = []
    for relative, text in texts.items():
        path = target / relative
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise UsageError(
                WHO,
                f"{path} to be written",
                f"{type(error).__name__}: {error.strerror or error}",
                "choose a --directory that you can write to",
            ) from error
        written.append(path)
    return written


def _templates(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".in"):
            yield f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")
