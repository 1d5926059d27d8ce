"""The same weights for every engine, all derived from one Q4_1 GGUF of SmolLM2-135M-Instruct.

`python -m contenders.weights ARTIFACT --models FOLDER --gguf FILE` makes one of them; it runs in
the environment that `catalogue.ARTIFACTS` names. fp32 means the exact values of the stored 4-bit
and 8-bit blocks; other precisions are made from fp32 by each engine's own tool, or by the `gguf`
package. What exists is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 49_152
HUGGING_FACE_FOLDER = "hugging-face-fp32"
# Checks and sample prompts for people, tokenised once, so that every engine is given the same ids.
PROMPTS_FILE = "prompts.json"
GREEDY_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain in three sentences why the sky is blue.",
)


def gguf_path(models: Path, precision: str) -> Path:
    """The GGUF of a type: F32, Q8_0, Q4_0 or Q4_1."""
    return models / "gguf" / f"SmolLM2-135M-Instruct.{precision.upper()}.gguf"


def make_hugging_face(target: Path, gguf: Path, models: Path) -> None:
    """Plain fp32 tensors, the tokenizer and the tokenised prompts."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # The tensors are plain by now, but transformers refuses to save while this mark is present.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # The file names its pre-tokenizer `smollm`: digits are split one by one before the byte-level
    # step. The conversion leaves that out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(target)
    _state_rope_theta(target / "config.json")
    prompts = [
        [
            int(token)
            for token in tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        ]
        for text in GREEDY_PROMPTS
    ]
    document = {"greedy": prompts}
    (target / PROMPTS_FILE).write_text(json.dumps(document))


def _state_rope_theta(config_file: Path) -> None:
    """Older readers know only the top-level name of the rotation base."""
    config: dict[str, Any] = json.loads(config_file.read_text())
    parameters = config.get("rope_parameters")
    if parameters and "rope_theta" not in config:
        config["rope_theta"] = parameters["rope_theta"]
        config_file.write_text(json.dumps(config, indent=2))


def copy_gguf(target: Path, gguf: Path, models: Path) -> None:
    """The original file, under the name that the others go by."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(gguf, target)


def make_gguf(target: Path, gguf: Path, models: Path) -> None:
    """The same model in another GGUF type. The tied embedding stays Q8_0 in the 4-bit file, as it
    is in the original."""
    from gguf import (
        GGMLQuantizationType,
        GGUFReader,
        GGUFValueType,
        GGUFWriter,
        dequantize,
        quantize,
    )

    target.parent.mkdir(parents=True, exist_ok=True)
    wanted = target.name.split(".")[-2]
    reader = GGUFReader(gguf)
    partial = target.with_suffix(".partial")
    writer = GGUFWriter(partial, arch=str(reader.fields["general.architecture"].contents()))
    left_out = ("GGUF.", "general.architecture", "general.file_type")
    for name, field in reader.fields.items():
        if name.startswith(left_out):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        is_matrix = tensor.tensor_type != GGMLQuantizationType.F32
        kind = GGMLQuantizationType[wanted] if is_matrix else GGMLQuantizationType.F32
        if wanted == "Q4_0" and tensor.name == "token_embd.weight":
            kind = GGMLQuantizationType.Q8_0
        data = quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_shape=data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


def make_openvino(target: Path, gguf: Path, models: Path) -> None:
    """optimum-intel's export; int4 in groups of 64: its default, 128, does not divide 576."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(models / HUGGING_FACE_FOLDER), "--task", "text-generation-with-past"]
    precision = target.name.rsplit("-", 1)[-1]
    command += ["--weight-format", precision]
    command += ["--group-size", "64"] if precision == "int4" else []
    command.append(str(target))
    subprocess.run(command, check=True)


def make_onnxruntime(target: Path, gguf: Path, models: Path) -> None:
    """onnxruntime-genai's model builder for the CPU provider."""
    precision = target.name.rsplit("-", 1)[-1]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(models / HUGGING_FACE_FOLDER), "-o", str(target)]
    command += ["-p", precision, "-e", "cpu"]
    subprocess.run(command, check=True)


def make_ctranslate2(target: Path, gguf: Path, models: Path) -> None:
    """CTranslate2's converter; it quantises to int8 per row."""
    precision = target.name.rsplit("-", 1)[-1]
    command = [str(Path(sys.executable).with_name("ct2-transformers-converter"))]
    command += ["--model", str(models / HUGGING_FACE_FOLDER), "--output_dir", str(target)]
    command += ["--quantization", {"fp32": "float32"}.get(precision, precision)]
    subprocess.run(command, check=True)


MAKERS: dict[str, Callable[[Path, Path, Path], None]] = {
    "copy": copy_gguf,
    "hugging-face": make_hugging_face,
    "gguf": make_gguf,
    "openvino": make_openvino,
    "onnxruntime": make_onnxruntime,
    "ctranslate2": make_ctranslate2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", help="path of the result inside the models folder")
    parser.add_argument("--models", type=Path, required=True, help="folder of all results")
    parser.add_argument("--gguf", type=Path, required=True, help="the Q4_1 GGUF")
    parser.add_argument("--maker", choices=sorted(MAKERS), required=True)
    chosen = parser.parse_args()
    target = chosen.models / chosen.artifact
    if target.exists():
        return 0
    # Half a result must not look like a whole one.
    try:
        MAKERS[chosen.maker](target, chosen.gguf, chosen.models)
    except BaseException:
        if target.is_dir():
            shutil.rmtree(target)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
