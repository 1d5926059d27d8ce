"""OpenVINO GenAI's continuous-batching pipeline on an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions


class OpenVinoPipeline:
    """precision: "fp32", "int8" or "int4" (weights; computation is asked to be f32 for fp32)."""

    def __init__(self) -> None:
        self._pipeline: Any = None

    def versions(self) -> dict[str, str]:
        return package_versions("openvino-genai", "openvino")

    def load(self, options: LoadOptions) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = options.max_sequences
        scheduler.max_num_batched_tokens = 512
        scheduler.cache_size = 2  # GiB
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.precision == "fp32":
            # A CPU with a bf16 unit would otherwise compute in bf16.
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(options.models / f"openvino-{options.precision}"),
            scheduler_config=scheduler,
            device="CPU",
            properties=properties,
        )

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        import numpy
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    def close(self) -> None:
        self._pipeline = None
