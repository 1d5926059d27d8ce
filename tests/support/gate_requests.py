"""Requests on which real serving stacks went silent, and a device without a Triton back end."""

from __future__ import annotations

import dataclasses
from typing import Any

from hal.device import DeviceSpec
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.request import TokenRange


def product(weight_format: str, **changes: Any) -> GemmRequest:
    values: dict[str, Any] = {
        "n": 7168,
        "k": 2048,
        "dtype": "bfloat16",
        "weight_format": FORMATS[weight_format],
        "tokens": TokenRange(1, 512),
    }
    return GemmRequest(**(values | changes))


def latent(**changes: Any) -> MlaAttentionRequest:
    values: dict[str, Any] = {
        "phase": "decode",
        "num_heads": 64,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "block_size": 64,
        "dtype": "bfloat16",
        "kv_format": "fp8_656",
        "top_k": 2048,
        "tokens": TokenRange(1, 32),
    }
    return MlaAttentionRequest(**(values | changes))


def scores(key_format: Any, dtype: str, **changes: Any) -> IndexLogitsRequest:
    values: dict[str, Any] = {
        "phase": "decode",
        "num_heads": 64,
        "head_dim": 128,
        "key_format": key_format,
        "block_size": 64,
        "dtype": dtype,
        "tokens": TokenRange(1, 32),
    }
    return IndexLogitsRequest(**(values | changes))


def without_triton(device: DeviceSpec) -> DeviceSpec:
    """The device as a platform without a Triton back end: only libraries and torch are left."""
    return dataclasses.replace(
        device,
        features=device.features - {"triton"},
        unverified_features=device.unverified_features - {"triton"},
    )
