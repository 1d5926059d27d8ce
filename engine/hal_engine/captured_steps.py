"""Runs decode steps as replays: captures a step when its size comes for the first time.

A capture holds for a number of sequences and for contexts up to a length (a power of two): all that
a replay reads is written into the same tensors. A step that is watched by an audit runs call by
call, since a replay shows no calls.

An implementation that says it is safe to capture, and is not, may look so while it is captured:
what it read then stays as it was in every replay. So before the first request one replay of each
range of sizes, on other tokens, positions and blocks, is held against the same step, called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hal.binding import BoundOps, RecordedCalls
from hal.errors import CaptureError
from hal.hookspecs import CapturedStep, CapturingRuntime
from hal.ops.attention import AttentionMetadata
from hal.ops.request import TokenRange
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.models.step_inputs import StepInputs

Forward = Callable[[StepInputs], torch.Tensor]

# Contexts up to this length share a capture; then up to twice, four times, …
_LEAST_CONTEXT = 128

# How far logits of a replay may be from those of the step that is called, as a share of the
# largest one and as roundings of their dtype: a device may add in another order. What a replay
# wrongly keeps makes a difference as large as they are.
_REPLAY_TOLERANCE, _REPLAY_ROUNDINGS = 1e-3, 8


@dataclass(frozen=True, slots=True)
class _Kept:
    step: CapturedStep
    calls: RecordedCalls


class CapturedSteps:
    """The captures of one runner. Used by the thread that runs its steps, and by no other."""

    def __init__(
        self,
        *,
        runtime: CapturingRuntime,
        forward: Forward,
        ops: BoundOps,
        sizes: Sequence[TokenRange],
        caches: Sequence[torch.Tensor],
        block_size: int,
        max_model_len: int,
    ) -> None:
        """forward: the step, given its inputs. sizes: see `step_capture`. caches: what it reads and
        writes beside."""
        self._runtime, self._forward, self._ops = runtime, forward, ops
        self._ranges, self._caches = tuple(sizes), tuple(caches)
        self._sizes = frozenset(n for part in sizes for n in range(part.low, part.high + 1))
        self._inputs = _StaticInputs(max(self._sizes), block_size, max_model_len)
        self._kept: OrderedDict[tuple[int, int, int], _Kept] = OrderedDict()
        # One of each size and context: a smaller limit would capture again and again.
        self.most_captures = len(self._sizes) * self._inputs.num_contexts
        self.num_replays = 0

    def close(self) -> None:
        """Lets go of the captures, and with them of the caches."""
        self._kept.clear()
        self._sizes, self._caches, self._forward = frozenset(), (), _closed

    def serves(self, batch: Batch) -> bool:
        """Whether the step is one to replay."""
        return (
            not batch.prefill
            and len(batch.decode) in self._sizes
            and all(s.logits == "last" for s in batch.decode)
            and self._ops.is_replayable
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits as of `ModelRunner.execute`. Raises CaptureError where an implementation that says
        it is safe to capture is not."""
        num_sequences, context = len(batch.decode), self._inputs.write(batch.decode)
        key = (num_sequences, context, torch.get_num_threads())
        kept = self._kept.get(key)
        if kept is None:
            return self._capture(key).step.output
        self._kept.move_to_end(key)
        kept.calls.repeat()
        kept.step.replay()
        self.num_replays += 1
        return kept.step.output

    def rehearse(self, num_blocks: int, max_model_len: int) -> None:
        """Captures a step of each range of sizes, largest first, on blocks that nobody uses yet,
        and verifies a replay of it. Raises as `run`, and where a replay computes something else."""
        positions = min(self._inputs.block_size, max_model_len, _LEAST_CONTEXT)
        for part in reversed(self._ranges):
            count = min(part.high, num_blocks * positions)
            if count in self._sizes and self._ops.is_replayable:
                # From the end, in other blocks if there are any.
                most = min(2 * count + positions, num_blocks * positions)
                places = range(count), range(most - 1, most - 1 - count, -1)
                first, other = (
                    [
                        ScheduledSequence(
                            i, [token], place % positions, [place // positions], "last"
                        )
                        for i, place in enumerate(sequences)
                    ]
                    for token, sequences in enumerate(places)
                )
                self.run(Batch(decode=first))
                self._verify(other)

    def _verify(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Holds a replay of the step that was just captured against the step that is called."""
        key = len(sequences), self._inputs.write(sequences), torch.get_num_threads()
        kept = self._kept[key]
        kept.calls.repeat()
        kept.step.replay()
        replayed = kept.step.output.clone()
        # It reads what the replay wrote into the caches, and writes the same once more.
        called = self._forward(self._inputs.step(key[0], key[1]))
        share = max(_REPLAY_TOLERANCE, _REPLAY_ROUNDINGS * torch.finfo(called.dtype).eps)
        largest = float(called.nan_to_num(0.0, 0.0, 0.0).abs().max())
        is_close = torch.isclose(replayed, called, rtol=0.0, atol=share * largest, equal_nan=True)
        if not bool(is_close.all()):
            raise CaptureError(
                f"replay of a captured step of {key[0]} sequences",
                f"the logits of the same step, called, within {share:g} of the largest "
                f"({largest:.3g})",
                f"{int((~is_close).sum())} of {is_close.numel()} logits that differ by up to "
                f"{float((replayed - called).abs().max()):.3g}",
                "an implementation whose is_graph_safe says more than it keeps read a value while "
                "the step was captured: set engine.capture_steps to off, and report it",
            )

    def _capture(self, key: tuple[int, int, int]) -> _Kept:
        step = self._inputs.step(key[0], key[1])
        with self._ops.recorded_calls() as calls:
            captured = self._runtime.capture(
                lambda: self._forward(step), [*self._inputs.tensors, *self._caches]
            )
        kept = self._kept[key] = _Kept(captured, calls)
        if len(self._kept) > self.most_captures:
            self._kept.popitem(last=False)[1].calls.end()
        return kept


def _closed(step: StepInputs) -> torch.Tensor:
    raise RuntimeError(f"captured steps: a step of {step.num_tokens} tokens after close")


class _StaticInputs:
    """The tensors that captured steps read. Those of all sizes begin at the same addresses."""

    def __init__(self, max_num_seqs: int, block_size: int, max_model_len: int) -> None:
        self.block_size = block_size
        self._contexts = [_LEAST_CONTEXT]
        while self._contexts[-1] < max_model_len:
            self._contexts.append(2 * self._contexts[-1])
        most_blocks = -(-self._contexts[-1] // block_size)
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._slots = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._lengths = torch.ones(max_num_seqs, dtype=torch.int32)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._table = torch.zeros(max_num_seqs * most_blocks, dtype=torch.int32)
        # Writing a list into numpy's view of the memory is several times as fast as into torch's.
        self._views = [
            tensor.numpy()
            for tensor in (self._token_ids, self._positions, self._slots, self._lengths)
        ]
        self._table_view = self._table.numpy()

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [
            self._token_ids,
            self._positions,
            self._slots,
            self._lengths,
            self._starts,
            self._table,
        ]

    def write(self, sequences: Sequence[ScheduledSequence]) -> int:
        """Fills the tensors for a step; returns the context length that its capture is for."""
        block_size, count = self.block_size, len(sequences)
        positions = [s.start for s in sequences]
        slots = [
            s.block_ids[p // block_size] * block_size + p % block_size
            for s, p in zip(sequences, positions, strict=True)
        ]
        longest = max(positions) + 1
        context = next(length for length in self._contexts if length >= longest)
        width = -(-context // block_size)
        values = ([s.token_ids[0] for s in sequences], positions, slots, [p + 1 for p in positions])
        for view, numbers in zip(self._views, values, strict=True):
            view[:count] = numbers
        table = self._table_view[: count * width].reshape(count, width)
        for row, s in zip(table, sequences, strict=True):
            used = s.start // block_size + 1
            row[:used] = s.block_ids[:used]
        return context

    def step(self, count: int, context: int) -> StepInputs:
        """The inputs of a step over these tensors."""
        width = -(-context // self.block_size)
        return StepInputs(
            token_ids=self._token_ids[:count],
            positions=self._positions[:count],
            slot_mapping=self._slots[:count],
            num_tokens=count,
            num_decode_tokens=count,
            decode=AttentionMetadata(
                query_start_loc=self._starts[: count + 1],
                seq_lens=self._lengths[:count],
                block_table=self._table[: count * width].view(count, width),
                max_query_len=1,
                max_seq_len=context,
            ),
            prefill=None,
            logit_rows=None,
            num_logit_rows=count,
        )
