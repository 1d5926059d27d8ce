"""Ranks of a collective as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class ThreadGroup:
    """A `CollectiveGroup` whose `exchange` is a meeting at a barrier.

    turn: held by the one rank that computes, where two at once would share what is one process's.
    """

    def __init__(
        self,
        rank: int,
        board: list[torch.Tensor],
        barrier: threading.Barrier,
        turn: threading.Lock | None = None,
    ) -> None:
        self.rank, self.world_size = rank, len(board)
        self.process_group = None
        self._board, self._barrier, self._turn = board, barrier, turn

    def close(self) -> None:
        pass

    def add_check(self, check: Callable[[], None]) -> None:
        raise NotImplementedError("the references raise themselves")

    def check(self) -> None:
        pass

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = x.clone()
        if self._turn is not None:
            self._turn.release()
        try:
            self._barrier.wait(timeout=60)
            parts = [part.clone() for part in self._board]
            self._barrier.wait(timeout=60)
        finally:
            if self._turn is not None:
                self._turn.acquire()
        return parts


def on_threads(
    world: int, work: Callable[[ThreadGroup], Any], *, one_at_a_time: bool = False
) -> list[Any]:
    """What each rank's `work` returns; an error of a rank is raised."""
    board, barrier = [torch.empty(0)] * world, threading.Barrier(world)
    turn = threading.Lock() if one_at_a_time else None
    results: list[Any] = [None] * world
    errors: list[Exception] = []

    def run(rank: int) -> None:
        if turn is not None:
            turn.acquire()
        try:
            results[rank] = work(ThreadGroup(rank, board, barrier, turn))
        except Exception as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)
            barrier.abort()
        finally:
            if turn is not None:
                turn.release()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results
