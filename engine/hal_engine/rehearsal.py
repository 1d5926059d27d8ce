"""A rehearsal before the first request: two short generations through scheduler, runner, sampler.

A first request meets what no later one meets: memory that nobody has touched, kernels for other
numbers of tokens, phases and samplers than the one-token forward of /ready, imports inside of
functions. Here they are met while the model loads, so that ready means ready. The structured-output
library is left out: it reads the vocabulary for a second, which most servers never need.
"""

from __future__ import annotations

import time

from hal_engine.api import GenerationRequest, SamplingParams, Tokenizer
from hal_engine.batch import ModelRunner
from hal_engine.engine_core import EngineCore
from hal_engine.scheduler import SchedulerConfig

PROMPT_TOKENS = 40
NEW_TOKENS = 3


def rehearse(runner: ModelRunner, tokenizer: Tokenizer, config: SchedulerConfig) -> int:
    """Generates and forgets; returns the number of steps. On the thread that will run the steps.

    The blocks it writes are free afterwards. A KV cache or a context too small for it is left
    alone. Raises what the runner raises: the first request would.
    """
    import torch

    room = min(runner.max_model_len, runner.num_blocks * runner.block_size) - NEW_TOKENS
    num_tokens = min(PROMPT_TOKENS, room)
    if num_tokens < 1:
        return 0
    core = EngineCore(runner, tokenizer, config)
    for number, sampling in enumerate(_samplings()):
        ids = tuple((number + 7 * i) % runner.vocab_size for i in range(num_tokens))
        request = GenerationRequest(
            request_id=f"rehearsal-{number}", prompt_token_ids=ids, sampling=sampling
        )
        core.submit(request, None, time.monotonic())
    with torch.inference_mode():
        while core.has_work:
            core.step()
    return core.num_steps


def _samplings() -> tuple[SamplingParams, ...]:
    """Greedy, and a draw with everything that edits a row."""
    drawn = SamplingParams(
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias={0: -1.0},
        seed=0,
        logprobs=1,
    )
    return SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), drawn
