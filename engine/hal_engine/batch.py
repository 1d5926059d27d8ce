"""What the scheduler hands to the model runner in one step, and what it expects back.

Plain integers only: a batch is sent to tensor-parallel workers as JSON, so a worker that reads it
trusts nothing but numbers whose shape was checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    import torch

LogitsWanted = Literal["none", "last", "all"]
_LOGITS_WANTED = ("none", "last", "all")


@dataclass(slots=True)
class ScheduledSequence:
    """The share of one sequence in one step.

    `token_ids` are the new tokens; their positions are `start, start+1, …`; `block_ids` covers all
    positions up to the last new token, and may be longer. The lists belong to the scheduler: a
    runner reads them during `execute` and keeps no reference.
    """

    seq_id: int
    token_ids: list[int]
    start: int  # tokens before these; in the KV cache, or written by others of this very batch
    block_ids: list[int]
    logits: LogitsWanted


@dataclass(slots=True)
class Batch:
    """One step. Every sequence in `decode` has exactly one new token."""

    decode: list[ScheduledSequence] = field(default_factory=list)
    prefill: list[ScheduledSequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(item.token_ids) for item in self.prefill)

    def to_json(self) -> bytes:
        """Compact JSON: two lists of `[seq_id, token_ids, start, block_ids, logits]`."""
        rows = [
            [[s.seq_id, s.token_ids, s.start, s.block_ids, s.logits] for s in group]
            for group in (self.decode, self.prefill)
        ]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Batch:
        """Reads what `to_json` wrote. Raises ValueError, naming the field, for anything else."""
        rows: Any = json.loads(data)
        if not isinstance(rows, list) or len(rows) != 2:
            raise ValueError("batch: a list of two groups (decode, prefill) is required")
        decode, prefill = (
            _read_group(rows[i], name) for i, name in enumerate(("decode", "prefill"))
        )
        for item in decode:
            if len(item.token_ids) != 1:
                raise ValueError(
                    f"batch.decode: sequence {item.seq_id} must have exactly one new token, "
                    f"found {len(item.token_ids)}"
                )
        return cls(decode=decode, prefill=prefill)


def _read_group(rows: Any, name: str) -> list[ScheduledSequence]:
    if not isinstance(rows, list):
        raise ValueError(f"batch.{name}: a list is required, found {type(rows).__name__}")
    group = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 5:
            raise ValueError(f"batch.{name}: rows of five fields are required")
        seq_id, token_ids, start, block_ids, logits = row
        if logits not in _LOGITS_WANTED:
            raise ValueError(f"batch.{name}.logits: one of {_LOGITS_WANTED} is required")
        _check_int(seq_id, f"{name}.seq_id")
        _check_int(start, f"{name}.start")
        for values, field_name in ((token_ids, "token_ids"), (block_ids, "block_ids")):
            if not isinstance(values, list) or not values:
                raise ValueError(f"batch.{name}.{field_name}: a list that is not empty is required")
            for value in values:
                _check_int(value, f"{name}.{field_name}")
        wanted = cast(LogitsWanted, logits)
        group.append(ScheduledSequence(seq_id, token_ids, start, block_ids, wanted))
    return group


def _check_int(value: Any, where: str) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"batch.{where}: a non-negative integer is required, found {value!r:.40}")


class ModelRunner(Protocol):
    """The model as the engine sees it. Every method is called from the engine thread only."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def supports_embeddings(self) -> bool: ...
    @property
    def num_replays(self) -> int:
        """Calls of `execute` that ran as the replay of a captured step."""
        ...

    def execute(self, batch: Batch) -> torch.Tensor:
        """Runs the new tokens and writes their KV: in each layer that of the whole batch, before
        any sequence reads it, because sequences of one batch may share blocks it fills.

        Returns fp32 logits [R, vocab_size]: one row for each sequence with logits="last", one row
        per new token for "all", none for "none"; sequences of `decode` first, then `prefill`, both
        in the order given. The engine may read it until the next call. An exception ends the
        engine: every live request gets an error.
        """
        ...

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """One embedding per sequence; uses no KV blocks."""
        ...

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """The bound op `sample.top_k_top_p`.

        logits fp32 [B, V], top_k int64 [B] (V is off), top_p fp32 [B] (1 is off) -> fp32 [B, V]
        with -inf outside the kept set.
        """
        ...

    def close(self) -> None: ...
