"""One value of the database: what it is, in which unit, who says so and how far to trust that.

Units of the files (TFLOPS, GB/s, KiB, …) become FLOP/s, OP/s, B, B/s and s here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

T = TypeVar("T")
ConfidenceName: TypeAlias = Literal["vendor-doc", "vendor-code", "measured", "press", "unverified"]
CONFIDENCES: tuple[str, ...] = get_args(ConfidenceName)
MatrixDtype: TypeAlias = Literal[
    "float64",
    "float32",
    "tf32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "fp8_e4m3fn",
    "fp8_e4m3fnuz",
    "fp8_e5m2",
    "fp8_e5m2fnuz",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
]
MATRIX_DTYPES: tuple[str, ...] = get_args(MatrixDtype)
# Of rates: dense, accumulating in float32 (int32 for integers) unless the name says otherwise;
# float32 is the rate of the ordinary lanes, tf32 and the others are the matrix units'.
FLOAT_RATES = (
    "float64",
    "float32",
    "tf32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_block",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "float16_accumulate_float16",
    "fp8_accumulate_float16",
)
INTEGER_RATES = ("int16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the files: its base unit, the factor to it, and the range that can be true."""

    base: str
    factor: float
    low: float
    high: float


_MOST_OPERATIONS = 1e18  # an exaflop per second of one device
_MOST_BYTES = 64e12
_MOST_BYTES_PER_S = 1e15
UNITS: dict[str, Unit] = {
    "GFLOPS": Unit("FLOP/s", 1e9, 1e9, _MOST_OPERATIONS),
    "TFLOPS": Unit("FLOP/s", 1e12, 1e9, _MOST_OPERATIONS),
    "TOPS": Unit("OP/s", 1e12, 1e9, _MOST_OPERATIONS),
    "KiB": Unit("B", 1024, 1024, _MOST_BYTES),
    "MiB": Unit("B", 1 << 20, 1024, _MOST_BYTES),
    "GiB": Unit("B", 1 << 30, 1024, _MOST_BYTES),
    "GB": Unit("B", 1e9, 1024, _MOST_BYTES),
    "GB/s": Unit("B/s", 1e9, 1e6, _MOST_BYTES_PER_S),
    "TB/s": Unit("B/s", 1e12, 1e6, _MOST_BYTES_PER_S),
    "us": Unit("s", 1e-6, 1e-8, 100),
}


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value with its unit, sources and confidence. `value` is None where nothing is public.

    unit: "FLOP/s", "OP/s", "B", "B/s", "s", or empty for what is no quantity.
    source: ids of `Database.sources`. note: what the reader has to know of this value.
    """

    value: T | None
    unit: str = ""
    source: tuple[str, ...] = ()
    confidence: ConfidenceName = "unverified"
    note: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there is a value at all."""
        return self.value is not None

    @property
    def is_verified(self) -> bool:
        """Whether there is a value and somebody vouches for it: only then may it gate behaviour."""
        return self.value is not None and self.confidence != "unverified"

    def scaled(self, factor: float, note: str) -> Fact[float]:
        """The same fact times `factor`, with `note` added.

        Raises:
            TypeError: the value is no number.
        """
        if self.value is not None and not isinstance(self.value, int | float):
            raise TypeError(f"{self.value!r} is no number")
        value = None if self.value is None else self.value * factor
        joined = "; ".join(part for part in (self.note, note) if part)
        return replace(self, value=value, note=joined)  # type: ignore[return-value,arg-type]


def unknown(note: str = "") -> Fact[T]:
    """A fact nobody has published."""
    return Fact(None, note=note)
