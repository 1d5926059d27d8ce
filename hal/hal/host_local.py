"""The machine this process runs on, as detection sees it: bounded reads, no import, no shell."""

import contextlib
import importlib.metadata
import importlib.util
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hal.errors import HostReadError
from hal.host_probe import (
    PYTHON,
    CommandOutput,
    checked_module_name,
    checked_relative_path,
    unreadable,
)
from hal.processes import ProcessEnd, run_bounded

MAX_FILE_BYTES = 16 << 20
_MAX_COMMAND_BYTES = 1 << 20
_COMMAND_MEMORY_FACTOR = 4


class LocalHost:
    """The machine this process runs on."""

    def read_text(self, path: str) -> str | None:
        """See `HostProbe.read_text`; undecodable bytes are replaced, 16 MiB are the most."""
        try:
            with Path(path).open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        if len(data) > MAX_FILE_BYTES:
            raise HostReadError(
                f"host file {path}",
                f"at most {MAX_FILE_BYTES} bytes",
                "more",
                "detection reads small text files only; name another file",
            )
        return data.decode(errors="replace")

    def list_dir(self, path: str) -> tuple[str, ...] | None:
        """See `HostProbe.list_dir`."""
        try:
            return tuple(sorted(os.listdir(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(path, error) from error

    def exists(self, path: str) -> bool:
        """See `HostProbe.exists`."""
        return os.path.lexists(path)

    def read_link(self, path: str) -> str | None:
        """See `HostProbe.read_link`."""
        return os.path.realpath(path) if os.path.islink(path) else None

    def environ(self, name: str) -> str | None:
        """See `HostProbe.environ`."""
        return os.environ.get(name)

    def package_version(self, name: str) -> str | None:
        """See `HostProbe.package_version`."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def package_file(self, distribution: str, relative_path: str) -> str | None:
        """See `HostProbe.package_file`."""
        relative_path = checked_relative_path(relative_path)
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
        return self.read_text(str(found.locate_file(relative_path)))

    def has_module(self, name: str) -> bool:
        """See `HostProbe.has_module`. A folder that holds no code, such as an uninstalled package
        leaves behind, is no module."""
        name = checked_module_name(name)
        if name in sys.modules:
            return True
        spec = importlib.util.find_spec(name)
        if spec is None:
            return False
        if spec.origin is not None or spec.submodule_search_locations is None:
            return True
        return any(_holds_code(folder) for folder in spec.submodule_search_locations)

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """See `HostProbe.run_command`; stdout and stderr may have 1 MiB each."""
        command = " ".join(argv)
        if argv[0] == PYTHON:
            # -P: a file in the current folder must not be taken for a vendor's module.
            argv = [sys.executable, "-P", *argv[1:]]
        # Vendor extensions of torch are loaded deliberately, never because torch was imported.
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        try:
            with _memory_of_commands():
                outcome = run_bounded(
                    argv,
                    deadline_s=deadline_s,
                    environment=environment,
                    output_limit_bytes=_MAX_COMMAND_BYTES,
                )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(f"command {command}", error) from error
        if outcome.end is not ProcessEnd.EXITED or outcome.exit_code is None:
            raise HostReadError(
                f"command {command}",
                f"an end within {deadline_s:g} s and at most 1 MiB of output",
                outcome.describe(),
                "run it by hand to see why; a hung driver tool often means a hung device",
            )
        return CommandOutput(
            outcome.exit_code,
            outcome.stdout.decode(errors="replace"),
            outcome.stderr.decode(errors="replace"),
        )


@contextlib.contextmanager
def _memory_of_commands() -> Iterator[None]:
    """Within a probe, whose own memory is limited, commands may have four times as much: an
    interpreter that imports torch needs more than a plug-in that reads sysfs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    wanted = _COMMAND_MEMORY_FACTOR * soft
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _holds_code(folder: str) -> bool:
    """Whether a folder without `__init__.py` still has something to import."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False  # it is on no import path that works
    return any(name != "__pycache__" and not name.startswith(".") for name in names)
