"""Which steps of a light audit are timed and which are watched, so that it stays light.

A kind of step, by its phases and the magnitude of its sizes, is watched and timed once as soon as
it comes, so that each path is seen at all. After that a step is watched only where that has taken
less than a fixed share of the running time; timing a step costs next to nothing.
"""

from __future__ import annotations

from typing import Final, Literal

from hal_engine.batch import Batch

WATCH_SHARE: Final = 0.01
"""What watching may add to the time of the steps, but for the first of each kind."""
Look = Literal["none", "timing", "watching"]
StepKind = tuple[int, int]


def kind_of(batch: Batch) -> StepKind:
    """The magnitudes, as powers of two, of the sequences that decode and the tokens of prompts."""
    prompt_tokens = sum(len(sequence.token_ids) for sequence in batch.prefill)
    return len(batch.decode).bit_length(), prompt_tokens.bit_length()


class StepSampler:
    """Ask `choose` before a step, and say with `took` what it took.

    every: the number of steps of which at most one is timed and at most one is watched.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._timed: set[StepKind] = set()
        self._watched: set[StepKind] = set()
        self._since_timed = self._since_watched = 0
        self._watching_ns = 0  # of watched steps that were not the first of their kind
        self._other_ns = 0
        self._last_watch_ns = 0
        self.num_timed = self.num_watched = 0

    def choose(self, kind: StepKind) -> Look:
        """How the step of this kind that comes now is run."""
        self._since_timed += 1
        self._since_watched += 1
        if kind not in self._watched:
            return "watching"
        if kind not in self._timed or self._since_timed >= self._every:
            return "timing"
        if self._since_watched >= self._every and self._can_afford_watching():
            return "watching"
        return "none"

    def took(self, kind: StepKind, look: Look, ns: int) -> None:
        """The step that was chosen last took so long."""
        if look == "watching":
            self.num_watched += 1
            self._since_watched = 0
            self._last_watch_ns = ns
            if kind in self._watched:
                self._watching_ns += ns
            self._watched.add(kind)
            return
        self._other_ns += ns
        if look == "timing":
            self.num_timed += 1
            self._since_timed = 0
            self._timed.add(kind)

    def _can_afford_watching(self) -> bool:
        return self._watching_ns + self._last_watch_ns <= WATCH_SHARE * self._other_ns
