"""The fenced blocks of the documents, with what a test is to do with each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"(?:<!-- test: (?P<directive>[^>]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. directive: the words of the `<!-- test: … -->` comment before it."""

    document: str
    line: int
    language: str
    directive: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One `$ command` of a console block, and the output that the document shows for it."""

    line: str
    shown: tuple[str, ...]


def documents() -> list[Path]:
    """Every Markdown file of the repository that a reader is sent to."""
    folders = (ROOT, ROOT / "docs", *sorted((ROOT / "examples").iterdir()))
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            document=path.relative_to(ROOT).as_posix(),
            line=text[: match.start("language")].count("\n") + 1,
            language=match["language"],
            directive=tuple((match["directive"] or "").split()),
            text=match["text"],
        )
        for match in _FENCE.finditer(text)
    ]


def all_blocks() -> list[Block]:
    return [block for path in documents() for block in blocks_of(path)]


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block; a final backslash or an open quote continues a line."""
    commands: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            written = [line.removeprefix("$ ")]
            while written[-1].endswith("\\") or "\n".join(written).count("'") % 2:
                written.append(next(lines))
            commands.append(Command("\n".join(written), ()))
        elif commands:
            last = commands[-1]
            commands[-1] = Command(last.line, (*last.shown, line))
    return commands
