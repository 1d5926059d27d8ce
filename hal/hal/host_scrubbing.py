"""Takes out of a recorded host what tells one machine or person from another.

Serial numbers, UUIDs, hardware and network addresses, the names of host and user, home folders,
e-mail addresses and keys of services are replaced, wherever they stand, by stand-ins of the same
form. What was equal stays equal and what differed differs, so that parsers and comparisons still
work. What identifies a model stays: ids, names, versions, part numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from hal.host_probe import PYTHON, CommandOutput
from hal.host_recorded import RecordedHost

_SECRET_KEY = (
    r"serial(?:[ _-]?(?:number|num|no|id))?|s/?n|uuid|unique[ _-]?id|(?:v|nv)?die[ _-]?id|ecid|pdi"
    r"|(?:node|image|port|system|sys)?[ _-]?guid|asset[ _-]?tag|machine[ _-]?id|boot[ _-]?id"
    r"|host[ _-]?name|nodename|lot[ _-]?(?:id|number)|wafer[ _-]?(?:id|number)"
)
# `Serial Number : x`, `"uuid": "x"`, `<serial>x</serial>`, `ASIC_SERIAL: x`, `serial=x`.
_KEYED = re.compile(
    rf"(?P<key>(?<![a-z])(?:{_SECRET_KEY})(?![a-z])[^\S\n]*[\"']?"
    r"[^\S\n]*(?:[:=>]|\t|  )[^\S\n]*[\"']?)"
    r"(?P<value>(?:(?!  )[^\"'<|,;\n])*[^\"'<|,;\s])",
    re.IGNORECASE,
)
_COLUMN = re.compile(rf"[\"']?(?:[a-z_. -]+[._ -])?(?:{_SECRET_KEY})[\"']?", re.IGNORECASE)
_QUERY = re.compile(r"--query-[a-z-]+=(\S+)")
_FILE_NAMES = re.compile(
    r"(?:product|board|chassis)_(?:serial|uuid|asset_tag)|serial(?:_number)?|unique_id|uuid|wwid"
    r"|machine-id|boot_id|hostname|nodename|address|(?:node|sys_image)_guid|node_desc|vpd"
)
_SECRET_VARIABLE = re.compile(
    r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|PROXY|COOKIE|AUTH|BEARER|(?:^|_)PAT$|_DSN$", re.IGNORECASE
)
# Keys of services by the forms that they are known to have, or by the name before them.
_TOKEN = re.compile(
    r"(?<![\w-])(?:hf_|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abprs]-|sk-|AKIA)[\w-]{6,}"
)
_NAMED_TOKEN = re.compile(
    r"(?P<name>(?:api[_-]?key|token|passw(?:or)?d|secret)[\"']?\s{0,4}[=:][ \t]{0,4}[\"']?)"
    r"(?P<value>[^\s\"',;&]+)",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://)[^/\s@\"']{1,200}@")
_EMPTY = re.compile(r"\W*(?:n/?a|none|null|unknown|not supported|unsupported|0x0+|0+|-)?\W*", re.I)
_UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-f])", re.I)
_MAC = re.compile(r"(?<![0-9a-f:])[0-9a-f]{2}(?::[0-9a-f]{2}){5,19}(?![0-9a-f:])", re.I)
_PCI_SERIAL = re.compile(r"(?<![0-9a-f-])[0-9a-f]{2}(?:-[0-9a-f]{2}){5,7}(?![0-9a-f-])", re.I)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_IPV6 = re.compile(
    r"(?<![\w:])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}"
    r"|(?:[0-9a-f]{1,4}:){1,6}:(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,5})?)(?![\w:])",
    re.I,
)
# Four numbers with points are also a version, where the line says so.
_VERSION_WORD = re.compile(
    r"ver|bios|firmware|\bfw\b|driver|cuda|cann|rocm|sdk|release|revision|toolkit|\bv$|==|library",
    re.IGNORECASE,
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_HOME = re.compile(r"(?<![\w.-])/(?:home|Users)/[^/\s:;,'\"<>|]+")
# Names that many machines and people have tell nothing, and occur in the output of tools.
_COMMON_NAMES = frozenset(
    {
        *("localhost", "host", "hostname", "linux", "ubuntu", "debian", "server", "node", "gpu"),
        *("root", "user", "admin", "nobody", "test", "docker", "runner", "worker", "nvidia", "amd"),
    }
)
_SHORTEST_NAME = 3
_VERSION_REACH = 24


@dataclass(frozen=True, slots=True)
class Identity:
    """What names this machine and whoever uses it: looked for in every text."""

    host_names: frozenset[str] = frozenset()
    user_names: frozenset[str] = frozenset()
    home_folders: frozenset[str] = frozenset()


def scrubbed(host: RecordedHost, identity: Identity) -> RecordedHost:
    """The host without serial numbers, addresses and names. See the module."""
    scrubber = _Scrubber(identity)
    return replace(
        host,
        files={
            scrubber.path(path): None if text is None else scrubber.file(path, text)
            for path, text in sorted(host.files.items())
        },
        links={
            scrubber.path(path): scrubber.path(target)
            for path, target in sorted(host.links.items())
        },
        nodes=frozenset(scrubber.path(path) for path in sorted(host.nodes)),
        environment={
            name: scrubber.variable(name, value) for name, value in sorted(host.environment.items())
        },
        package_files={
            name: _scrubbed_package_files(files, scrubber)
            for name, files in sorted(host.package_files.items())
        },
        commands={
            scrubber.text(command): scrubber.command(command, output)
            for command, output in sorted(host.commands.items())
        },
        description=scrubber.text(host.description),
    )


def _scrubbed_package_files(
    files: Mapping[str, str | None], scrubber: _Scrubber
) -> dict[str, str | None]:
    return {
        path: None if text is None else scrubber.text(text, may_have_ipv4=False)
        for path, text in sorted(files.items())
    }


class _Scrubber:
    """Replaces secrets by stand-ins, the same one for the same secret."""

    def __init__(self, identity: Identity) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._given: set[str] = set()
        self._names = [
            *_name_patterns(identity.host_names, "host"),
            *_name_patterns(identity.user_names, "user"),
        ]
        self._homes = sorted(identity.home_folders - {"", "/", "/root"}, key=len, reverse=True)

    def text(self, text: str, *, may_have_ipv4: bool = True) -> str:
        """Any text. Where a text has many versions and no addresses, `may_have_ipv4` is False, as
        four numbers with points may be either."""
        text = _KEYED.sub(self._keyed, text)
        text = self._columns(text)
        text = _UUID.sub(lambda m: self._stand_in("uuid", m.group(), _uuid), text)
        text = _PCI_SERIAL.sub(lambda m: self._stand_in("serial", m.group(), _same_form), text)
        text = _MAC.sub(lambda m: self._stand_in("mac", m.group(), _mac), text)
        text = _IPV6.sub(lambda m: self._stand_in("ipv6", m.group(), _ipv6), text)
        text = _IPV4.sub(self._ipv4, text) if may_have_ipv4 else text
        text = _URL_USER.sub("", text)
        text = _TOKEN.sub("scrubbed", text)
        text = _NAMED_TOKEN.sub(lambda m: m.group("name") + "scrubbed", text)
        text = _EMAIL.sub("user@example.org", text)
        return self._without_names(text)

    def file(self, path: str, text: str) -> str:
        """The text of a file, which is a secret as a whole for some names of files."""
        if _FILE_NAMES.fullmatch(PurePosixPath(path).name):
            return self._value(text.strip()) + "\n" if text.strip() else text
        return self.text(text)

    def path(self, path: str) -> str:
        """A path; PCI addresses in it stay."""
        return self._without_names(
            _UUID.sub(lambda m: self._stand_in("uuid", m.group(), _uuid), path)
        )

    def variable(self, name: str, value: str) -> str:
        """The value of an environment variable."""
        return "scrubbed" if _SECRET_VARIABLE.search(name) else self.text(value)

    def command(self, command: str, output: CommandOutput | None) -> CommandOutput | None:
        """The output of a command."""
        if output is None:
            return None
        stdout = output.stdout
        query = _QUERY.search(command)
        if query is not None and "noheader" in command:
            stdout = self._scrub_columns(query.group(1).split(","), stdout.splitlines(True))
        is_ours = command.startswith(PYTHON)  # a plug-in's own script: versions of software
        return CommandOutput(
            output.exit_code,
            self.text(stdout, may_have_ipv4=not is_ours),
            self.text(output.stderr, may_have_ipv4=not is_ours),
        )

    def _keyed(self, match: re.Match[str]) -> str:
        key, value = match.group("key"), match.group("value")
        rest = ""
        if "=" in key:  # `serial=x more words`: only a value after a colon may have several words
            value, space, rest = value.partition(" ")
            rest = space + rest
        return key + self._value(value) + rest

    def _value(self, value: str) -> str:
        if _EMPTY.fullmatch(value):
            return value
        if _UUID.search(value):
            return _UUID.sub(lambda m: self._stand_in("uuid", m.group(), _uuid), value)
        return self._stand_in("serial", value, _same_form)

    def _columns(self, text: str) -> str:
        """Values below a head of columns divided by commas, as tools write CSV."""
        lines = text.splitlines(True)
        for number, line in enumerate(lines):
            names = line.strip().split(",")
            if len(names) > 1 and any(_COLUMN.fullmatch(name.strip()) for name in names):
                head = "".join(lines[: number + 1])
                return head + self._scrub_columns(names, lines[number + 1 :])
        return text

    def _scrub_columns(self, names: list[str], lines: Iterable[str]) -> str:
        secret = [bool(_COLUMN.fullmatch(name.strip())) for name in names]
        found = []
        for line in lines:
            cells = line.rstrip("\n").split(",")
            if len(cells) == len(names):
                cells = [
                    cell.replace(cell.strip(), self._value(cell.strip()))
                    if is_secret and cell.strip()
                    else cell
                    for cell, is_secret in zip(cells, secret, strict=True)
                ]
                line = ",".join(cells) + ("\n" if line.endswith("\n") else "")
            found.append(line)
        return "".join(found)

    def _ipv4(self, match: re.Match[str]) -> str:
        text = match.group()
        start = match.string.rfind("\n", 0, match.start()) + 1
        start = max(start, match.start() - _VERSION_REACH)
        is_version = _VERSION_WORD.search(match.string[start : match.start()].rstrip(" '\"=:"))
        numbers = [int(part) for part in text.split(".")]
        if is_version or max(numbers) > 255 or numbers[0] in (0, 127):
            return text
        return self._stand_in("ipv4", text, _ipv4)

    def _without_names(self, text: str) -> str:
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?=[/\s:;,'\"<>|]|$)", "/home/user", text)
        text = _HOME.sub("/home/user", text)
        for pattern, stand_in in self._names:
            text = pattern.sub(stand_in, text)
        return text

    def _stand_in(self, kind: str, secret: str, form: Callable[[str, int], str]) -> str:
        if secret in self._given:
            return secret  # met again in a text that was scrubbed in part
        key = (kind, secret.lower())
        if key not in self._stand_ins:
            number = 1 + sum(1 for known, _ in self._stand_ins if known == kind)
            self._stand_ins[key] = form(secret, number)
            self._given.add(self._stand_ins[key])
        return self._stand_ins[key]


def _name_patterns(names: Iterable[str], stand_in: str) -> list[tuple[re.Pattern[str], str]]:
    """Whole words only; the longest first, as one name may be a part of another."""
    wanted = {name.lower() for name in names} | {name.lower().split(".")[0] for name in names}
    chosen = [name for name in wanted if len(name) >= _SHORTEST_NAME and name not in _COMMON_NAMES]
    return [
        (re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE), stand_in)
        for name in sorted(chosen, key=lambda name: (-len(name), name))
    ]


def _uuid(secret: str, number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012d}"


def _mac(secret: str, number: int) -> str:
    pairs = secret.count(":") + 1
    digits = f"{number:0{2 * pairs - 2}x}"
    return "02:" + ":".join(digits[i : i + 2] for i in range(0, len(digits), 2))


def _ipv4(secret: str, number: int) -> str:
    return f"192.0.2.{number % 256}"  # documentation addresses (RFC 5737)


def _ipv6(secret: str, number: int) -> str:
    return f"2001:db8::{number:x}"  # documentation addresses (RFC 3849)


def _same_form(secret: str, number: int) -> str:
    """Zeros for letters and digits, with the number at the end; `0x` and separators stay."""
    prefix = "0x" if secret.lower().startswith("0x") else ""
    body = [*secret[len(prefix) :]]
    places = [index for index, char in enumerate(body) if char.isalnum()]
    digits = str(number).rjust(len(places), "0")
    for index, digit in zip(places, digits, strict=False):
        body[index] = digit
    return prefix + "".join(body) + digits[len(places) :]
