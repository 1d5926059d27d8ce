"""In which formats latent, compressed and index caches are kept.

A format changes the numbers, so it follows the checkpoint: one that is stored in FP8 has its
family's packed rows, any other bfloat16, unless the user says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hal.errors import PlanError
from hal.ops.kv_formats import KV_FORMATS
from hal_engine.config import ModelConfig

KvDType = Literal["auto", "float32", "bfloat16", "fp8", "native"]
IndexDType = Literal["auto", "bfloat16", "fp8", "fp4"]
KV_DTYPES: tuple[KvDType, ...] = get_args(KvDType)
_INDEX: dict[str, str] = {"bfloat16": "bf16", "fp8": "fp8_132", "fp4": "fp4_68"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChoice:
    """Names of `hal.ops.kv_formats`: of latent or compressed rows, of windows, of index keys.

    Empty for a cache that the model does not have; all are for dense keys and values.
    """

    main: str = ""
    window: str = ""
    index: str = ""


def choose_kv_formats(config: ModelConfig, kv_dtype: KvDType, index_dtype: IndexDType) -> KvChoice:
    """Raises PlanError for a format that the family or its sizes do not have."""
    if config.mla is None and config.compressed is None:
        for setting, value in (("kv_dtype", kv_dtype), ("index_dtype", index_dtype)):
            if value not in ("auto", "bfloat16", "float32") or (
                setting == "index_dtype" and value != "auto"
            ):
                found = f"engine.{setting}={value}"
                raise _refusal(config, "dense keys and values in float32 or bfloat16", found)
        return KvChoice()
    if kv_dtype == "float32":
        raise _refusal(config, "bfloat16, fp8 or native rows", "engine.kv_dtype=float32")
    is_packed = kv_dtype in ("fp8", "native") or (
        kv_dtype == "auto" and config.quantization is not None
    )
    choice = _packed(config, kv_dtype) if is_packed else _unpacked(config)
    if config.indexer is not None and index_dtype != "auto":
        choice = KvChoice(main=choice.main, window=choice.window, index=_INDEX[index_dtype])
    misfit = _misfit(config, choice)
    if not misfit:
        return choice
    if kv_dtype == "auto" and index_dtype == "auto":
        return _unpacked(config)
    raise _refusal(config, misfit, f"engine.kv_dtype={kv_dtype}, engine.index_dtype={index_dtype}")


def _unpacked(config: ModelConfig) -> KvChoice:
    return KvChoice(
        main="bf16",
        window="bf16" if config.compressed is not None else "",
        index="bf16" if config.indexer is not None else "",
    )


def _packed(config: ModelConfig, kv_dtype: KvDType) -> KvChoice:
    index = "fp8_132" if config.indexer is not None else ""
    if config.family == "deepseek_v41":
        if kv_dtype == "fp8":
            return KvChoice(main="v41_528", window="v41_528", index=index)
        return KvChoice(main="fp4_288", window="v41_528", index="fp4_68")
    if config.compressed is not None:
        return KvChoice(main="v4_584", window="v4_584", index=index)
    return KvChoice(main="fp8_656", index=index)


def _misfit(config: ModelConfig, choice: KvChoice) -> str:
    """The sizes that a packed row needs and the model does not have, in words; "" if none."""
    mla, compressed, indexer = config.mla, config.compressed, config.indexer
    if (
        mla is not None
        and choice.main == "fp8_656"
        and (mla.kv_lora_rank, mla.rope_dim) != (512, 64)
    ):
        return f"kv_lora_rank 512 and qk_rope_head_dim 64 for {choice.main}"
    if compressed is not None:
        packed = {choice.main, choice.window} - {"bf16"}
        if packed and (config.head_dim, compressed.rope_dim) != (512, 64):
            return f"head_dim 512 and qk_rope_head_dim 64 for {', '.join(sorted(packed))}"
    if indexer is not None and choice.index != "bf16" and indexer.head_dim != 128:
        return f"index_head_dim 128 for {choice.index}"
    return ""


def _refusal(config: ModelConfig, required: str, found: str) -> PlanError:
    return PlanError(
        f"KV cache of {config.source}", required, found, "leave it at auto, or choose another"
    )


def row_bytes(row_format: str, width: int) -> int:
    """Bytes of one row of `width` values."""
    return KV_FORMATS[row_format].row_bytes(width)
