"""From the MODEL a user names to the path of a model.

MODEL is a path if something is there or if it has a slash or a known ending; any other word is the
name of a preset. What exists wins, so a folder named like a preset is that folder.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from hal.errors import UserError
from hal_engine.preset_files import load_presets, preset_of


class ModelNotFoundError(UserError, ValueError):
    """MODEL names nothing that can be served. Says what was looked at and the remedy."""


def resolve_model(model: str | Path) -> Path:
    """Path of a Hugging Face folder, a .gguf file, or the configuration of a preset.

    A folder without config.json but with exactly one .gguf file is that file. Nothing is
    downloaded. Raises ModelNotFoundError.
    """
    path = Path(model).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # a name too long, a NUL in it
        raise ModelNotFoundError(
            f"MODEL {str(model)!r:.200}: not a usable path: {error}"
        ) from error
    if is_file:
        return _file(path)
    if is_folder:
        return _folder(path)
    preset = load_presets().get(str(model))
    if preset is not None and not path.is_symlink():
        return preset.path
    raise ModelNotFoundError(
        f"MODEL {str(model)!r}: required a folder with config.json and *.safetensors, a .gguf "
        f"file, or the name of a preset (`hal models`), found {_what_is_there(path)}"
    )


def _file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    if path.name == "config.json":
        return path.parent
    if preset_of(path) is not None:
        return path
    raise ModelNotFoundError(
        f"MODEL {str(path)!r}: required a .gguf file or a folder, found a {path.suffix or 'plain'} "
        "file; for safetensors give the folder they are in"
    )


def _folder(path: Path) -> Path:
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelNotFoundError(
            f"MODEL {str(path)!r}: required one .gguf file, found {len(files)}: {names}; name one"
        )
    raise ModelNotFoundError(
        f"MODEL {str(path)!r}: required config.json or a .gguf file in the folder, found neither"
    )


def _what_is_there(path: Path) -> str:
    if path.exists():
        return f"no regular file at {path.absolute()}"
    if path.is_symlink():
        return f"a link to nothing at {path.absolute()}"
    return f"nothing at {path.absolute()}{_hint(path)}"


def _hint(path: Path) -> str:
    """The nearest name beside the missing one or of a preset, or where a model can be had."""
    parent = path.parent
    try:
        names = [entry.name for entry in parent.iterdir()]
    except OSError:  # no such folder, or not one to look into: there is no name to suggest
        names = []
    nearest = difflib.get_close_matches(path.name, names, n=1)
    if nearest:
        return f"; did you mean {str(parent / nearest[0])!r}?"
    named = difflib.get_close_matches(path.name.lower(), load_presets(), n=1)
    if named:
        return f"; did you mean the preset {named[0]!r}?"
    return "; `python -m hal_engine.fetch_smollm2 models` fetches a small model to begin with"
