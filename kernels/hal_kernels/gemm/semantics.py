"""What a GEMM implementation changes in the numbers, beside the order of float32 additions."""

from __future__ import annotations

from hal.candidates import SemanticNote

BFLOAT16_ACTIVATIONS = SemanticNote(
    name="bfloat16_activations",
    text="activations and results are rounded to bfloat16 (8 bits of mantissa); sums are float32",
)
BFLOAT16_SCALES = SemanticNote(
    name="bfloat16_scales",
    text="the weight's scales are rounded to bfloat16: up to 0.4% of each group's values",
)
INT8_ACTIVATIONS = SemanticNote(
    name="int8_activations",
    text="each row of activations is rounded to int8 with one symmetric scale, max|x| / 127",
)
INT8_ACTIVATIONS_TIES = SemanticNote(
    name="int8_activations_ties",
    text="rows are normalised before rounding: a value next to a tie may land one step away from "
    "x / scale rounded half to even",
)
INT7_ACTIVATIONS = SemanticNote(
    name="int7_activations",
    text="each row of activations is rounded to 7 bits, max|x| / 63: without VNNI the CPU's byte "
    "product saturates with 8",
)
REQUANTIZED_CHANNELS = SemanticNote(
    name="requantized_int8_channel",
    text="weights with a scale per group of 32 are requantised to int8 with one scale per output "
    "channel",
)
FOLDED_MINIMUM = SemanticNote(
    name="folded_minimum",
    text="what is added to (q - 8) * scale is rounded to bfloat16: m + 8 * scale of a group's "
    "minimum m, (8 - z) * scale of its zero point z",
)
