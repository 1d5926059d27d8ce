"""Which number formats a model runs in: what the user asked for, resolved per weight.

A precision changes the numbers, so it is never chosen silently: `auto` runs the weights exactly as
the checkpoint stores them, and everything else is something that the user typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hal.errors import PlanError
from hal.ops.formats import FORMATS, WeightFormat
from hal_engine.config import ModelConfig
from hal_engine.kv_choice import IndexDType, KvDType, choose_kv_formats

PrecisionName = Literal["auto", "fp32", "bf16", "w8", "w8a8", "w4", "w4a8"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)

# What these precisions ask for beside the weights, said in the plan.
_ROUNDED_ACTIVATIONS: Mapping[str, str] = {
    "w8a8": "the activations of every product, the head's too, are rounded to int8 with a scale "
    "per token, and every weight to int8 with a scale per output channel, as w8a8 asks",
    "w4a8": "the activations of every product, the head's too, are rounded to int8 with a scale "
    "per token, as w4a8 asks; weights keep the 4 or 8 bits that they are stored with",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The resolved precision of a run. dtype: of activations. notes: remarks for the plan.

    kv_dtype: of dense keys and values; for other caches the name of kv_format, that of latent or
    compressed rows. window_format, index_format: of windows and of index keys, where there are any.
    """

    name: PrecisionName
    dtype: str
    kv_dtype: str
    notes: tuple[str, ...] = ()
    kv_format: str = ""
    window_format: str = ""
    index_format: str = ""

    @property
    def index_query_dtype(self) -> str:
        """An indexer's query is rounded to 8 bits where its keys are packed."""
        return self.dtype if self.index_format in ("", "bf16") else "float8_e4m3fn"

    def weight_format(
        self, config: ModelConfig, tensor_names: Iterable[str], *, rounds_activations: bool = True
    ) -> WeightFormat:
        """The format of a matrix product whose weight is made of these tensors (packed together).

        rounds_activations: False for a product whose activations the model keeps as they are,
        though an FP8 checkpoint rounds them elsewhere. Raises PlanError if the tensors are stored
        in different formats and the precision keeps stored formats, if `w4` is asked of weights
        that are not stored with 4 bits, or integers of weights that are stored in FP8.
        """
        stored = {config.stored_format(name) for name in tensor_names}
        if self.name.startswith("w") and config.quantization is not None:
            raise PlanError(
                f"precision {self.name} of {config.source}",
                "auto (FP8 and FP4 weights as stored), bf16 or fp32 (widened)",
                f"weights stored as {', '.join(sorted(stored))}",
                "quantising them a second time is not offered",
            )
        if self.name == "w8":
            return FORMATS["int8_channel"]
        if self.name == "w8a8":
            return FORMATS["int8_channel_a8"]
        if self.name in ("w4", "w4a8"):
            return self._four_bits(config, stored)
        if self.name == "auto" and len(stored) == 1:
            kept = FORMATS.get(next(iter(stored)))
            if kept is not None and config.quantization is not None and rounds_activations:
                kept = FORMATS.get(f"{kept.name}_a8", kept)
            if kept is not None and (self.dtype == "float32" or not kept.is_dense):
                return kept
        return FORMATS[self.dtype]

    def _four_bits(self, config: ModelConfig, stored: set[str]) -> WeightFormat:
        """4-bit tensors as stored; the checkpoint's 8-bit ones (often the head) keep their 8 bits.

        w4a8 rounds the activations of both: the user asked for it of every product.
        """
        known = {"int4_g32", "int4_g32_asym", "int8_g32"}
        if len(stored) != 1 or not stored <= known:
            raise PlanError(
                f"precision {self.name} of {config.source}",
                "weights stored in one 4-bit or 8-bit group format",
                ", ".join(sorted(stored)),
                "use a GGUF of type Q4_0 or Q4_1, or another precision (w8 quantises any weight)",
            )
        name = next(iter(stored))
        return FORMATS[f"{name}_a8" if self.name == "w4a8" else name]


def resolve_precision(
    config: ModelConfig,
    name: PrecisionName,
    kv_dtype: KvDType,
    features: frozenset[str],
    index_dtype: IndexDType = "auto",
) -> Precision:
    """Activations in bfloat16 only where asked for, or stored so on a device with such a unit.

    Raises PlanError for a cache format that the model does not have.
    """
    notes: list[str] = []
    has_bf16_unit = bool(features & {"amx_bf16", "avx512_bf16", "bf16", "matrix.bfloat16"})
    dtype = "float32"
    is_stored_so = config.dtype == "bfloat16" and not config.stored_formats
    if name == "bf16":
        dtype = "bfloat16"
    elif name == "w8" and is_stored_so and "matrix.bfloat16" in features:
        # An accelerator's unit multiplies rows in 16 bits; those in float32 only without it.
        dtype = "bfloat16"
    elif name == "auto" and config.dtype in ("bfloat16", "float16") and not config.stored_formats:
        if config.dtype == "bfloat16" and has_bf16_unit:
            dtype = "bfloat16"
        else:
            kept = "as they are stored" if config.quantization is not None else f"in {config.dtype}"
            notes.append(
                f"weights stay {kept} and are widened in the product: the device "
                f"has no matrix unit for {config.dtype}, so activations are float32"
            )
    if name == "auto":
        notes += _widened_formats(config)
    elif name in _ROUNDED_ACTIVATIONS:
        notes.append(_ROUNDED_ACTIVATIONS[name])
    elif config.quantization is not None:
        notes.append(
            f"weights stored in {config.quantization.dense_format} and smaller are widened to "
            f"{dtype}: their values are the checkpoint's, their memory is a multiple of it"
        )
    chosen = choose_kv_formats(config, kv_dtype, index_dtype)
    dense = dtype if kv_dtype == "auto" else kv_dtype
    return Precision(
        name=name,
        dtype=dtype,
        kv_dtype=chosen.main or dense,
        notes=tuple(notes),
        kv_format=chosen.main,
        window_format=chosen.window,
        index_format=chosen.index,
    )


def _widened_formats(config: ModelConfig) -> list[str]:
    """Block formats that no GEMM takes as stored run as their exact values in float32."""
    others = sorted({f for f in config.stored_formats.values() if f not in FORMATS})
    return [f"weights stored as {f} run as their exact values in float32" for f in others]
