"""A recorded host: what is not recorded does not exist. Paths are looked up through its links."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hal.errors import HostReadError
from hal.host_document import MAX_RECORDING_BYTES, parse_document, write_document
from hal.host_probe import (
    CommandOutput,
    checked_module_name,
    checked_relative_path,
    normalised_distribution,
    unreadable,
)
from hal.text_files import read_regular_text

_MAX_LINKS_FOLLOWED = 40  # as the kernel


@dataclass(frozen=True, slots=True)
class RecordedHost:
    """A host as data.

    Paths may be given as they were asked for, also through links: they are brought to the form
    without links, in which they are kept. Names of distributions are normalised.

    Attributes:
        files: path -> text. A value of None is a file or folder that exists and cannot be read.
        environment: variable -> value.
        packages: distribution name -> version.
        commands: the command line joined by single spaces -> its output. A value of None is a
            command that exists and does not come to an end.
        nodes: further paths that exist, such as device nodes; with `/` at the end, empty folders.
        links: path of a symbolic link -> where it leads.
        modules: top-level modules that can be imported.
        package_files: distribution -> relative path -> text, None if it cannot be read.
        description: one line for people.

    Raises:
        HostReadError: the links lead in a circle.
    """

    files: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, CommandOutput | None] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    package_files: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    description: str = ""
    _folders: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        links = _canonical_links(self.links)
        files = {_resolve(path, links): text for path, text in self.files.items()}
        nodes = {_resolve_node(path, links) for path in self.nodes} - files.keys()
        values: dict[str, object] = {
            "links": links,
            "files": files,
            "nodes": frozenset(nodes),
            "packages": {normalised_distribution(k): v for k, v in self.packages.items()},
            "package_files": {
                normalised_distribution(k): dict(v) for k, v in self.package_files.items()
            },
            "_folders": _folders((*files, *nodes, *links)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def read_text(self, path: str) -> str | None:
        """See `HostProbe.read_text`."""
        path = _resolve(path, self.links)
        if path not in self.files:
            return None
        return _recorded_text(path, self.files[path])

    def list_dir(self, path: str) -> tuple[str, ...] | None:
        """See `HostProbe.list_dir`; folders follow from the recorded paths below them."""
        path = _resolve(path, self.links)
        if path in self._folders:
            return self._folders[path]
        if path in self.files:
            if self.files[path] is None:
                _recorded_text(path, None)
            return None
        return None

    def exists(self, path: str) -> bool:
        """See `HostProbe.exists`."""
        if _link_path(path, self.links) in self.links:
            return True
        path = _resolve(path, self.links)
        return path in self.files or path in self.nodes or path in self._folders

    def read_link(self, path: str) -> str | None:
        """See `HostProbe.read_link`."""
        path = _link_path(path, self.links)
        return _resolve(path, self.links) if path in self.links else None

    def environ(self, name: str) -> str | None:
        """See `HostProbe.environ`."""
        return self.environment.get(name)

    def package_version(self, name: str) -> str | None:
        """See `HostProbe.package_version`."""
        return self.packages.get(normalised_distribution(name))

    def package_file(self, distribution: str, relative_path: str) -> str | None:
        """See `HostProbe.package_file`."""
        relative_path = checked_relative_path(relative_path)
        name = normalised_distribution(distribution)
        files = self.package_files.get(name, {})
        if relative_path not in files:
            return None
        return _recorded_text(f"{relative_path} of {name}", files[relative_path])

    def has_module(self, name: str) -> bool:
        """See `HostProbe.has_module`."""
        return checked_module_name(name) in self.modules

    def run_command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput | None:
        """See `HostProbe.run_command`; the deadline does not apply to a recording."""
        command = " ".join(argv)
        if command in self.commands and self.commands[command] is None:
            raise HostReadError(
                f"command {command}",
                f"an end within {deadline_s:g} s and at most 1 MiB of output",
                "recorded as a command that does not end",
                "run it by hand to see why; a hung driver tool often means a hung device",
            )
        return self.commands.get(command)

    def to_json(self) -> str:
        """The recording as JSON, readable by `from_json`."""
        names = ("files", "environment", "packages", "commands", "nodes", "links", "modules")
        values = {name: getattr(self, name) for name in names}
        return write_document(
            values | {"package_files": self.package_files, "description": self.description}
        )

    @classmethod
    def from_json(cls, text: str, source: str = "host recording") -> "RecordedHost":
        """Read a recording.

        Raises:
            HostReadError: the text is not a recording of this version; says where and what.
        """
        return cls(**parse_document(text, source))


def load_recorded_host(path: Path) -> RecordedHost:
    """Read the recording of a host from a file.

    Raises:
        HostReadError: there is no such file, or it is not a recording of this version.
    """
    source = f"host recording {path}"
    try:
        text = read_regular_text(path, MAX_RECORDING_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise HostReadError(
            source,
            "a readable file in UTF-8",
            f"{type(error).__name__}: {error}",
            "make one with `hal devices --record FILE`",
        ) from error
    return RecordedHost.from_json(text, source)


def _resolve_node(path: str, links: Mapping[str, str]) -> str:
    resolved = _resolve(path, links)
    return f"{resolved}/" if path.endswith("/") and resolved != "/" else resolved


def _recorded_text(what: str, text: str | None) -> str:
    if text is None:
        raise unreadable(what, PermissionError(13, "recorded as unreadable"))
    return text


def _canonical_links(links: Mapping[str, str]) -> Mapping[str, str]:
    """The links with paths and targets free of other links; shallow ones first, as deeper ones
    may be given through them."""
    found: dict[str, str] = {}
    for path in sorted(links, key=lambda path: path.count("/")):
        found[_link_path(path, found)] = _normal(links[path])
    return {path: _resolve(path, found) for path in found}


def _link_path(path: str, links: Mapping[str, str]) -> str:
    """The path with its folder, but not itself, freed of links."""
    folder, name = os.path.split(_normal(path))
    return os.path.join(_resolve(folder, links), name) if name else folder


def _resolve(path: str, links: Mapping[str, str]) -> str:
    path = _normal(path)
    if not links:
        return path
    for _ in range(_MAX_LINKS_FOLLOWED):
        link = next((part for part in _parents(path) if part in links), None)
        if link is None:
            return path
        path = _normal(links[link] + path[len(link) :])
    raise HostReadError(
        f"host: {path}",
        f"a path with at most {_MAX_LINKS_FOLLOWED} links",
        "more, or links in a circle",
        "record the host again",
    )


def _normal(path: str) -> str:
    path = os.path.normpath(path)
    return path[1:] if path.startswith("//") else path


def _parents(path: str) -> Iterator[str]:
    """Every leading part of the path, shortest first, itself last."""
    end = path.find("/", 1)
    while end > 0:
        yield path[:end]
        end = path.find("/", end + 1)
    yield path


def _folders(paths: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Every folder that follows from the paths -> the sorted names in it."""
    names: dict[str, set[str]] = {}
    for path in paths:
        if path.endswith("/"):
            path = path.rstrip("/")
            names.setdefault(path, set())
        while path not in ("/", ""):
            folder, name = os.path.split(path)
            known = names.setdefault(folder, set())
            if name in known:
                break
            known.add(name)
            path = folder
    return {folder: tuple(sorted(found)) for folder, found in names.items()}
