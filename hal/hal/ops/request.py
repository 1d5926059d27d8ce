"""What every op request has in common, and how a family of ops is registered.

A request carries the whole argument tuple that decides whether a kernel can serve it. It is frozen
and made of plain values, so a plan can list it, hash it and send it to another process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Phase = Literal["prefill", "decode", "any"]
GraphMode = Literal["eager", "graph"]


@dataclass(frozen=True, slots=True, order=True)
class TokenRange:
    """Numbers of tokens (rows) from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"token range: required 1 <= low <= high, found {self}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRequest:
    """Base of every request. `op` names the family; phase and range say when it is called."""

    op: ClassVar[str]

    phase: Phase = "any"
    tokens: TokenRange = TokenRange(1, 1)
    graph_mode: GraphMode = "eager"

    def with_tokens(self, tokens: TokenRange) -> OpRequest:
        return dataclasses.replace(self, tokens=tokens)

    @property
    def label(self) -> str:
        """`op`, or `op.phase` where the phase is part of the request: the key of `--use`."""
        return self.op if self.phase == "any" else f"{self.op}.{self.phase}"

    def arguments(self) -> dict[str, Any]:
        """The deciding arguments without phase and range, as plain values for JSON."""
        return {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("phase", "tokens")
        }


def _plain(value: Any) -> Any:
    # All fields, not only a name: two formats of one name would otherwise look the same.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed |got - want| <= atol + rtol * |want| against the float64 reference."""

    rtol: float
    atol: float


def _no_weight(request: Any) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFamily:
    """One family of the catalogue.

    reference: `(request, **static) -> kernel`, plain torch, the meaning of the op. flops, bytes:
    work of one call at a number of tokens. tolerances: per dtype of the activations, for whatever
    implements the op. largest_errors: per dtype of the result, for a kernel that sums in float32:
    how far it may be from the reference in float64 of the same arguments, as a share of the largest
    exact value of the row (last dimension), as a sum that cancels keeps the rounding of its terms.
    is_weighted: the implementation packs a weight at load. weight_bytes: of the weight or table
    that a call site holds, as stored. kinds: what `label` adds to the name besides phases. added:
    argument -> version of the plug-in API that added it; its default means what was meant before.
    """

    name: str
    request_type: type[OpRequest]
    summary: str
    reference: Callable[..., Callable[..., Any]]
    flops: Callable[[Any, int], float]
    bytes_moved: Callable[[Any, int], float]
    tolerances: Mapping[str, Tolerance]
    largest_errors: Mapping[str, float] = dataclasses.field(default_factory=lambda: LARGEST_ERRORS)
    is_weighted: bool = False
    weight_bytes: Callable[[Any], int] = _no_weight
    kinds: tuple[str, ...] = ()
    added: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def labels(self) -> tuple[str, ...]:
        """Every label that a request of this family can have."""
        return (self.name, *(f"{self.name}.{k}" for k in ("prefill", "decode", *self.kinds)))


FLOAT_TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-12, 1e-12),
    "float32": Tolerance(2e-5, 2e-5),
    "bfloat16": Tolerance(2e-2, 2e-2),
    "float16": Tolerance(3e-3, 3e-3),
}

# A kernel rounds an operand that it made (2**-9 and 2**-12 of its value), and the result once more.
LARGEST_ERRORS: Mapping[str, float] = {
    "float32": 2e-5,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
}

# Of a product whose operands are multiplied as they are: the sum, and its rounding.
PRODUCT_ERRORS: Mapping[str, float] = {
    "float32": 1e-5,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11 + 1e-5,
}

# Of what is rounded once, to the nearest: half a step.
ROUNDING_ERRORS: Mapping[str, float] = {
    "float32": 3e-6,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}
