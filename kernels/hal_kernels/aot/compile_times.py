"""How long kernels took to compile on this machine: no part of the evidence, which is the same on
every machine. One file per version of Triton, target and kernel below
$XDG_CACHE_HOME/halstack/kernel_compile_times.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hal.errors import SettingsError
from hal.text_files import write_user_text
from hal_kernels.aot.triton_versions import minor_version
from hal_kernels.located_documents import read_document

_SCHEMA: Literal["halstack.compile-times/1"] = "halstack.compile-times/1"
_REMEDY = "remove the file: the next `hal kernels check` writes it anew"


class CompileTimes(BaseModel):
    """Of one kernel on one target. source: hash of what was compiled. seconds: variant, as
    "dtype config", -> wall time of its compilation;
    what Triton had cached is not in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_: Literal["halstack.compile-times/1"] = Field(alias="schema", default=_SCHEMA)
    source: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    triton: Annotated[str, Field(min_length=1, max_length=60)]
    seconds: dict[str, Annotated[float, Field(ge=0, le=1e6)]]


def compile_times_path(
    kernel: str, target: str, triton: str, environment: Mapping[str, str] | None = None
) -> Path:
    """The file of a kernel on a target. triton: version of the compiler, of which the minor one
    counts, as for evidence."""
    values = os.environ if environment is None else environment
    base = values.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "halstack" / "kernel_compile_times" / f"triton_{minor_version(triton)}"
    return folder / target / f"{kernel}.json"


def save_compile_times(kernel: str, target: str, times: CompileTimes) -> None:
    """Raises SettingsError if the file cannot be written."""
    path = compile_times_path(kernel, target, times.triton)
    text = json.dumps(times.model_dump(by_alias=True), indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_user_text(path, text + "\n")
    except OSError as error:
        raise SettingsError(
            f"file {path}",
            "a place that can be written",
            f"{type(error).__name__}: {error.strerror or error}",
            "set XDG_CACHE_HOME to another folder",
        ) from error


def load_compile_times(
    kernel: str, target: str, *, source: str, triton: str
) -> Mapping[str, float]:
    """Seconds by variant; empty where nothing of that source was compiled here by that version of
    Triton.

    Raises SettingsError for a file that is not right.
    """
    path = compile_times_path(kernel, target, triton)
    if not path.exists():
        return {}
    found = read_document(CompileTimes, path, _REMEDY)
    return found.seconds if found.source == source else {}


def variant_name(dtype: str, config: str) -> str:
    return f"{dtype} {config}".strip()
