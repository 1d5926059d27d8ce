"""What detection may look at: files, environment, package versions and commands of a host.

Detection never touches the operating system itself; it asks a `HostProbe`. A recorded host
is therefore as good as a real one for planning and for tests.
"""

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from hal.errors import HostReadError
from hal.processes import ProcessEnd, run_bounded

_MAX_FILE_BYTES = 16 << 20


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

    def environ(self, name: str) -> str | None:
        """The value of an environment variable, None if unset."""
        ...

    def package_version(self, name: str) -> str | None:
        """The version of an installed Python distribution, None if not installed."""
        ...

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """Run a command without a shell; None if there is no such command.

        Raises:
            HostReadError: the command did not end before its deadline, or printed too much.
        """
        ...


class LocalHost:
    """The machine this process runs on."""

    def read_text(self, path: str) -> str | None:
        """See `HostProbe.read_text`; undecodable bytes are replaced, 16 MiB are the most."""
        try:
            with Path(path).open("rb") as stream:
                data = stream.read(_MAX_FILE_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(data) > _MAX_FILE_BYTES:
            raise HostReadError(
                f"host file {path}",
                f"at most {_MAX_FILE_BYTES} bytes",
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
            raise _unreadable(path, error) from error

    def exists(self, path: str) -> bool:
        """See `HostProbe.exists`."""
        return os.path.lexists(path)

    def environ(self, name: str) -> str | None:
        """See `HostProbe.environ`."""
        return os.environ.get(name)

    def package_version(self, name: str) -> str | None:
        """See `HostProbe.package_version`."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """See `HostProbe.run_command`; stdout and stderr may have 1 MiB each."""
        command = " ".join(argv)
        try:
            outcome = run_bounded(argv, deadline_s=deadline_s, environment=os.environ)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(f"command {command}", error) from error
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


@dataclass(frozen=True, slots=True)
class RecordedHost:
    """A host as data: what is not recorded does not exist.

    Attributes:
        files: path -> text. A value of None is a file that exists and cannot be read.
        environment: variable -> value.
        packages: distribution name -> version.
        commands: the command line joined by single spaces -> its output.
        nodes: further paths that exist (device nodes, empty folders).
    """

    files: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, CommandOutput] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()

    def read_text(self, path: str) -> str | None:
        """See `HostProbe.read_text`."""
        path = os.path.normpath(path)
        if path not in self.files:
            return None
        text = self.files[path]
        if text is None:
            raise _unreadable(path, PermissionError(13, "recorded as unreadable"))
        return text

    def list_dir(self, path: str) -> tuple[str, ...] | None:
        """See `HostProbe.list_dir`; folders follow from the recorded paths below them."""
        folder = os.path.normpath(path)
        prefix = "/" if folder == "/" else folder + "/"
        names = {
            entry[len(prefix) :].split("/", 1)[0]
            for entry in (*self.files, *self.nodes)
            if entry.startswith(prefix) and len(entry) > len(prefix)
        }
        if not names and folder not in self.nodes:
            return None
        return tuple(sorted(names))

    def exists(self, path: str) -> bool:
        """See `HostProbe.exists`."""
        path = os.path.normpath(path)
        return path in self.files or path in self.nodes or self.list_dir(path) is not None

    def environ(self, name: str) -> str | None:
        """See `HostProbe.environ`."""
        return self.environment.get(name)

    def package_version(self, name: str) -> str | None:
        """See `HostProbe.package_version`."""
        return self.packages.get(name)

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """See `HostProbe.run_command`; the deadline does not apply to a recording."""
        return self.commands.get(" ".join(argv))

    def to_json(self) -> str:
        """The recording as JSON, readable by `from_json`."""
        document = {
            "files": dict(self.files),
            "environment": dict(self.environment),
            "packages": dict(self.packages),
            "commands": {
                command: [output.exit_code, output.stdout, output.stderr]
                for command, output in self.commands.items()
            },
            "nodes": sorted(self.nodes),
        }
        return json.dumps(document, sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RecordedHost":
        """Read a recording.

        Raises:
            HostReadError: the text is not a recording.
        """
        try:
            document = json.loads(text)
            return cls(
                files={str(k): None if v is None else str(v) for k, v in document["files"].items()},
                environment={str(k): str(v) for k, v in document["environment"].items()},
                packages={str(k): str(v) for k, v in document["packages"].items()},
                commands={
                    str(command): CommandOutput(int(code), str(out), str(err))
                    for command, (code, out, err) in document["commands"].items()
                },
                nodes=frozenset(str(node) for node in document["nodes"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HostReadError(
                "host recording",
                "a JSON object with files, environment, packages, commands and nodes",
                f"{type(error).__name__}: {error}",
                "record the host again",
            ) from error


TransferableHost = LocalHost | RecordedHost
"""The hosts that can be handed to a probing child process."""


def _unreadable(what: str, error: OSError) -> HostReadError:
    return HostReadError(
        f"host: {what}",
        "something readable, as it exists",
        f"{type(error).__name__}: {error.strerror or error}",
        "check the permissions of the user this runs as",
    )
