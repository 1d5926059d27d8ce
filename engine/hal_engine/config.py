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
from hal_engine.config_parts import (
    CompressedAttentionConfig,
    EngramConfig,
    HyperConnectionConfig,
    IndexerConfig,
    MlaConfig,
    MoeConfig,
    QuantizationConfig,
    RopeConfig,
)

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "deepseek_v4",
    "deepseek_v41",
]
# Families whose layers the engine can run; the others can be planned.
RUNNABLE_FAMILIES: frozenset[Family] = frozenset({"llama", "mistral", "qwen2", "qwen3"})
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
class ModelConfig:
    """One decoder-only model. Sizes are counts of elements; a window counts tokens.

    `sliding_windows[i]` is layer i's attention window in tokens, the query's own included, or None
    for full attention. `stored_formats` maps the tensor names of the checkpoint (Hugging Face
    style) to the format they are stored in; it is empty where only `config.json` is known, and then
    `quantization` says how the checkpoint stores them. Parts that a model does not have are None.
    num_draft_layers: layers of the checkpoint that only speculative decoding uses.
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
    mla: MlaConfig | None = None
    indexer: IndexerConfig | None = None
    moe: MoeConfig | None = None
    compressed: CompressedAttentionConfig | None = None
    hyper_connections: HyperConnectionConfig | None = None
    engram: EngramConfig | None = None
    quantization: QuantizationConfig | None = None
    num_draft_layers: int = 0

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def stored_format(self, tensor_name: str) -> str:
        """A name of hal.ops.formats: float32, bfloat16, float16, int8_g32, int4_g32,
        int4_g32_asym, an FP8 or FP4 block format, or `gguf_<type>` for a block type that has no
        group format."""
        stored = self.quantization and self.quantization.stored_format(tensor_name)
        return stored or self.stored_formats.get(tensor_name, self.dtype or "float32")

    @property
    def is_runnable(self) -> bool:
        """Whether the engine has the layers; otherwise it can only be planned."""
        return self.family in RUNNABLE_FAMILIES

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The experts of that layer, None for a dense one."""
        return self.moe if self.moe is not None and layer in self.moe.layers else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a plan or a log; without the per-tensor table and absent parts."""
        result = asdict(self)
        del result["stored_formats"]
        for part in _OPTIONAL_PARTS:
            if not result[part]:
                del result[part]
        return result


_OPTIONAL_PARTS = (
    "mla",
    "indexer",
    "moe",
    "compressed",
    "hyper_connections",
    "engram",
    "quantization",
    "num_draft_layers",
)


def load_model_config(path: str | Path) -> ModelConfig:
    """Configuration of the model at `path`: a folder, a configuration (.json), or a .gguf file.

    Reads no tensor data. Raises ConfigError.
    """
    from hal_engine import config_gguf, config_huggingface

    path = Path(path)
    if path.suffix == ".gguf":
        return config_gguf.read_config(path)
    return config_huggingface.read_config(path if path.suffix == ".json" else path / "config.json")
