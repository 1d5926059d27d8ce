"""Shape classes: which calls of a kernel share a configuration. One class per dtype, form, the
sizes that stay the same for a call site, and a power of two of rows.

As text a class is what `hal kernels tune --shape` takes: "dtype=bfloat16,form=gated,k=7168,n=4096,
rows=16". Few rows share a class, as a tile of a matrix unit has sixteen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_ROWS, MOST_ROWS = 16, 8192
MAX_SIZE = 1 << 24
_PART = re.compile(r"([a-z][a-z_]*)=([A-Za-z0-9_-]+)")


def rows_class(rows: int) -> int:
    """The power of two from 16 to 8192 that so many rows belong to."""
    return min(MOST_ROWS, max(LEAST_ROWS, 1 << max(0, rows - 1).bit_length()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeClass:
    """dtype: the operands' one that the kernel claims. form: what else changes its code ("gated").
    sizes: name -> number, sorted by name. rows: of the class, see `rows_class`."""

    dtype: str
    form: str
    sizes: tuple[tuple[str, int], ...]
    rows: int

    def __str__(self) -> str:
        parts = [f"dtype={self.dtype}", f"form={self.form}"]
        parts += [f"{name}={value}" for name, value in self.sizes]
        return ",".join([*parts, f"rows={self.rows}"])

    def size(self, name: str) -> int:
        """Raises KeyError for a size that the class has not."""
        return dict(self.sizes)[name]


def shape_class(dtype: str, form: str, rows: int, sizes: Mapping[str, int]) -> ShapeClass:
    """The class of a call with so many rows."""
    ordered = tuple(sorted(sizes.items()))
    return ShapeClass(dtype=dtype, form=form, sizes=ordered, rows=rows_class(rows))


def parse_shape(
    text: str, *, size_names: Sequence[str], forms: Sequence[str], dtypes: Sequence[str]
) -> ShapeClass:
    """The class that a text names. dtype and form may be left out where there is one.

    Raises ValueError that says what is wrong.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None or found[1] in values:
            raise ValueError(f"required NAME=VALUE parts, each once, found {part.strip()!r}")
        values[found[1]] = found[2]
    known = ["dtype", "form", "rows", *size_names]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise ValueError(f"required {', '.join(known)}, found {', '.join(unknown)}")
    missing = [name for name in (*size_names, "rows") if name not in values]
    if missing:
        raise ValueError(f"required {', '.join(missing)} too")
    return shape_class(
        _one_of("dtype", values.get("dtype"), dtypes),
        _one_of("form", values.get("form"), forms),
        _count("rows", values["rows"]),
        {name: _count(name, values[name]) for name in size_names},
    )


def _one_of(name: str, value: str | None, allowed: Sequence[str]) -> str:
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise ValueError(f"required {name} as one of {', '.join(allowed)}, found {value}")
    return value


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= MAX_SIZE:
        raise ValueError(f"required {name} as a number from 1 to {MAX_SIZE:,}, found {text}")
    return int(text)
