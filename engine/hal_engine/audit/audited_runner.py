"""A model runner that is audited: which of its steps are watched, and which are timed.

Full mode runs each batch twice: once watched, which is slow, and once timed without anything
looking. Running a batch again writes the same keys and values and gives the same logits. Light mode
runs each once, and few of them timed or watched: see `step_sampler`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch

from hal_engine.audit.observer import CallObserver
from hal_engine.audit.step_mode import StepMode
from hal_engine.audit.step_sampler import StepSampler, kind_of
from hal_engine.batch import Batch, ModelRunner

Mode = Literal["full", "light"]
SAMPLE_EVERY = 64


class AuditedRunner:
    """A `ModelRunner` whose steps are watched and timed.

    every: in light mode, the number of steps of which at most one is timed and one is watched.
    In full mode the step mode is entered by who steps, so that it sees scheduling and sampling as
    well.
    """

    def __init__(
        self,
        inner: ModelRunner,
        observer: CallObserver,
        step: StepMode,
        mode: Mode,
        every: int = SAMPLE_EVERY,
    ) -> None:
        self._inner, self._observer, self._step, self._mode = inner, observer, step, mode
        self.sampler = StepSampler(every)
        self.num_steps = 0
        self.forward_ns = 0  # of timed forwards
        self._is_timed = self._is_watched = mode == "full"

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    @property
    def max_model_len(self) -> int:
        return self._inner.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def supports_embeddings(self) -> bool:
        return self._inner.supports_embeddings

    @property
    def num_replays(self) -> int:
        return self._inner.num_replays

    def execute(self, batch: Batch) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        self.num_steps += 1
        if self._mode == "light":
            return self._sampled_execute(batch)
        self._step.in_forward = True
        with self._observer.watching():
            self._inner.execute(batch)
        self._step.in_forward = False
        with self._step.suspended(), self._observer.timing():
            begin = time.perf_counter_ns()
            logits = self._inner.execute(batch)
            self.forward_ns += time.perf_counter_ns() - begin
        return logits

    def _sampled_execute(self, batch: Batch) -> torch.Tensor:
        kind = kind_of(batch)
        look = self.sampler.choose(kind)
        self._is_timed, self._is_watched = look == "timing", look == "watching"
        begin = time.perf_counter_ns()
        try:
            if self._is_watched:
                self._step.in_forward = True
                with self._observer.watching(), self._step:
                    return self._inner.execute(batch)
            if self._is_timed:
                with self._observer.timing():
                    return self._inner.execute(batch)
            return self._inner.execute(batch)
        finally:
            self.sampler.took(kind, look, time.perf_counter_ns() - begin)

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._inner.embed(token_ids)

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """See `ModelRunner.top_k_top_p`."""
        if self._mode == "full":
            with self._observer.paused():
                copy = logits.clone()
            with self._observer.watching():
                self._inner.top_k_top_p(copy, top_k, top_p)
            with self._step.suspended(), self._observer.timing():
                return self._inner.top_k_top_p(logits, top_k, top_p)
        if self._is_watched:
            with self._observer.watching(), self._step:
                return self._inner.top_k_top_p(logits, top_k, top_p)
        if self._is_timed:
            with self._observer.timing():
                return self._inner.top_k_top_p(logits, top_k, top_p)
        return self._inner.top_k_top_p(logits, top_k, top_p)

    def close(self) -> None:
        self._inner.close()
