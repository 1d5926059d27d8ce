"""Virtual environments of the contenders and the weights they read, made on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from contenders.catalogue import ARTIFACTS, ENVIRONMENTS, OWN

_BENCHMARKS = Path(__file__).resolve().parent.parent
CONSTRAINTS = _BENCHMARKS.parent / "constraints.txt"

Say = Callable[[str], None]


class SetupError(RuntimeError):
    """An environment or an artifact could not be made, or is not there."""


def python_of(environment: str, cache: Path) -> Path:
    """The interpreter of an environment. Raises SetupError if it was not set up."""
    if environment == OWN:
        return Path(sys.executable)
    python = cache / environment / "bin" / "python"
    if not _is_complete(environment, cache):
        raise SetupError(
            f"environment {environment}: required {python}, found none that is complete; run "
            f"`python benchmarks/peers.py --setup {environment}`"
        )
    return python


def create_environment(name: str, cache: Path, say: Say) -> None:
    """Makes one environment with pip, torch pinned by constraints.txt; does nothing if complete.

    Raises SetupError with the step that failed.
    """
    if name == OWN or _is_complete(name, cache):
        return
    environment = ENVIRONMENTS[name]
    folder = cache / name
    say(f"{name}: installing {environment.size} into {folder} {environment.note}".rstrip())
    cache.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], f"environment {name}: venv")
    for step in environment.steps:
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        command += ["--disable-pip-version-check", "-c", str(CONSTRAINTS), *step]
        _run(command, f"environment {name}: pip install {' '.join(step)}")
    if environment.removed:
        command = [str(folder / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes"]
        _run([*command, *environment.removed], f"environment {name}: pip uninstall")
    if environment.alias is not None:
        _alias_metadata(folder, *environment.alias)
    _mark(name, cache).write_text("complete\n")


def _alias_metadata(folder: Path, alias: str, distribution: str) -> None:
    """Lets a distribution's version be asked for under a second name as well."""
    stem = distribution.replace("-", "_")
    for installed in folder.glob(f"lib/python*/site-packages/{stem}-*.dist-info"):
        version = installed.name.removeprefix(f"{stem}-").removesuffix(".dist-info")
        twin = installed.with_name(f"{alias}-{version}.dist-info")
        twin.mkdir(exist_ok=True)
        (twin / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {alias}\nVersion: {version}\n"
        )


def create_artifact(path: str, cache: Path, gguf: Path, say: Say) -> None:
    """Makes weights in one format and what they are made from; does nothing if they exist.

    Raises SetupError.
    """
    artifact = ARTIFACTS[path]
    models = cache / "models"
    if (models / path).exists():
        return
    for needed in artifact.needs:
        create_artifact(needed, cache, gguf, say)
    create_environment(artifact.environment, cache, say)
    say(f"{path}: making it from {gguf.name}")
    models.mkdir(parents=True, exist_ok=True)
    command = [str(python_of(artifact.environment, cache)), "-m", "contenders.weights", path]
    command += ["--maker", artifact.maker, "--models", str(models), "--gguf", str(gguf)]
    _run(command, f"weights {path}")


def _is_complete(name: str, cache: Path) -> bool:
    return _mark(name, cache).exists()


def _mark(name: str, cache: Path) -> Path:
    return cache / name / ".halstack-complete"


def _run(command: list[str], what: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment = dict(os.environ) | offline | {"PYTHONPATH": str(_BENCHMARKS)}
    ended = subprocess.run(
        command,
        env=environment,
        cwd=_BENCHMARKS,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if ended.returncode != 0:
        tail = ended.stdout.decode(errors="replace").strip()[-1500:]
        raise SetupError(f"{what}: ended with {ended.returncode}: {tail}")
