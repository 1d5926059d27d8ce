"""CTranslate2's batched generator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions
from contenders.weights import HUGGING_FACE_FOLDER


class CTranslate2Generator:
    """precision: "fp32" or "int8" (weights int8 per row, activations quantised per call)."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._names: list[str] = []

    def versions(self) -> dict[str, str]:
        return package_versions("ctranslate2")

    def load(self, options: LoadOptions) -> None:
        import ctranslate2

        folder = options.models / f"ctranslate2-{options.precision}"
        self._generator = ctranslate2.Generator(
            str(folder),
            device="cpu",
            compute_type={"fp32": "float32"}.get(options.precision, options.precision),
            inter_threads=1,
            intra_threads=options.threads,
        )
        # It takes tokens by name, in the order of the vocabulary.
        tokenizer = json.loads(
            (options.models / HUGGING_FACE_FOLDER / "tokenizer.json").read_text()
        )
        names = {index: name for name, index in tokenizer["model"]["vocab"].items()}
        names |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        self._names = [names[index] for index in range(len(names))]

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        results = self._generator.generate_batch(
            [[self._names[token] for token in prompt] for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            cache_static_prompt=False,
            max_batch_size=0,
        )
        return [[int(token) for token in result.sequences_ids[0]] for result in results]

    def close(self) -> None:
        self._generator = None
