"""Records every question that a host is asked, with its answer, as a `RecordedHost`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hal.errors import HostReadError
from hal.host_probe import CommandOutput, HostProbe
from hal.host_recorded import RecordedHost

_Answer = TypeVar("_Answer")
_Value = TypeVar("_Value")


class RecordingHost:
    """Answers as `inner` does and remembers it; the same questions to the recording get the same
    answers.

    Attributes:
        inner: the host that answers.
        gaps: what was asked elsewhere and could not be recorded, in words.
    """

    def __init__(self, inner: HostProbe) -> None:
        self.inner = inner
        self._files: dict[str, str | None] = {}
        self._nodes: set[str] = set()
        self._links: dict[str, str] = {}
        self._environment: dict[str, str] = {}
        self._packages: dict[str, str] = {}
        self._package_files: dict[str, dict[str, str | None]] = {}
        self._modules: set[str] = set()
        self._commands: dict[str, CommandOutput | None] = {}
        self.gaps: list[str] = []

    def read_text(self, path: str) -> str | None:
        """See `HostProbe.read_text`."""
        text = self._asked(lambda: self.inner.read_text(path), self._files, path)
        if text is not None:
            self._files[path] = text
        return text

    def list_dir(self, path: str) -> tuple[str, ...] | None:
        """See `HostProbe.list_dir`."""
        names = self._asked(lambda: self.inner.list_dir(path), self._files, path)
        if names is not None:
            folder = path.rstrip("/")
            self._nodes |= {f"{folder}/{name}" for name in names} or {f"{folder}/"}
        return names

    def exists(self, path: str) -> bool:
        """See `HostProbe.exists`."""
        is_there = self.inner.exists(path)
        if is_there:
            self._nodes.add(path)
        return is_there

    def read_link(self, path: str) -> str | None:
        """See `HostProbe.read_link`."""
        target = self.inner.read_link(path)
        if target is not None:
            self._links[path] = target
            if self.inner.exists(target):
                self._nodes.add(target)
        return target

    def environ(self, name: str) -> str | None:
        """See `HostProbe.environ`."""
        value = self.inner.environ(name)
        if value is not None:
            self._environment[name] = value
        return value

    def package_version(self, name: str) -> str | None:
        """See `HostProbe.package_version`."""
        version = self.inner.package_version(name)
        if version is not None:
            self._packages[name] = version
        return version

    def package_file(self, distribution: str, relative_path: str) -> str | None:
        """See `HostProbe.package_file`."""
        files = self._package_files.setdefault(distribution, {})
        text = self._asked(
            lambda: self.inner.package_file(distribution, relative_path), files, relative_path
        )
        if text is not None:
            files[relative_path] = text
        return text

    def has_module(self, name: str) -> bool:
        """See `HostProbe.has_module`."""
        is_there = self.inner.has_module(name)
        if is_there:
            self._modules.add(name)
        return is_there

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """See `HostProbe.run_command`."""
        command = " ".join(argv)
        output = self._asked(
            lambda: self.inner.run_command(argv, deadline_s), self._commands, command
        )
        if output is not None:
            self._commands[command] = output
        return output

    def recorded(self, description: str = "") -> RecordedHost:
        """What was asked so far."""
        return RecordedHost(
            files=dict(self._files),
            environment=dict(self._environment),
            packages=dict(self._packages),
            commands=dict(self._commands),
            nodes=frozenset(self._nodes),
            links=dict(self._links),
            modules=frozenset(self._modules),
            package_files={name: dict(files) for name, files in self._package_files.items()},
            description=description,
        )

    def add(self, other: RecordedHost) -> None:
        """Add what another recording of the same host has. Where both have a thing, that of
        `other` counts."""
        self._files.update(other.files)
        self._nodes |= other.nodes
        self._links.update(other.links)
        self._environment.update(other.environment)
        self._packages.update(other.packages)
        self._modules |= other.modules
        self._commands.update(other.commands)
        for name, files in other.package_files.items():
            self._package_files.setdefault(name, {}).update(files)

    def add_gap(self, what: str) -> None:
        """Note that something is missing in the recording."""
        self.gaps.append(what)

    def _asked(
        self, ask: Callable[[], _Answer], unreadable: dict[str, _Value | None], key: str
    ) -> _Answer:
        try:
            return ask()
        except HostReadError:
            unreadable[key] = None
            raise
