"""One live request inside the engine: its tokens, its KV blocks, where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hal_engine.api import GenerationRequest, TokenLogprob

if TYPE_CHECKING:
    from hal_engine.detokenizer import Detokenizer
    from hal_engine.sampler import SamplerState


class Status(Enum):
    WAITING = "waiting"  # not admitted yet
    PREFILL = "prefill"  # admitted; some known tokens are not in the KV cache yet
    DECODE = "decode"  # all but the newest token are in the KV cache
    PREEMPTED = "preempted"  # lost its blocks; waits to be recomputed
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class LiveSequence:
    """`token_ids` is prompt plus generated; the first `num_computed` are in the KV cache."""

    seq_id: int
    request: GenerationRequest
    max_total_tokens: int  # prompt plus generated, never above the model's context
    arrival_s: float  # time.monotonic()
    deadline_s: float | None = None  # time.monotonic() at which the request ends with an error
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed: int = 0
    num_cached_tokens: int = 0  # prompt tokens the first admission found in the prefix cache
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None  # time.monotonic()
    status: Status = Status.WAITING
    prompt_logprobs: list[tuple[TokenLogprob, tuple[TokenLogprob, ...]]] | None = None
    sampler: SamplerState | None = None
    detokenizer: Detokenizer | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)
            self.num_prompt_tokens = len(self.token_ids)
        if self.request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether logits of prompt positions are still to be collected."""
        return (
            self.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )
