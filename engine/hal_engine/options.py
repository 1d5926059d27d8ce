"""What a user may set of an engine. `hal serve`, `hal plan` and `hal audit` share these options."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hal_engine.kv_choice import IndexDType, KvDType
from hal_engine.precision import PrecisionName


class EngineOptions(BaseModel):
    """Section `engine` of the settings. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    precision: PrecisionName = Field(
        default="auto", description="auto keeps the weights as stored; others change the numbers"
    )
    kv_dtype: KvDType = Field(
        default="auto", description="dtype of the KV cache; native is the packed rows of the family"
    )
    index_dtype: IndexDType = Field(
        default="auto", description="of an indexer's keys, where a model has one"
    )
    sparse_attention: Literal["model", "off"] = Field(
        default="model",
        description="off: attend to all keys where the model chooses some; changes the meaning",
    )
    tp: int = Field(default=1, ge=1, le=64, description="tensor-parallel ranks")
    device: str = Field(default="", description="device id, e.g. cpu:0; empty: the only one")
    max_model_len: int = Field(
        default=0, ge=0, le=1 << 24, description="context length; 0: the model's own, at most 8192"
    )
    max_num_batched_tokens: int = Field(
        default=512, ge=16, le=1 << 20, description="tokens of one step"
    )
    max_num_seqs: int = Field(default=32, ge=1, le=4096, description="sequences of one step")
    block_size: Literal[0, 16, 32, 64, 128, 256] = Field(
        default=0,
        description="tokens of a KV block; 0: 64 for latent and compressed caches, else 16",
    )
    num_blocks: int = Field(
        default=0, ge=0, le=1 << 24, description="KV blocks; 0: from the free memory"
    )
    max_waiting: int = Field(
        default=256, ge=1, le=1 << 20, description="requests that may wait; more are refused"
    )
    capture_steps: Literal["auto", "off"] = Field(
        default="auto",
        description="run decode steps as one call where the plan's implementations allow it",
    )
    prefix_reuse: bool = Field(default=True, description="share KV blocks of equal prefixes")
    allow_semantics: tuple[str, ...] = Field(
        default=(), description="names of semantic notes that are accepted"
    )
