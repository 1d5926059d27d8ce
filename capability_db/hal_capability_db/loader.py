"""Finds, reads and caches the database: the built-in files, then overlays in their order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hal_capability_db.database import Database
from hal_capability_db.errors import DatabaseError
from hal_capability_db.located import parse, read_text, refusal

# The models behind these take half of the time of a load: a plug-in that only imports this
# package, as every probe does, must not pay for them.
if TYPE_CHECKING:
    from hal_capability_db.assembly import Draft, Layer

BUILT_IN = "built-in"
_DATA = Path(__file__).parent / "data"
_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_FILES = 1000


def load_database(overlays: Sequence[Path | str] | None = None) -> Database:
    """The built-in database under `overlays`, each a file or a folder of files.

    It is read once per process and list of overlays.

    Args:
        overlays: later ones win; by default those of the setting `database.overlays`, as the
            environment and the file that HAL_CONFIG names have it. `()` is the built-in data alone.

    Raises:
        DatabaseError: a file is refused; with its line, the key and what to do.
        SettingsError: the setting cannot be read.
    """
    chosen = configured_overlays() if overlays is None else overlays
    return _load(tuple(Path(overlay).absolute() for overlay in chosen))


def configured_overlays() -> tuple[Path, ...]:
    """The overlays that the setting `database.overlays` names.

    Raises:
        SettingsError: see `hal.settings.Settings.read`.
    """
    from hal.settings import Settings
    from hal_capability_db.settings import DatabaseSettings

    settings = Settings.read()
    return settings.section("database", DatabaseSettings, consumer="capability database").overlays


@lru_cache(maxsize=8)
def _load(overlays: tuple[Path, ...]) -> Database:
    from hal_capability_db.building import build

    draft = draft_database(overlays)
    if draft.problems:
        raise _first(draft.problems)
    return build(draft, tuple(map(str, overlays)))


def draft_database(overlays: Sequence[Path]) -> Draft:
    """Everything that is wrong with the built-in files under `overlays`, beside what is right.

    If the first overlay says `complete: true`, as exports do, it stands alone.
    """
    from hal_capability_db.assembly import assemble
    from hal_capability_db.references import check_references

    layers: list[Layer] = []
    problems: list[DatabaseError] = []
    for overlay in overlays:
        try:
            files = database_files(overlay)
        except DatabaseError as error:
            problems.append(error)
        else:
            layers.append(_read_layer(str(overlay), files, problems))
    base = None if layers and _is_complete(layers[0]) else _built_in()
    draft = assemble(layers, base)
    check_references(draft, base)
    # A file that cannot be read leaves dangling references behind: its own problem comes first.
    draft.problems[:0] = problems
    return draft


def _is_complete(layer: Layer) -> bool:
    """Whether a layer is a database of its own (an export) and not an overlay."""
    return any(document.get("complete") is True for document in layer.documents)


def database_files(path: Path) -> tuple[Path, ...]:
    """The files of a folder (not of folders in it), sorted; or the file itself.

    Raises:
        DatabaseError: there is no such path, or no database file in the folder.
    """
    try:
        if not path.is_dir():
            return (path,)
        names = sorted(item for item in path.iterdir() if item.suffix in _SUFFIXES)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise refusal(path, "", "a readable folder", found, "correct the path") from error
    if not 0 < len(names) <= _MAX_FILES:
        required = f"1 to {_MAX_FILES} files {', '.join(_SUFFIXES)}"
        remedy = "put the database files into it"
        raise refusal(path, "", required, f"{len(names)}", remedy)
    return tuple(names)


@lru_cache(maxsize=1)
def _built_in() -> Draft:
    """The entries of this package's files, which do not change while a process runs."""
    from hal_capability_db.assembly import assemble
    from hal_capability_db.references import check_references

    problems: list[DatabaseError] = []
    draft = assemble([_read_layer(BUILT_IN, database_files(_DATA), problems)])
    check_references(draft)
    draft.problems[:0] = problems
    return draft


def _read_layer(name: str, files: Sequence[Path], problems: list[DatabaseError]) -> Layer:
    from hal_capability_db.assembly import Layer

    documents = []
    for path in files:
        try:
            documents.append(parse(read_text(path), _display(path)))
        except DatabaseError as error:
            problems.append(error)
    return Layer(name, tuple(documents))


def _display(path: Path) -> str:
    """Built-in files by their name in the package, others as they are."""
    return f"hal_capability_db/data/{path.name}" if path.parent == _DATA else str(path)


def _first(problems: Sequence[DatabaseError]) -> DatabaseError:
    first = problems[0]
    if len(problems) == 1:
        return first
    more = f"{first.found} (and {len(problems) - 1} more: see `hal db validate`)"
    return DatabaseError(first.who, first.required, more, first.remedy)
