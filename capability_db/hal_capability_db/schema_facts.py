"""The values of a database file: what each kind of sourced value may be, and in which range.

The checks below raise a `fault`, which names the key below the model that is judged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from hal_capability_db.values import (
    FLOAT_RATES,
    INTEGER_RATES,
    UNITS,
    ConfidenceName,
    MatrixDtype,
)

Id = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._+-]{0,63}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Text = Annotated[str, StringConstraints(max_length=2000)]
PciId = Annotated[str, StringConstraints(pattern=r"^0x[0-9a-f]{4}$")]
Subsystem = Annotated[str, StringConstraints(pattern=r"^0x[0-9a-f]{4}:0x[0-9a-f]{4}$")]
TritonTarget = Annotated[str, StringConstraints(pattern=r"^[a-z]+:[A-Za-z0-9_.-]+:[0-9]+$")]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Fabric = Literal[
    "none",
    "nvlink",
    "xgmi",
    "hccs",
    "mlulink",
    "mtlink",
    "metaxlink",
    "ixlink",
    "xpulink",
    "blink",
    "roce",
    "xelink",
]
PeerAccess = Literal["enabled", "disabled", "conditional"]


class Entry(BaseModel):
    """Root of the entries: strict types, no unknown keys, finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Sourced(Entry):
    """What every group of values carries."""

    source: list[Id] = Field(min_length=1, description="ids of the table of sources")
    confidence: ConfidenceName = Field(description="how far to trust it")
    note: Text = Field(default="", description="what the reader has to know")


def fault(required: str, found: object, *path: str) -> PydanticCustomError:
    """What is wrong at `path` below the model that is judged."""
    context = {"required": required, "found": found, "path": path}
    return PydanticCustomError("fault", "{required}", context)


def check_quantity(value: float, unit: str, *path: str) -> None:
    """Refuse a value outside the range that its unit can truly have."""
    known = UNITS[unit]
    based = value * known.factor
    if not known.low <= based <= known.high:
        low, high = known.low / known.factor, known.high / known.factor
        raise fault(f"{low:g} to {high:g} {unit}", f"{value:g} {unit}", *path)


class QuantityEntry(Sourced):
    """A number with a unit. `per: card` for a figure of a card of several torch devices."""

    value: float | None = Field(description="the number; null: not public")
    unit: Literal["KiB", "MiB", "GiB", "GB", "GB/s", "TB/s"] = Field(description="its unit")
    per: Literal["device", "card"] = Field(default="device", description="whose figure it is")

    @model_validator(mode="after")
    def _judge(self) -> QuantityEntry:
        if self.value is not None:
            check_quantity(self.value, self.unit, "value")
        return self


class CountEntry(Sourced):
    """A whole number."""

    value: int | None = Field(ge=0, le=1 << 16, description="the number; null: not public")


class TextEntry(Sourced):
    """A text."""

    value: Name | None = Field(description="the text; null: not public")


class FabricEntry(Sourced):
    """The kind of the links between devices."""

    value: Fabric | None = Field(description="the kind of link; null: not public")


class PeerEntry(Sourced):
    """Whether a device can read and write another's memory over PCIe."""

    value: PeerAccess | None = Field(description="enabled, disabled, conditional; null: not public")


class TritonTargetEntry(Sourced):
    """`backend:arch:warp`."""

    value: TritonTarget | None = Field(description="backend:arch:warp; null: none or not public")


class DtypesEntry(Sourced):
    """A set of matrix dtypes."""

    value: list[MatrixDtype] | None = Field(description="dtypes; null: not public")

    @model_validator(mode="after")
    def _judge(self) -> DtypesEntry:
        require_distinct(self.value or [])
        return self


class FlagsEntry(Sourced):
    """Yes-or-no features with one source."""

    values: dict[Literal["tma", "multicast", "wgmma", "tcgen05", "graph_capture"], bool | None] = (
        Field(min_length=1, description="feature: true, false or null")
    )


class RatesEntry(Sourced):
    """Rates by dtype with one unit and one source."""

    values: dict[Name, float | None] = Field(min_length=1, description="dtype: number or null")
    unit: Literal["GFLOPS", "TFLOPS", "TOPS"] = Field(description="TOPS for integers")
    per: Literal["device", "card"] = Field(default="device", description="whose figure it is")

    @model_validator(mode="after")
    def _judge(self) -> RatesEntry:
        allowed = INTEGER_RATES if self.unit == "TOPS" else FLOAT_RATES
        for dtype, value in self.values.items():
            if dtype not in allowed:
                raise fault(f"for {self.unit} {', '.join(allowed)}", dtype, "values", dtype)
            if value is not None:
                check_quantity(value, self.unit, "values", dtype)
        return self


class MeasuredEntry(Sourced):
    """Measured rates (by dtype) or bandwidths (`memory_bandwidth`, `copy_bandwidth`, …)."""

    values: dict[Name, float] = Field(min_length=1, description="what: number")
    unit: Literal["TFLOPS", "TOPS", "GB/s"] = Field(description="its unit")
    per: Literal["device", "card"] = Field(default="device", description="whose figure it is")

    @model_validator(mode="after")
    def _judge(self) -> MeasuredEntry:
        bandwidths = ("memory_bandwidth", "host_link", "fabric", "p2p")
        allowed = {"TFLOPS": FLOAT_RATES, "TOPS": INTEGER_RATES}.get(self.unit, bandwidths)
        for what, value in self.values.items():
            if what not in allowed:
                raise fault(f"for {self.unit} {', '.join(allowed)}", what, "values", what)
            check_quantity(value, self.unit, "values", what)
        return self


def require_distinct(keys: list[Any]) -> None:
    """Refuse a name that stands twice."""
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise fault("each name once", f"{', '.join(repeated)} twice")


def require_unit(entry: QuantityEntry | None, base: str, key: str) -> None:
    """Refuse a unit of another kind than `base`; `key` is where the entry stands."""
    if entry is not None and UNITS[entry.unit].base != base:
        allowed = [name for name, unit in UNITS.items() if unit.base == base]
        raise fault(f"one of {', '.join(allowed)}", entry.unit, key, "unit")


def require_unverified(entry: DtypesEntry | None) -> None:
    """Refuse claims that say they are more."""
    if entry is not None and entry.confidence != "unverified":
        path = ("unverified_matrix_dtypes", "confidence")
        raise fault("unverified", entry.confidence, *path)
