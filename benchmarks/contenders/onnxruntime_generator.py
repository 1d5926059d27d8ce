"""ONNX Runtime GenAI: a generator over a batch of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions


class OnnxRuntimeGenerator:
    """precision: "fp32", "int8" or "int4", as the model builder made it.

    A batch has one length here: prompts of several lengths are run one after the other, which only
    the check of the answers does.
    """

    def __init__(self) -> None:
        self._model: Any = None

    def versions(self) -> dict[str, str]:
        return package_versions("onnxruntime-genai", "onnxruntime")

    def load(self, options: LoadOptions) -> None:
        import json

        import onnxruntime_genai

        folder = options.models / f"onnxruntime-{options.precision}"
        config = onnxruntime_genai.Config(str(folder))
        session = {"intra_op_num_threads": options.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        if len({len(prompt) for prompt in prompts}) > 1:
            return [self.generate([prompt], new_tokens)[0] for prompt in prompts]
        import numpy
        import onnxruntime_genai

        length = len(prompts[0])
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=len(prompts),
            max_length=length + new_tokens,
            min_length=length + new_tokens,  # keeps EOS from ending a sequence
            do_sample=False,
        )
        generator = onnxruntime_genai.Generator(self._model, params)
        generator.append_tokens(numpy.array(prompts, dtype=numpy.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
        return [
            [int(token) for token in generator.get_sequence(row)[length:]]
            for row in range(len(prompts))
        ]

    def close(self) -> None:
        self._model = None
