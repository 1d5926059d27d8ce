"""Which number formats a model runs in: what the user asked for, resolved per weight.

A precision changes the numbers, so it is never chosen silently: `auto` runs the weights exactly as
the checkpoint stores them, and everything else is something that the user typed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from hal.errors import PlanError
from hal.ops.formats import FORMATS, WeightFormat
from hal_engine.config import ModelConfig

PrecisionName = Literal["auto", "fp32", "bf16", "w8", "w8a8", "w4", "w4a8"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
KvDType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The resolved precision of a run. dtype: of activations. notes: remarks for the plan."""

    name: PrecisionName
    dtype: str
    kv_dtype: str
    notes: tuple[str, ...] = ()

    def weight_format(self, config: ModelConfig, tensor_names: Iterable[str]) -> WeightFormat:
        """The format of a matrix product whose weight is made of these tensors (packed together).

        Raises PlanError if the tensors are stored in different formats and the precision keeps
        stored formats, or if `w4` is asked of weights that are not stored with 4 bits.
        """
        stored = {config.stored_format(name) for name in tensor_names}
        if self.name == "w8":
            return FORMATS["int8_channel"]
        if self.name == "w8a8":
            return FORMATS["int8_channel_a8"]
        if self.name in ("w4", "w4a8"):
            return self._four_bits(config, stored)
        if self.name == "auto" and len(stored) == 1:
            kept = FORMATS.get(next(iter(stored)))
            if kept is not None and (self.dtype == "float32" or not kept.is_dense):
                return kept
        return FORMATS[self.dtype]

    def _four_bits(self, config: ModelConfig, stored: set[str]) -> WeightFormat:
        """4-bit tensors as stored; the checkpoint's 8-bit ones (embeddings) keep their 8 bits."""
        known = {"int4_g32", "int4_g32_asym", "int8_g32"}
        if len(stored) != 1 or not stored <= known:
            raise PlanError(
                f"precision {self.name} of {config.source}",
                "weights stored in one 4-bit or 8-bit group format",
                ", ".join(sorted(stored)),
                "use a GGUF of type Q4_0 or Q4_1, or another precision (w8 quantises any weight)",
            )
        name = next(iter(stored))
        if self.name == "w4a8" and name != "int8_g32":
            name += "_a8"
        return FORMATS[name]


def resolve_precision(
    config: ModelConfig, name: PrecisionName, kv_dtype: KvDType, features: frozenset[str]
) -> Precision:
    """Activations in bfloat16 only where asked for, or stored so on a device with such a unit."""
    notes: list[str] = []
    has_bf16_unit = bool(features & {"amx_bf16", "avx512_bf16", "bf16"})
    dtype = "float32"
    if name == "bf16":
        dtype = "bfloat16"
    elif name == "auto" and config.dtype in ("bfloat16", "float16") and not config.stored_formats:
        if config.dtype == "bfloat16" and has_bf16_unit:
            dtype = "bfloat16"
        else:
            notes.append(
                f"weights stay in {config.dtype} and are widened in the product: the device "
                f"has no matrix unit for {config.dtype}, so activations are float32"
            )
    if name == "auto":
        notes += _widened_formats(config)
    return Precision(
        name=name,
        dtype=dtype,
        kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        notes=tuple(notes),
    )


def _widened_formats(config: ModelConfig) -> list[str]:
    """Block formats that no GEMM takes as stored run as their exact values in float32."""
    others = sorted({f for f in config.stored_formats.values() if f not in FORMATS})
    return [f"weights stored as {f} run as their exact values in float32" for f in others]
