"""Is a contender right? Its greedy continuations beside those of transformers in fp32.

An fp32 contender must give the same tokens. A quantised one may not; its continuations must be
about as likely under the fp32 model as the fp32 model's own. What fails is listed but takes no part
in ratios: a fast wrong engine is no peer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contenders.catalogue import ENTRIES, REFERENCE
from contenders.process import ContenderProcess, RunOptions
from contenders.weights import HUGGING_FACE_FOLDER, PROMPTS_FILE

NEW_TOKENS = 32
# By how many nats per token a quantised continuation may be less likely than the fp32 one.
NATS_TOLERANCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """identical: prompts with the reference's tokens. leading: tokens before each difference.
    nats: mean negative log-likelihood under the fp32 model; reference_nats: of its own."""

    identical: int
    prompts: int
    leading: list[int]
    nats: float
    reference_nats: float
    is_right: bool

    def to_dict(self) -> dict[str, Any]:
        text = f"{self.identical}/{self.prompts} identical, {self.nats:.2f} nats"
        return asdict(self) | {"text": text}


class Checker:
    """Holds the reference: a process of transformers in fp32, stopped while it is not asked."""

    def __init__(self, options: RunOptions) -> None:
        document = json.loads((options.models / HUGGING_FACE_FOLDER / PROMPTS_FILE).read_text())
        self._prompts: list[list[int]] = document["greedy"]
        self._process = ContenderProcess(ENTRIES[REFERENCE], options)
        self._process.load()
        self._expected = [self._continue(self._process, prompt) for prompt in self._prompts]
        self._reference_nats = self._nats(self._expected)
        self._process.pause()

    def check(self, contender: ContenderProcess) -> Check:
        """Its continuation of each prompt. Leaves the contender running."""
        found = [self._continue(contender, prompt) for prompt in self._prompts]
        contender.pause()
        self._process.resume()
        nats = self._nats(found)
        self._process.pause()
        contender.resume()
        leading = [_num_leading(f, e) for f, e in zip(found, self._expected, strict=True)]
        identical = sum(f == e for f, e in zip(found, self._expected, strict=True))
        if contender.entry.precision_class == "fp32":
            is_right = identical == len(self._prompts)
        else:
            is_right = nats <= self._reference_nats + NATS_TOLERANCE
        return Check(
            identical=identical,
            prompts=len(self._prompts),
            leading=leading,
            nats=round(nats, 4),
            reference_nats=round(self._reference_nats, 4),
            is_right=is_right,
        )

    def close(self) -> None:
        self._process.kill()

    def _continue(self, contender: ContenderProcess, prompt: Sequence[int]) -> list[int]:
        return contender.generate([prompt], NEW_TOKENS)[1][0]

    def _nats(self, continuations: Sequence[Sequence[int]]) -> float:
        scores = [
            self._process.score(prompt, continuation)
            for prompt, continuation in zip(self._prompts, continuations, strict=True)
        ]
        return sum(scores) / len(scores)


def _num_leading(found: Sequence[int], expected: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(found, expected, strict=True)):
        if left != right:
            return index
    return len(expected)
