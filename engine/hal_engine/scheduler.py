"""Which tokens run in the next step.

Continuous batching. Each step takes every decoding sequence first, then spends what is left of
`max_num_batched_tokens` on prompts in the order of their arrival, in chunks: a long prompt can make
a step longer by a bounded amount, never hold decoding up, and leaves room for those behind it
(`prompt_budget`).

Blocks: a sequence is admitted when all its known tokens fit, and grows one block at a time. When a
grower finds no block, the *youngest* running sequence loses its blocks and is recomputed later from
the front of the queue. The oldest running sequence is never a victim, and a request that could not
fit alone was refused at submission: so something always advances.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hal_engine.batch import Batch, LogitsWanted, ScheduledSequence
from hal_engine.kv_cache import BlockPool
from hal_engine.prompt_budget import PromptBudget, PromptChunk
from hal_engine.sequence import LiveSequence, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler. Raises ValueError for limits that cannot work together."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting: int = 256
    prefix_reuse: bool = True
    max_prompt_logits_rows: int = 256  # a step's rows for prompt_logprobs; each is vocab_size fp32

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
            "max_prompt_logits_rows",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"scheduler: {name} must be at least 1, found {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"scheduler: max_num_batched_tokens ({self.max_num_batched_tokens}) must be at "
                f"least max_num_seqs ({self.max_num_seqs}), or decoding would starve prompts"
            )


@dataclass(slots=True)
class Step:
    """A batch and the sequences behind its entries, in the same order."""

    batch: Batch = field(default_factory=Batch)
    decode: list[LiveSequence] = field(default_factory=list)
    prefill: list[LiveSequence] = field(default_factory=list)


class Scheduler:
    """Owned by the engine thread. `schedule`, run the batch, `advance`; `finish` at any time."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[LiveSequence] = deque()
        self.running: list[LiveSequence] = []  # oldest first, always
        self.num_preemptions = 0
        self._next_deadline_s = float("inf")
        self._blocked: tuple[int, int] | None = None  # queue head, availability when it did not fit

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def refusal(self, prompt_tokens: int, max_total_tokens: int) -> str | None:
        """Why a request can never run here, or None. The newest token needs no KV of its own."""
        stored = max(prompt_tokens, max_total_tokens - 1)
        required = self.pool.num_blocks_for(stored)
        if required > self.pool.num_blocks:
            capacity = self.pool.num_blocks * self.pool.block_size
            return (
                f"{prompt_tokens} prompt tokens with up to {max_total_tokens - prompt_tokens} "
                f"generated need {required} KV blocks, the whole cache has {self.pool.num_blocks} "
                f"({capacity} tokens); ask for fewer tokens or give the KV cache more memory"
            )
        return None

    def add(self, seq: LiveSequence) -> None:
        self.waiting.append(seq)
        if seq.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, seq.deadline_s)

    def take_expired(self, now_s: float) -> list[LiveSequence]:
        """Finishes and returns the sequences whose deadline has passed."""
        if now_s < self._next_deadline_s:
            return []
        live = [*self.running, *self.waiting]
        expired = [s for s in live if s.deadline_s is not None and s.deadline_s <= now_s]
        for seq in expired:
            self.finish(seq)
        left = [
            s.deadline_s
            for s in live
            if s.deadline_s is not None and s.status is not Status.FINISHED
        ]
        self._next_deadline_s = min(left, default=float("inf"))
        return expired

    def finish(self, seq: LiveSequence) -> None:
        """Ends a sequence in whatever phase it is; its blocks are free at once. Idempotent."""
        if seq.status is Status.FINISHED:
            return
        if seq.status in (Status.WAITING, Status.PREEMPTED):
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
        self._drop_blocks(seq)
        seq.status = Status.FINISHED

    def forget_all(self) -> None:
        """Drops every sequence and gives no block back: for an engine that has come to its end."""
        self.running.clear()
        self.waiting.clear()

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to run."""
        step = Step()
        preempted = self._schedule_decode(step)
        self._schedule_prompts(step, admits=not preempted)
        return step if step.decode or step.prefill else None

    def _schedule_decode(self, step: Step) -> bool:
        """Adds every decoding sequence; returns whether one had to be preempted."""
        block_size = self.pool.block_size
        entries = step.batch.decode
        num_preemptions = self.num_preemptions
        i = 0
        while i < len(self.running):  # preemption shortens the list from its end
            seq = self.running[i]
            i += 1
            if seq.status is not Status.DECODE:
                continue
            start = seq.num_computed
            if start == len(seq.block_ids) * block_size and not self._grow(seq):
                break  # it was the youngest itself
            entries.append(
                ScheduledSequence(seq.seq_id, [seq.token_ids[-1]], start, seq.block_ids, "last")
            )
            step.decode.append(seq)
        return self.num_preemptions > num_preemptions

    def _grow(self, seq: LiveSequence) -> bool:
        """One more block, at the cost of younger sequences; False if `seq` itself had to go."""
        while True:
            taken = self.pool.allocate(1, after=seq.block_ids[-1])
            if taken is not None:
                seq.block_ids.extend(taken)
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False

    def _preempt(self, seq: LiveSequence) -> None:
        self.running.remove(seq)
        self._drop_blocks(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.wants_prompt_rows:
            seq.prompt_logprobs = []  # collected anew: the rows come from the recomputation
        self.waiting.appendleft(seq)

    def _drop_blocks(self, seq: LiveSequence) -> None:
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_computed = 0
        seq.num_registered_blocks = 0

    def _schedule_prompts(self, step: Step, admits: bool) -> None:
        """Adds chunks of prompts, oldest first. See `prompt_budget`."""
        tokens = self.config.max_num_batched_tokens - len(step.decode)
        budget = PromptBudget(tokens, self.config.max_prompt_logits_rows)
        chunks: list[PromptChunk] = []
        for seq in [seq for seq in self.running if seq.status is Status.PREFILL]:
            self._take(chunks, seq, budget)
        while admits and budget.tokens > 0 and self._admit_head():
            self._take(chunks, self.running[-1], budget)
        for chunk in chunks:  # what was left for others, and none came
            chunk.grow(budget, is_shared=False)
            if chunk.count:
                self._add_chunk(step, chunk)

    def _take(self, chunks: list[PromptChunk], seq: LiveSequence, budget: PromptBudget) -> None:
        chunk = PromptChunk(seq, seq.num_computed)
        chunk.grow(budget, is_shared=True)
        chunks.append(chunk)
        # Named before they are computed, so that a prompt admitted into this very step shares them:
        # a runner writes a layer's keys and values of the whole batch before anything reads them.
        self._register_blocks(seq, chunk.start + chunk.count)

    def _add_chunk(self, step: Step, chunk: PromptChunk) -> None:
        seq, end = chunk.sequence, chunk.start + chunk.count
        wanted: LogitsWanted = "last" if end == len(seq.token_ids) else "none"
        if seq.wants_prompt_rows:
            wanted = "all"
        tokens = seq.token_ids[chunk.start : end]
        step.batch.prefill.append(
            ScheduledSequence(seq.seq_id, tokens, chunk.start, seq.block_ids, wanted)
        )
        step.prefill.append(seq)
        self._register_blocks(seq, end)

    def _admit_head(self) -> bool:
        """Moves the head of the queue to `running` if it fits; it alone may be admitted next."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return False
        seq = self.waiting[0]
        pool = self.pool
        if self.running and self._blocked is not None:
            head, available = self._blocked
            if head == seq.seq_id and pool.num_available <= available:
                return False
        hits = self._cached_prefix(seq)
        if self._is_computed_by_another(seq, len(hits)):
            return False
        missing = pool.num_blocks_for(len(seq.token_ids)) - len(hits)
        # Each running sequence may need a block soon: admitting into that reserve would preempt.
        reserve = len(self.running)
        if pool.num_available - pool.num_cached_among(hits) < missing + reserve:
            self._blocked = (seq.seq_id, pool.num_available)
            return False
        self._blocked = None
        pool.acquire(hits)
        taken = pool.allocate(missing, after=hits[-1] if hits else None)
        if taken is None:
            raise RuntimeError(f"KV cache: {missing} blocks were promised, none were given")
        self.waiting.popleft()
        seq.block_ids = hits + taken
        seq.num_computed = len(hits) * pool.block_size
        seq.num_registered_blocks = len(hits)
        if seq.status is Status.WAITING:
            seq.num_cached_tokens = seq.num_computed
        seq.status = Status.PREFILL
        self.running.append(seq)
        return True

    def _cached_prefix(self, seq: LiveSequence) -> list[int]:
        """Known blocks of its prefix; the last token is always computed, for its logits."""
        if not self.pool.prefix_reuse or seq.wants_prompt_rows:
            return []
        self.pool.extend_hashes(seq.block_hashes, seq.token_ids)
        most = (len(seq.token_ids) - 1) // self.pool.block_size
        return self.pool.lookup(seq.block_hashes[:most], seq.token_ids)

    def _is_computed_by_another(self, seq: LiveSequence, index: int) -> bool:
        """Whether an older prompt is on its way to the block that `seq` would have to begin with:
        then it waits, and shares it."""
        if seq.wants_prompt_rows or index >= (len(seq.token_ids) - 1) // self.pool.block_size:
            return False
        wanted = seq.block_hashes[index : index + 1]
        return bool(wanted) and any(
            other.status is Status.PREFILL
            and other.num_registered_blocks <= index
            and other.block_hashes[index : index + 1] == wanted
            for other in self.running
        )

    def advance(self, step: Step) -> None:
        """Records that the step's tokens are in the KV cache. Call before appending new tokens."""
        for seq in step.decode:
            seq.num_computed += 1
            if seq.num_computed % self.pool.block_size == 0:
                self._register_blocks(seq, seq.num_computed)
        for seq, entry in zip(step.prefill, step.batch.prefill, strict=True):
            seq.num_computed += len(entry.token_ids)
            if seq.num_computed == len(seq.token_ids):
                seq.status = Status.DECODE

    def _register_blocks(self, seq: LiveSequence, num_tokens: int) -> None:
        """Names the blocks that the first `num_tokens` tokens fill, for others to find."""
        if not self.pool.prefix_reuse:
            return
        full = num_tokens // self.pool.block_size
        self.pool.extend_hashes(seq.block_hashes, seq.token_ids)
        for index in range(seq.num_registered_blocks, full):
            self.pool.register(seq.block_ids[index], index, seq.block_hashes, seq.token_ids)
        seq.num_registered_blocks = full

    def check_invariants(self) -> None:
        """For tests. Raises RuntimeError if a book disagrees with another."""
        self.pool.check_invariants(seq.block_ids for seq in self.running)
        for seq in self.waiting:
            if seq.block_ids or seq.num_computed:
                raise RuntimeError(f"scheduler: waiting sequence {seq.seq_id} holds blocks")
        ids = [seq.seq_id for seq in [*self.running, *self.waiting]]
        if ids != sorted(set(ids)):
            raise RuntimeError(f"scheduler: not in order of arrival: {ids}")
        for seq in self.running:
            if len(seq.block_ids) * self.pool.block_size < seq.num_computed:
                raise RuntimeError(f"scheduler: sequence {seq.seq_id} has more tokens than blocks")
