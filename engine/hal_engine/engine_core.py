"""One step of the engine, without threads: schedule, run the model, sample, tell what came out.

`EngineCore` is owned by one thread; `engine_loop` gives it one and talks to the outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hal_engine.api import (
    EngineStats,
    Failure,
    FinishReason,
    GenerationRequest,
    RequestRefusedError,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
)
from hal_engine.batch import Batch, ModelRunner, ScheduledSequence
from hal_engine.detokenizer import Detokenizer
from hal_engine.drawing import TokenLogprobs, compute_logprobs
from hal_engine.kv_cache import BlockPool
from hal_engine.sampler import Sampler, SamplerState, create_sampler_state
from hal_engine.scheduler import Scheduler, SchedulerConfig, Step
from hal_engine.sequence import LiveSequence, Status
from hal_engine.structured_output import GrammarError, GrammarMatcher

if TYPE_CHECKING:
    import torch

Events = list[tuple[LiveSequence, TokenEvent]]


class EngineCore:
    """Scheduler, runner and sampler of one model."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, config: SchedulerConfig) -> None:
        pool = BlockPool(runner.num_blocks, runner.block_size, prefix_reuse=config.prefix_reuse)
        self.runner = runner
        self.scheduler = Scheduler(config, pool)
        self.eos_token_ids = tokenizer.eos_token_ids
        self._sampler = Sampler(runner.top_k_top_p)
        self._token_bytes = _text_bytes(tokenizer)
        self._num_sequences = 0
        self.num_steps = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.service_s = 1.0  # running average of a request's time from first step to its end

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def refuse_if_too_long(self, request: GenerationRequest) -> None:
        """Raises RequestRefusedError for a request whose KV can never fit. Safe in any thread."""
        reason = self.scheduler.refusal(len(request.prompt_token_ids), self._max_total(request))
        if reason is not None:
            raise RequestRefusedError(reason)

    def _max_total(self, request: GenerationRequest) -> int:
        wanted = len(request.prompt_token_ids) + request.sampling.max_tokens
        return min(wanted, self.runner.max_model_len)

    def submit(
        self, request: GenerationRequest, grammar: GrammarMatcher | None, arrival_s: float
    ) -> LiveSequence:
        """Queues a request that `admission` has let in."""
        deadline = None if request.deadline_s is None else arrival_s + request.deadline_s
        self._num_sequences += 1
        seq = LiveSequence(
            self._num_sequences, request, self._max_total(request), arrival_s, deadline
        )
        seq.sampler = create_sampler_state(
            request.sampling, request.prompt_token_ids, self.eos_token_ids, grammar
        )
        seq.detokenizer = Detokenizer(self._token_bytes, request.sampling.stop_strings)
        self.scheduler.add(seq)
        return seq

    def cancel(self, seq: LiveSequence) -> None:
        """Ends a sequence in any phase without an event; nothing if it has ended."""
        self.scheduler.finish(seq)

    def step(self) -> Events:
        """Runs one step. Whatever the runner raises goes through: the caller's engine is dead."""
        now = time.monotonic()
        events = [(seq, self._deadline_event(seq)) for seq in self.scheduler.take_expired(now)]
        step = self.scheduler.schedule()
        if step is None:
            if self.scheduler.has_work:
                raise RuntimeError("scheduler: there is work and nothing was scheduled")
            return events
        for seq in step.prefill:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = now
                self.prompt_tokens += seq.num_prompt_tokens
                self.cached_prompt_tokens += seq.num_cached_tokens
        logits = self.runner.execute(step.batch)
        self.num_steps += 1
        self.scheduler.advance(step)
        if step.prefill:
            logits, sequences = self._rows_to_sample(step, logits, events)
        else:
            sequences = step.decode
        if sequences:
            self._sample(sequences, logits, events)
        return events

    def _rows_to_sample(
        self, step: Step, logits: torch.Tensor, events: Events
    ) -> tuple[torch.Tensor, list[LiveSequence]]:
        """Picks the rows that a token is drawn from; collects prompt_logprobs on the way."""
        sequences = list(step.decode)
        rows = list(range(len(sequences)))
        row = len(rows)
        for seq, entry in zip(step.prefill, step.batch.prefill, strict=True):
            count = {"none": 0, "last": 1, "all": len(entry.token_ids)}[entry.logits]
            if entry.logits == "all":
                self._collect_prompt_logprobs(seq, entry, logits[row : row + count], events)
            row += count
            if seq.status is not Status.DECODE:
                continue
            if seq.max_total_tokens == seq.num_prompt_tokens:
                events.append((seq, self._end(seq, "length")))
            else:
                sequences.append(seq)
                rows.append(row - 1)
        if len(logits) != row:
            raise RuntimeError(f"runner: {row} rows of logits are required, found {len(logits)}")
        if len(rows) == row:
            return logits, sequences
        import torch

        return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)], sequences

    def _collect_prompt_logprobs(
        self, seq: LiveSequence, entry: ScheduledSequence, logits: torch.Tensor, events: Events
    ) -> None:
        collected, wanted = seq.prompt_logprobs, seq.request.sampling.prompt_logprobs
        if collected is None or wanted is None:
            raise RuntimeError(f"engine: sequence {seq.seq_id} asked for no prompt_logprobs")
        end = min(entry.start + len(entry.token_ids) + 1, seq.num_prompt_tokens)
        next_ids = seq.token_ids[entry.start + 1 : end]
        if not next_ids:
            return
        count = len(next_ids)
        values = compute_logprobs(logits, range(count), next_ids, [wanted] * count)
        for token_id, value in zip(next_ids, values, strict=True):
            if value.logprob != value.logprob:  # NaN
                error = "the model's logits must be finite, found nan in the prompt"
                events.append((seq, self._end(seq, "error", Failure("server", error))))
                return
            collected.append((TokenLogprob(token_id, value.logprob), value.top))

    def _sample(self, sequences: list[LiveSequence], logits: torch.Tensor, events: Events) -> None:
        states = [_sampler_of(seq) for seq in sequences]
        generated = [seq.num_generated for seq in sequences]
        sampled = self._sampler.sample(logits, states, generated)
        for i, seq in enumerate(sequences):
            if i in sampled.errors:
                events.append((seq, self._end(seq, "error", sampled.errors[i])))
            else:
                token_id = sampled.token_ids[i]
                events.append((seq, self._take_token(seq, token_id, sampled.logprobs.get(i))))

    def _take_token(
        self, seq: LiveSequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> TokenEvent:
        """Appends a drawn token and decides whether the sequence ends with it."""
        state, detokenizer = _sampler_of(seq), _detokenizer_of(seq)
        seq.token_ids.append(token_id)
        self.generated_tokens += 1
        reason: FinishReason | None = None
        error: Failure | None = None
        text = ""
        if token_id in state.stop_token_ids:
            reason = "stop"
        else:
            may_stop = seq.num_generated >= state.params.min_tokens
            text = detokenizer.append(token_id, may_stop=may_stop)
            if state.grammar is not None and not detokenizer.stopped:
                try:
                    state.grammar.advance(token_id)
                except GrammarError as failure:
                    reason, error = "error", failure.failure()
            if reason is None:
                if detokenizer.stopped or (state.grammar and state.grammar.is_complete):
                    reason = "stop"
                elif len(seq.token_ids) >= seq.max_total_tokens:
                    reason = "length"
        if reason is not None:
            return self._end(seq, reason, error, token_id, text, logprobs)
        return make_event(seq, token_id, text, logprobs)

    def _end(
        self,
        seq: LiveSequence,
        reason: FinishReason,
        error: Failure | None = None,
        token_id: int | None = None,
        text: str = "",
        logprobs: TokenLogprobs | None = None,
    ) -> TokenEvent:
        """Frees the sequence and makes its last event, with the text that was held back."""
        self.scheduler.finish(seq)
        detokenizer = _detokenizer_of(seq)
        text += detokenizer.finish()
        if detokenizer.stopped and reason == "length":
            reason = "stop"
        if seq.first_scheduled_s is not None:
            self.service_s += 0.1 * (time.monotonic() - seq.first_scheduled_s - self.service_s)
        return make_event(seq, token_id, text, logprobs, reason, error)

    def _deadline_event(self, seq: LiveSequence) -> TokenEvent:
        return self._end(
            seq,
            "error",
            Failure(
                "deadline",
                f"request {seq.request.request_id}: its deadline of {seq.request.deadline_s:g} s "
                f"passed after {seq.num_generated} generated tokens; allow more time or ask for "
                "fewer",
            ),
        )

    def run_dummy(self) -> bool:
        """A forward of one token, for readiness; whether its logits are finite."""
        import torch

        pool = self.scheduler.pool
        blocks = pool.allocate(1)
        if blocks is None:
            raise RuntimeError("engine: an idle engine must have a free KV block, it has none")
        try:
            entry = ScheduledSequence(0, [0], 0, blocks, "last")
            logits = self.runner.execute(Batch(prefill=[entry]))
        finally:
            pool.release(blocks)
        return bool(torch.isfinite(logits.amax()))

    def stats(self) -> EngineStats:
        """A snapshot; may be called from another thread."""
        scheduler = self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_total=scheduler.pool.num_blocks,
            kv_blocks_used=scheduler.pool.num_used,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=scheduler.num_preemptions,
            steps=self.num_steps,
            replayed_steps=self.runner.num_replays,
        )


def _sampler_of(seq: LiveSequence) -> SamplerState:
    if seq.sampler is None:
        raise RuntimeError(f"engine: sequence {seq.seq_id} was not submitted")
    return seq.sampler


def _detokenizer_of(seq: LiveSequence) -> Detokenizer:
    if seq.detokenizer is None:
        raise RuntimeError(f"engine: sequence {seq.seq_id} was not submitted")
    return seq.detokenizer


def make_event(
    seq: LiveSequence,
    token_id: int | None,
    text: str,
    logprobs: TokenLogprobs | None = None,
    reason: FinishReason | None = None,
    error: Failure | None = None,
) -> TokenEvent:
    """The event of `seq` as it stands: `token_id`, if any, is already part of it."""
    num_generated = seq.num_generated
    prompt: tuple[TokenLogprob | None, ...] | None = None
    prompt_top: tuple[tuple[TokenLogprob, ...], ...] | None = None
    if seq.prompt_logprobs is not None and num_generated <= (token_id is not None):
        prompt = (None, *(own for own, _ in seq.prompt_logprobs))
        prompt_top = ((), *(top for _, top in seq.prompt_logprobs))
    return TokenEvent(
        request_id=seq.request.request_id,
        token_id=token_id,
        text=text,
        logprob=None if logprobs is None else logprobs.logprob,
        top_logprobs=() if logprobs is None else logprobs.top,
        prompt_logprobs=prompt,
        prompt_top_logprobs=prompt_top,
        finish_reason=reason,
        error=None if error is None else error.message,
        fault=None if error is None else error.fault,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_generated_tokens=num_generated,
    )


def _text_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Token id -> its bytes in generated text: none for special and unknown ids. Cached."""
    special = tokenizer.special_token_ids | tokenizer.eos_token_ids
    known = tokenizer.vocab_size
    table: dict[int, bytes] = {}

    def text_bytes(token_id: int) -> bytes:
        found = table.get(token_id)
        if found is None:
            silent = token_id in special or token_id >= known
            found = b"" if silent else tokenizer.token_bytes(token_id)
            table[token_id] = found
        return found

    return text_bytes
