"""The tensors of one step, as the runner gives them to a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hal.ops.attention import AttentionMetadata


@dataclass(slots=True)
class StepInputs:
    """One step's tensors. Tokens of decoding sequences come first, one each, then the chunks.

    token_ids, positions, slot_mapping: int64 [T]. decode and prefill describe the first
    `num_decode_tokens` rows and the others; None where there are none. logit_rows: int64 [R] rows
    whose logits are wanted, None for all rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    num_decode_tokens: int
    decode: AttentionMetadata | None
    prefill: AttentionMetadata | None
    logit_rows: torch.Tensor | None
    num_logit_rows: int
