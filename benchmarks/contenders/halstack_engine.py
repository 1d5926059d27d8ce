"""Our own engine through its in-process API: the same loop that serves, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions
from contenders.weights import gguf_path


class HalstackEngine:
    """precision: as `hal serve --precision`; the weights are the Q4_1 file as it is stored."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._num_requests = 0

    def versions(self) -> dict[str, str]:
        found = package_versions("halstack", "torch", "numba")
        return found | {"plan": self._engine.plan_hash()}

    def load(self, options: LoadOptions) -> None:
        import torch

        from hal_engine.serving import open_engine

        torch.set_num_threads(options.threads)
        self._engine = open_engine(
            str(gguf_path(options.models, "Q4_1")),
            precision=options.precision,
            max_num_seqs=options.max_sequences,
            max_model_len=options.max_length,
            prefix_reuse=False,
        )

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        from hal_engine.api import GenerationRequest, SamplingParams
        from hal_engine.offline import generate_sync

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        requests = []
        for prompt in prompts:
            self._num_requests += 1
            requests.append(
                GenerationRequest(
                    request_id=f"benchmark-{self._num_requests}",
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                )
            )
        completions = generate_sync(self._engine, requests)
        errors = [completion.error for completion in completions if completion.error]
        if errors:
            raise RuntimeError(f"halstack: a request ended with an error: {errors[0]}")
        return [list(completion.token_ids) for completion in completions]

    def close(self) -> None:
        asyncio.run(self._engine.close())
