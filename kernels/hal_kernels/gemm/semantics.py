"""What a GEMM implementation changes in the numbers, beside the order of float32 additions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SemanticNote:
    """A change of values that a plan must show; none of them is a tier."""

    name: str
    text: str


BFLOAT16_ACTIVATIONS = SemanticNote(
    "bfloat16_activations",
    "activations and results are rounded to bfloat16 (8 bits of mantissa); sums are float32",
)
BFLOAT16_SCALES = SemanticNote(
    "bfloat16_scales",
    "the weight's float16 or float32 scales are rounded to bfloat16: up to 0.4% of each group's "
    "values",
)
INT8_ACTIVATIONS = SemanticNote(
    "int8_activations",
    "each row of activations is rounded to int8 with one symmetric scale, max|x| / 127",
)
INT8_ACTIVATIONS_TIES = SemanticNote(
    "int8_activations_ties",
    "rows are normalised before rounding: a value next to a tie may land one step away from "
    "x / scale rounded half to even",
)
INT7_ACTIVATIONS = SemanticNote(
    "int7_activations",
    "each row of activations is rounded to 7 bits, max|x| / 63: without VNNI the CPU's byte "
    "product saturates with 8",
)
REQUANTIZED_CHANNELS = SemanticNote(
    "requantized_int8_channel",
    "weights with a scale per group of 32 are requantised to int8 with one scale per output "
    "channel",
)
FOLDED_MINIMUM = SemanticNote(
    "folded_minimum",
    "the group minimum m is stored as m + 8 * scale, rounded to the scale's dtype",
)
