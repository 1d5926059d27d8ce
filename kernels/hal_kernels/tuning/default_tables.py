"""Default configurations that are kept as a table in a file: schema and errors that say where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, RootModel, StringConstraints

from hal_kernels.located_documents import read_document
from hal_kernels.tuning.configuration_files import Configuration

Table = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{2,40}$")]
Architecture = Annotated[
    str, StringConstraints(pattern=r"^(cuda|hip|sm_\d{2,3}|gfx[0-9a-f]{3,4})$")
]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{2,40}$")]


class DefaultTables(
    RootModel[
        dict[
            Table,
            Annotated[
                dict[Architecture, Annotated[dict[Name, Configuration], Field(min_length=1)]],
                Field(min_length=2),
            ],
        ]
    ]
):
    """Kernel -> back end of Triton or architecture -> name -> constants and launch options."""


def load_default_tables(path: Path) -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]:
    """Raises SettingsError with the place of what is wrong, also for a table without both back
    ends: an architecture that is not named takes that of its vendor."""
    return read_document(DefaultTables, path).root
