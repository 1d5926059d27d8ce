"""Tensor parallelism: rank 0 runs in the engine, the other ranks in processes of their own.

Rank 0 sends each batch to every worker as one line of JSON on its standard input (no pickle, no
socket); all ranks then meet in the plan's collectives. A worker that dies breaks its connections
at once; one that freezes lets a collective run into its timeout. Either way `execute` raises, and
the engine answers every request with the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from hal.binding import CallCount
from hal.errors import KernelBuildError
from hal.ops.collective import CollectiveGroup
from hal_engine.batch import Batch
from hal_engine.runner import LocalRunner
from hal_engine.workers import Workers


class TensorParallelRunner:
    """A `ModelRunner` whose batches run on all ranks."""

    def __init__(self, local: LocalRunner, workers: Workers, group: CollectiveGroup) -> None:
        self._local = local
        self._workers = workers
        self._group = group

    @property
    def block_size(self) -> int:
        return self._local.block_size

    @property
    def num_blocks(self) -> int:
        return self._local.num_blocks

    @property
    def max_model_len(self) -> int:
        return self._local.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def supports_embeddings(self) -> bool:
        return self._local.supports_embeddings

    @property
    def num_replays(self) -> int:
        return self._local.num_replays

    @property
    def worker_process_ids(self) -> list[int]:
        return self._workers.process_ids

    def worker_counts(self) -> list[list[CallCount]]:
        """Calls so far on each rank from 1 on. Raises WorkerError."""
        return self._workers.counts()

    def execute(self, batch: Batch) -> torch.Tensor:
        """See `ModelRunner.execute`. Raises WorkerError if a rank is gone or frozen, and
        KernelBuildError, with all ranks' failures, if one cannot compile a kernel."""
        self._workers.send(batch)
        try:
            return self._execute_here(batch)
        except KernelBuildError as error:
            self._workers.add_build_failures(error)
            raise

    def _execute_here(self, batch: Batch) -> torch.Tensor:
        try:
            logits = self._local.execute(batch)
            self._group.check()
            return logits
        except RuntimeError as error:  # what gloo raises for a lost peer and for a timeout
            raise self._workers.explain(error) from error

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._local.embed(token_ids)

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        return self._local.top_k_top_p(logits, top_k, top_p)

    def close(self) -> None:
        """Ends the workers, the connections and this rank's part; none is left out because another
        fails. Raises what failed."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._local.close)
            ending.callback(self._group.close)
            ending.callback(self._workers.stop)
