"""What a model is, read from `config.json` or a GGUF header before any weight is read.

`load_model_config` is the only place that turns a path into a `ModelConfig`. Values are strict: a
value of the wrong type, out of range, or a setting that would change the arithmetic and is not
implemented is a `ConfigError` that names the file, the key, what was required and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hal.errors import UserError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
FloatFormat = Literal["float32", "bfloat16", "float16"]
SourceFormat = Literal["huggingface", "gguf"]


class ConfigError(UserError, ValueError):
    """A model's configuration cannot be served: where, which key, what was required and found."""

    def __init__(
        self, file: Path | str, key: str, required: str, found: object, remedy: str = ""
    ) -> None:
        found_text = found if isinstance(found, _Said) else repr(found)
        if len(found_text) > 200:
            found_text = found_text[:200] + "…"
        message = f"{file}: {key}: required {required}, found {found_text}"
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.file = str(file)
        self.key = key
        self.required = required
        self.found = found
        self.remedy = remedy


class _Said(str):
    """Words about what was found, shown as they are instead of as a quoted value."""

    __slots__ = ()


ABSENT = _Said("nothing")


def said(text: str) -> str:
    """Marks `text` as words for ConfigError's `found` (shown without quotes)."""
    return _Said(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Frequencies are over the whole head (no partial rotation).

    `factor` stretches positions (linear, dynamic, llama3, yarn). For llama3 and yarn the original
    context is `original_max_position_embeddings`; for yarn `attention_factor` multiplies cos and
    sin and is resolved here (https://arxiv.org/abs/2309.00071).
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0 where the type does not use it
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model. Sizes are counts of elements; a window counts tokens.

    `sliding_windows[i]` is layer i's attention window in tokens, the query's own included, or None
    for full attention. `stored_formats` maps the tensor names of the checkpoint (Hugging Face
    style) to the format they are stored in; it is empty where only `config.json` is known.
    """

    source: str  # the file the configuration was read from
    source_format: SourceFormat
    family: Family
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    hidden_act: Literal["silu"]
    dtype: FloatFormat | None  # that the checkpoint says it has; None where it does not say
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    stored_formats: Mapping[str, str] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()  # in the file, without effect on the arithmetic

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def stored_format(self, tensor_name: str) -> str:
        """A name of hal.ops.formats: float32, bfloat16, float16, int8_g32, int4_g32,
        int4_g32_asym, or `gguf_<type>` for a block type that has no group format."""
        return self.stored_formats.get(tensor_name, self.dtype or "float32")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a plan or a log; without the per-tensor table."""
        result = asdict(self)
        del result["stored_formats"]
        return result


def load_model_config(path: str | Path) -> ModelConfig:
    """Configuration of the model at `path`: a folder, its config.json, or a .gguf file.

    Reads no tensor data. Raises ConfigError.
    """
    from hal_engine import config_gguf, config_huggingface

    path = Path(path)
    if path.suffix == ".gguf":
        return config_gguf.read_config(path)
    if path.name == "config.json":
        path = path.parent
    return config_huggingface.read_config(path)
