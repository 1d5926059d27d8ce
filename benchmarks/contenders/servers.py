"""The OpenAI-compatible servers that `http_load.py` compares. Plain data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders.catalogue import OWN, PrecisionClass
from contenders.environments import python_of
from contenders.weights import HUGGING_FACE_FOLDER, gguf_path

MAX_LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEntry:
    """One server with one set of weights.

    executable: a command of the environment, or "" for its Python. arguments: with the placeholders
    {model}, {port}, {threads}, {clients}. body: what requests carry beside the common fields, so
    that generation does not end before the tokens asked for. asks_usage: whether it takes
    OpenAI's `stream_options`.
    """

    name: str
    precision: str
    precision_class: PrecisionClass
    environment: str
    executable: str
    arguments: tuple[str, ...]
    artifact: str  # inside the models folder
    body: Mapping[str, Any] = field(default_factory=dict)
    asks_usage: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # whose versions are reported

    def command(
        self, cache: Path, *, model: Path, port: int, threads: int, clients: int
    ) -> list[str]:
        """Raises SetupError if its environment was not set up."""
        python = python_of(self.environment, cache)
        program = python.with_name(self.executable) if self.executable else python
        places = {"model": model, "port": port, "threads": threads, "clients": clients}
        return [str(program), *(argument.format(**places) for argument in self.arguments)]

    def model(self, models: Path) -> Path:
        return models / self.artifact

    def environment_variables(self, threads: int) -> dict[str, str]:
        """`variables`, with the cores that so many threads may take: "0,1"."""
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        return {name: value.format(cores=cores) for name, value in self.variables.items()}


def _halstack(precision: str) -> ServerEntry:
    return ServerEntry(
        name=f"{OWN}-{precision}",
        precision=precision,
        precision_class="fp32" if precision == "fp32" else "quantised",
        environment=OWN,
        executable="hal",
        arguments=(
            *("serve", "{model}", "--port", "{port}", "--precision", precision),
            *("--set", f"engine.max_model_len={MAX_LENGTH}"),
            *("--set", "engine.max_num_seqs={clients}"),
        ),
        artifact=str(gguf_path(Path(), "Q4_1")),
        body={"ignore_eos": True},
        packages=("halstack", "torch"),
    )


def _llamacpp(precision: str) -> ServerEntry:
    return ServerEntry(
        name=f"llamacpp-{precision.lower()}",
        precision=precision,
        precision_class="fp32" if precision == "F32" else "quantised",
        environment="llamacpp",
        executable="",
        arguments=(
            *("-m", "contenders.llama_cpp", "{model}", "--port", "{port}"),
            *("--threads", "{threads}", "--slots", "{clients}"),
        ),
        artifact=str(gguf_path(Path(), precision)),
        body={"ignore_eos": True, "cache_prompt": False},
        packages=("xllamacpp",),
    )


_TRANSFORMERS_GENERATION = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}

SERVERS = {
    entry.name: entry
    for entry in (
        *(_halstack(precision) for precision in ("fp32", "auto", "w8a8", "w4a8")),
        ServerEntry(
            name="vllm-fp32",
            precision="fp32",
            precision_class="fp32",
            environment="vllm",
            executable="vllm",
            arguments=(
                *("serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
                *("--dtype", "float32", "--max-model-len", str(MAX_LENGTH)),
                *("--max-num-seqs", "{clients}", "--no-enable-prefix-caching"),
            ),
            artifact=HUGGING_FACE_FOLDER,
            body={"ignore_eos": True},
            # Without a target it takes its device from its version, where the CPU is not named. By
            # default its server keeps one core for itself and binds all threads to the rest.
            variables={
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_TARGET_DEVICE": "cpu",
                "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
            },
            packages=("vllm-cpu", "torch"),
        ),
        *(_llamacpp(precision) for precision in ("F32", "Q8_0", "Q4_0")),
        ServerEntry(
            name="transformers-fp32",
            precision="fp32",
            precision_class="fp32",
            environment="transformers",
            executable="transformers",
            arguments=(
                *("serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
                *("--device", "cpu", "--dtype", "float32", "--continuous-batching"),
            ),
            artifact=HUGGING_FACE_FOLDER,
            body={"generation_config": json.dumps(_TRANSFORMERS_GENERATION)},
            asks_usage=False,
            packages=("transformers", "torch"),
        ),
    )
}
