"""`quantization_config` of checkpoints that are stored in FP8 blocks."""

from __future__ import annotations

from typing import Literal

from hal_engine.config import said
from hal_engine.config_parts import QuantizationConfig
from hal_engine.config_values import StrictValues

_BLOCK_SIZES = (32, 128)
_SCALES: dict[str, Literal["float32", "ue8m0"]] = {"float32": "float32", "ue8m0": "ue8m0"}


def refuse_quantization(values: StrictValues) -> None:
    """For families that are served unquantised or from a GGUF file."""
    for key in ("quantization_config", "compression_config"):
        block = values.raw(key)
        if block is None:
            continue
        method = block.get("quant_method", "unnamed") if isinstance(block, dict) else block
        raise values.error(
            key,
            "unquantised weights (float32, bfloat16, float16) or a GGUF file",
            said(f"quantisation method {method!r}"),
            "use the unquantised checkpoint or a Q4_0, Q4_1 or Q8_0 GGUF of it",
        )


def read_quantization(values: StrictValues) -> QuantizationConfig | None:
    """FP8 with square blocks and dynamic activations, routed experts maybe in MXFP4; or None.

    Raises ConfigError for another method, for blocks and scales that no format of ours has, and
    for two places that disagree about the experts.
    """
    values.fixed("compression_config", None)
    outer = values.raw("expert_dtype")
    block = values.mapping("quantization_config")
    if block is None:
        if outer not in (None, "fp8", "bf16"):
            raise values.error(
                "expert_dtype", "a quantization_config beside it", outer, "it says what is stored"
            )
        return None
    method = block.string("quant_method")
    if method != "fp8":
        raise block.error(
            "quant_method", "'fp8' (weights in square FP8 blocks)", method, "use such a checkpoint"
        )
    block.fixed("fmt", "e4m3")
    block.fixed("activation_scheme", "dynamic")
    size = _block_size(block)
    scale = block.string("scale_fmt", default="float32")
    if scale not in _SCALES:
        raise block.error("scale_fmt", f"one of {', '.join(_SCALES)}", scale)
    kept = _kept_modules(block)
    has_fp4_experts = _has_fp4_experts(values, block, outer)
    unread = [key for key in block.unread_keys() if block.raw(key) not in (None, False)]
    if unread:
        raise block.error(unread[0], "a setting of block-wise FP8", block.raw(unread[0]))
    return QuantizationConfig(
        block_size=size,
        scale_dtype=_SCALES[scale],
        has_fp4_experts=has_fp4_experts,
        kept_modules=kept,
    )


def _block_size(block: StrictValues) -> int:
    sides = block.integers("weight_block_size", length=2, least=1, most=2**16)
    if sides is None or sides[0] != sides[1] or sides[0] not in _BLOCK_SIZES:
        known = " or ".join(f"[{size}, {size}]" for size in _BLOCK_SIZES)
        raise block.error("weight_block_size", known, block.raw("weight_block_size"))
    return sides[0]


def _kept_modules(block: StrictValues) -> tuple[str, ...]:
    value = block.raw("modules_to_not_convert")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise block.error("modules_to_not_convert", "a list of module names", value)
    return tuple(value)


def _has_fp4_experts(values: StrictValues, block: StrictValues, outer: object) -> bool:
    inner = block.raw("expert_dtype")
    if None not in (inner, outer) and inner != outer:
        raise block.error("expert_dtype", f"the expert_dtype beside it ({outer!r})", inner)
    dtype = outer if inner is None else inner
    if dtype not in (None, "fp8", "fp4"):
        raise values.error("expert_dtype", "'fp8' or 'fp4'", dtype)
    return dtype == "fp4"
