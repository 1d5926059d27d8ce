"""GGUF tensors as weights: which blocks map onto our formats without loss, and where not.

Lossless, bit for bit: F32, F16, BF16 -> the dense tensor; Q8_0 -> int8_g32; Q4_0 -> int4_g32;
Q4_1 -> int4_g32_asym. Block layouts follow the ggml format description: blocks of 32 values along
K; Q8_0: float16 d, 32 int8, value d*q; Q4_0: float16 d, 16 bytes, byte j holds value j in its low
nibble and value j+16 in its high one, value d*(q-8); Q4_1: float16 d, float16 m, the same bytes,
value d*q + m.

Not lossless, each with its note: any other type is dequantised to float32 (exact values, more
memory: `DEQUANTIZED`); Q8_0 as int8_channel (`REQUANTIZED_CHANNELS`); the torch packed kernels
round the float16 scales to bfloat16 (`BFLOAT16_SCALES`).
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from hal.candidates import SemanticNote
from hal.ops.formats import FORMATS, QuantizedWeight

BLOCK = 32

DEQUANTIZED = SemanticNote(
    name="dequantized_weights",
    text="the stored blocks have no packed kernel: weights are dequantised to float32, which keeps "
    "every value and gives up the smaller memory traffic",
)

_DENSE: dict[gguf.GGMLQuantizationType, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F32: np.dtype("<f4"),
    gguf.GGMLQuantizationType.F16: np.dtype("<f2"),
    gguf.GGMLQuantizationType.BF16: np.dtype("<u2"),
}


def weight_from_gguf(
    raw: np.ndarray[Any, Any], shape: tuple[int, int], ggml_type: gguf.GGMLQuantizationType
) -> tuple[torch.Tensor | QuantizedWeight, tuple[SemanticNote, ...]]:
    """The weight [N, K] of a GGUF tensor's bytes and what was changed (nothing: empty).

    raw: the tensor's data in any shape and dtype, N*K values in row order. The result owns its
    memory.

    Raises:
        ValueError: the number of bytes is not that of the shape, or K is no multiple of 32.
        NotImplementedError: from the gguf package, for a type that it cannot dequantise.
    """
    data = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    n, k = shape
    _check_size(data.size, n, k, ggml_type)
    if ggml_type in _DENSE:
        dtype: np.dtype[Any] = _DENSE[ggml_type]
        tensor = torch.from_numpy(data.view(dtype).reshape(n, k).copy())
        if ggml_type == gguf.GGMLQuantizationType.BF16:
            tensor = tensor.view(torch.bfloat16)
        return tensor, ()
    match ggml_type:
        case gguf.GGMLQuantizationType.Q8_0:
            return _from_q8_0(data, n, k), ()
        case gguf.GGMLQuantizationType.Q4_0:
            return _from_q4(data, n, k, has_minimum=False), ()
        case gguf.GGMLQuantizationType.Q4_1:
            return _from_q4(data, n, k, has_minimum=True), ()
    dense = gguf.quants.dequantize(data, ggml_type).reshape(n, k).astype(np.float32)
    return torch.from_numpy(dense), (DEQUANTIZED,)


def quantize_int8_channel(
    weight: torch.Tensor, *, format_name: str = "int8_channel"
) -> QuantizedWeight:
    """Round a dense weight [N, K] to int8 with one symmetric scale per row, max|w| / 127.

    format_name: "int8_channel", or "int8_channel_a8" for int8 activations. A zero row has scale 1.
    """
    values = weight.float()
    peak = values.abs().amax(dim=1)
    scale = torch.where(peak > 0, peak / 127.0, torch.ones_like(peak))
    data = torch.round(values / scale[:, None]).clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(format=FORMATS[format_name], data=data, scale=scale)


def with_int8_activations(weight: QuantizedWeight) -> QuantizedWeight:
    """The same stored weight, to be multiplied with activations rounded to int8 per token.

    Raises:
        ValueError: there is no such format for this one (its activations are int8 already).
    """
    name = f"{weight.format.name}_a8"
    if name not in FORMATS:
        raise ValueError(f"int8 activations: required one of {sorted(FORMATS)}, found {name!r}")
    return QuantizedWeight(
        format=FORMATS[name], data=weight.data, scale=weight.scale, minimum=weight.minimum
    )


def _check_size(found: int, n: int, k: int, ggml_type: gguf.GGMLQuantizationType) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    if k % block:
        raise ValueError(f"GGUF {ggml_type.name}: required K a multiple of {block}, found {k}")
    required = n * k // block * block_bytes
    if found != required:
        raise ValueError(
            f"GGUF {ggml_type.name} [{n}, {k}]: required {required} bytes, found {found}"
        )


def _from_q8_0(data: np.ndarray[Any, Any], n: int, k: int) -> QuantizedWeight:
    blocks = data.reshape(n, k // BLOCK, 2 + BLOCK)
    scale = blocks[..., :2].copy().view("<f2").reshape(n, -1)
    values = blocks[..., 2:].copy().view(np.int8).reshape(n, k)
    return QuantizedWeight(
        format=FORMATS["int8_g32"], data=torch.from_numpy(values), scale=torch.from_numpy(scale)
    )


def _from_q4(data: np.ndarray[Any, Any], n: int, k: int, *, has_minimum: bool) -> QuantizedWeight:
    header = 4 if has_minimum else 2
    blocks = data.reshape(n, k // BLOCK, header + BLOCK // 2)
    nibbles = blocks[..., header:]
    values = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1).reshape(n, k)
    packed = values[:, 0::2] | (values[:, 1::2] << 4)
    scales = blocks[..., :header].copy().view("<f2").reshape(n, k // BLOCK, -1)
    return QuantizedWeight(
        format=FORMATS["int4_g32_asym" if has_minimum else "int4_g32"],
        data=torch.from_numpy(packed),
        scale=torch.from_numpy(scales[..., 0].copy()),
        minimum=torch.from_numpy(scales[..., 1].copy()) if has_minimum else None,
    )
