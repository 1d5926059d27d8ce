"""What an implementation on an accelerator changes in the numbers beyond rounding of sums.

Each note is for its own kind of waiver; none of them is a tier.
"""

from __future__ import annotations

from hal.candidates import SemanticNote

DENSE_FOR_SPARSE = SemanticNote(
    name="dense_attention_for_sparse",
    text="attends to every cached token, not to those that the indexer picks: another model",
)
ACTIVATIONS_NOT_ROUNDED = SemanticNote(
    name="activations_not_rounded",
    text="activations stay in 16 bits where the format rounds them to the weight's precision",
)
ROUNDED_WEIGHTS = SemanticNote(
    name="rounded_weights",
    text="each weight times its scale is rounded to the activations' dtype before the product",
)
ROUNDED_ACTIVATIONS = SemanticNote(
    name="rounded_activations",
    text="activations, rounded and scaled back as the format says, are kept in 16 bits: a scale "
    "that is no power of two costs their last bits",
)
REQUANTIZED_BLOCKS = SemanticNote(
    name="requantized_fp8_blocks",
    text="weights with one power of two per 32 values are requantised to 128x128 blocks: lossy",
)
SCALES_TO_POWERS_OF_TWO = SemanticNote(
    name="scales_to_powers_of_two",
    text="float32 scales of weights and activations are rounded up to powers of two",
)
ROUNDED_WIRE = SemanticNote(
    name="rounded_wire",
    text="what ranks send each other is rounded to e4m3, with a scale for each 128 values",
)
UNSTABLE_TIES = SemanticNote(
    name="unstable_ties",
    text="which of two equal scores is chosen is not specified; the op picks the lower index",
)
