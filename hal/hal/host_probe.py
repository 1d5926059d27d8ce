"""The protocol of a host: every question that detection may ask, and how it is answered."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable

from hal.errors import HostReadError

PYTHON = "{python}"
"""As the first word of a command: the interpreter that this process runs on."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What a command printed. `exit_code` is negative for a signal."""

    exit_code: int
    stdout: str
    stderr: str


@runtime_checkable
class HostProbe(Protocol):
    """The only view of a host that detection has."""

    def read_text(self, path: str) -> str | None:
        """The text of a file; None if there is no such file.

        Raises:
            HostReadError: the file exists and cannot be read.
        """
        ...

    def list_dir(self, path: str) -> tuple[str, ...] | None:
        """Sorted names in a folder; None if there is no such folder.

        Raises:
            HostReadError: the folder exists and cannot be listed.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether a file, folder or device node is there."""
        ...

    def read_link(self, path: str) -> str | None:
        """Where a symbolic link leads in the end, as an absolute path without links; None if there
        is no such path or it is no link."""
        ...

    def environ(self, name: str) -> str | None:
        """The value of an environment variable, None if unset."""
        ...

    def package_version(self, name: str) -> str | None:
        """The version of an installed Python distribution, None if not installed."""
        ...

    def package_file(self, distribution: str, relative_path: str) -> str | None:
        """The text of a file that an installed distribution put on the import path, such as
        ("torch", "torch/version.py"), without importing anything; None if there is none.

        Raises:
            HostReadError: it exists and cannot be read, or the path is not relative.
        """
        ...

    def has_module(self, name: str) -> bool:
        """Whether a top-level module could be imported; it is not.

        Raises:
            HostReadError: the name is not that of a top-level module.
        """
        ...

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """Run a command without a shell; None if there is no such command. `PYTHON` as the first
        word stands for this interpreter.

        Raises:
            HostReadError: the command did not end before its deadline, or printed too much.
        """
        ...


def unreadable(what: str, error: OSError) -> HostReadError:
    """The error for something that exists and cannot be read."""
    return HostReadError(
        f"host: {what}",
        "something readable, as it exists",
        f"{type(error).__name__}: {error.strerror or error}",
        "check the permissions of the user this runs as",
    )


def normalised_distribution(name: str) -> str:
    """`flash_attn` and `Flash.Attn` are one distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def checked_module_name(name: str) -> str:
    """`name`, if it is that of a top-level module.

    Raises:
        HostReadError: it is not: to look below a package would import the package.
    """
    if not name.isidentifier():
        raise HostReadError(
            "host: module", "the name of a top-level module", repr(name), "name the top level only"
        )
    return name


def checked_relative_path(path: str) -> str:
    """`path`, if it stays below the folder it is relative to.

    Raises:
        HostReadError: it is absolute, empty, or has `..`.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise HostReadError(
            "host: file of a distribution",
            "a path relative to the import path, such as torch/version.py",
            repr(path),
            "name a file of the distribution itself",
        )
    return "/".join(parts)
