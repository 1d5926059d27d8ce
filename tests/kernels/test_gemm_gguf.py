"""GGUF blocks as weight formats, against the gguf package's own quantiser and dequantiser."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from hal.ops.formats import QuantizedWeight
from hal_kernels.gemm.gguf_formats import (
    quantize_int8_channel,
    weight_from_gguf,
    with_int8_activations,
)

N, K = 12, 256


def random_weight() -> np.ndarray:
    return np.random.default_rng().standard_normal((N, K), dtype=np.float32)


@pytest.mark.parametrize(
    ("ggml_type", "name"),
    [
        (GgmlType.Q8_0, "int8_g32"),
        (GgmlType.Q4_0, "int4_g32"),
        (GgmlType.Q4_1, "int4_g32_asym"),
    ],
    ids=["Q8_0", "Q4_0", "Q4_1"],
)
def test_blocks_keep_every_value(ggml_type: GgmlType, name: str) -> None:
    raw = gguf.quants.quantize(random_weight(), ggml_type)
    raw.flags.writeable = False  # as a mapped file is
    weight, notes = weight_from_gguf(raw, (N, K), ggml_type)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.format.name, weight.shape, notes) == (name, (N, K), ())
    exact = torch.from_numpy(gguf.quants.dequantize(raw, ggml_type))
    assert torch.equal(weight.dequantize(), exact)
    assert exact.abs().max() > 1


@pytest.mark.parametrize("ggml_type", [GgmlType.F32, GgmlType.F16, GgmlType.BF16], ids=str)
def test_dense_types_keep_every_value(ggml_type: GgmlType) -> None:
    raw = gguf.quants.quantize(random_weight(), ggml_type)
    weight, notes = weight_from_gguf(raw, (N, K), ggml_type)
    assert isinstance(weight, torch.Tensor)
    assert notes == ()
    exact = torch.from_numpy(gguf.quants.dequantize(raw, ggml_type))
    assert torch.equal(weight.float(), exact)


def test_other_types_are_dequantised_and_say_so() -> None:
    rng = np.random.default_rng()
    _block, block_bytes = gguf.GGML_QUANT_SIZES[GgmlType.Q6_K]
    blocks = rng.integers(0, 256, (N, block_bytes), dtype=np.uint8)
    blocks[:, -2:] = rng.uniform(0.01, 0.1, N).astype("<f2").view(np.uint8).reshape(N, 2)
    weight, notes = weight_from_gguf(blocks, (N, K), GgmlType.Q6_K)
    assert isinstance(weight, torch.Tensor)
    assert [note.name for note in notes] == ["dequantized_weights"]
    exact = gguf.quants.dequantize(blocks, GgmlType.Q6_K)
    assert torch.equal(weight, torch.from_numpy(exact))


def test_truncated_and_misshapen_tensors_are_refused() -> None:
    raw = gguf.quants.quantize(random_weight(), GgmlType.Q4_0)
    with pytest.raises(ValueError, match="bytes, found"):
        weight_from_gguf(raw[:-1], (N, K), GgmlType.Q4_0)
    with pytest.raises(ValueError, match="multiple of 32"):
        weight_from_gguf(raw, (N, K - 1), GgmlType.Q4_0)


def test_channel_quantisation_is_within_half_a_step() -> None:
    weight = torch.randn(10, 33)
    weight[4] = 0
    quantized = quantize_int8_channel(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((quantized.dequantize() - weight).abs() <= step * 0.5001).all()
    assert quantized.data.abs().max() == 127


def test_int8_activation_formats() -> None:
    weight = quantize_int8_channel(torch.randn(4, 32))
    assert with_int8_activations(weight).format.name == "int8_channel_a8"
    raw = gguf.quants.quantize(random_weight(), GgmlType.Q8_0)
    grouped, _ = weight_from_gguf(raw, (N, K), GgmlType.Q8_0)
    assert isinstance(grouped, QuantizedWeight)
    rounding = with_int8_activations(grouped)
    assert rounding.format.name == "int8_g32_a8"
    assert torch.equal(rounding.dequantize(), grouped.dequantize())
    with pytest.raises(ValueError, match="int8_g32_a8_a8"):
        with_int8_activations(rounding)
