"""Layer norm against torch's, and what rope gained: a start inside the head, and the way back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.rope import RopeRequest
from op_inputs import assert_within, normal


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_layer_norm_is_torchs(rng: torch.Generator, dtype: str, has_bias: bool, width: int) -> None:
    request = LayerNormRequest(hidden_size=width, has_bias=has_bias, dtype=dtype)
    x = normal(rng, 5, width, dtype=dtype)
    x[1] = 3.0
    weight = normal(rng, width, dtype=dtype)
    bias = normal(rng, width, dtype=dtype) if has_bias else None
    family = CATALOGUE["layer_norm"]
    got = family.reference(request, weight=weight, bias=bias, eps=1e-5)(x)
    double = None if bias is None else bias.double()
    want = functional.layer_norm(x.double(), (width,), weight.double(), double, 1e-5)
    assert got.dtype == x.dtype
    assert_within("layer_norm", got, want)
    tensors = [x, got, weight, *([] if bias is None else [bias])]
    assert family.bytes_moved(request, 5) == sum(t.nbytes for t in tensors)


def test_layer_norm_wants_the_bias_that_the_request_says() -> None:
    request = LayerNormRequest(hidden_size=4, has_bias=True, dtype="float32")
    with pytest.raises(ValueError, match="has_bias=True says, found none"):
        CATALOGUE["layer_norm"].reference(request, weight=torch.ones(4), eps=1e-6)
    with pytest.raises(RequestError, match="hidden_size >= 1"):
        dataclasses.replace(request, hidden_size=0)


REQUEST = RopeRequest(
    num_heads=3,
    num_kv_heads=1,
    head_dim=20,
    rotary_dim=8,
    dtype="float64",
    style="interleaved",
    rotary_start=12,
)


def test_the_end_of_a_head_turns_as_in_deepseek_v4(rng: torch.Generator) -> None:
    angles = torch.rand(50, 4, generator=rng) * 7
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (9,), generator=rng)
    q, k = normal(rng, 9, 60, dtype="float32"), normal(rng, 9, 20, dtype="float32")
    cos, sin = angles.cos()[positions][None], angles.sin()[positions][None]
    for is_inverse in (False, True):
        request = dataclasses.replace(REQUEST, is_inverse=is_inverse, dtype="float32")
        turned = [q.clone(), k.clone()]
        CATALOGUE["rope"].reference(request, cos_sin_cache=table)(*turned, positions)
        for got, x, heads in zip(turned, (q, k), (3, 1), strict=True):
            old = x.view(1, 9, heads, 20).transpose(1, 2)
            want = apply_rotary_pos_emb(old, cos, -sin if is_inverse else sin)
            assert_within("rope", got, want.transpose(1, 2).reshape(9, -1))


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
@pytest.mark.parametrize("start", [0, 5, 12])
def test_the_inverse_undoes_it_and_nothing_else_moves(
    rng: torch.Generator, style: Any, start: int
) -> None:
    request = dataclasses.replace(REQUEST, style=style, rotary_start=start)
    angles = torch.rand(50, 4, generator=rng, dtype=torch.float64) * 7
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (9,), generator=rng)
    q, k = normal(rng, 9, 60), normal(rng, 9, 20)
    turned = [q.clone(), k.clone()]
    CATALOGUE["rope"].reference(request, cos_sin_cache=table)(*turned, positions)
    for got, x in zip(turned, (q, k), strict=True):
        new, old = got.view(9, -1, 20), x.view(9, -1, 20)
        assert torch.equal(new[..., :start], old[..., :start])
        assert torch.equal(new[..., start + 8 :], old[..., start + 8 :])
        assert not torch.equal(new, old)
    back = dataclasses.replace(request, is_inverse=True)
    CATALOGUE["rope"].reference(back, cos_sin_cache=table)(*turned, positions)
    assert_within("rope", turned[0], q)
    assert_within("rope", turned[1], k)


def test_without_heads_of_k_there_is_no_k(rng: torch.Generator) -> None:
    table, positions = normal(rng, 50, 8), torch.arange(9)
    q = normal(rng, 9, 60)
    both, alone = [q.clone(), normal(rng, 9, 20)], q.clone()
    CATALOGUE["rope"].reference(REQUEST, cos_sin_cache=table)(*both, positions)
    request = dataclasses.replace(REQUEST, num_kv_heads=0)
    CATALOGUE["rope"].reference(request, cos_sin_cache=table)(alone, None, positions)
    assert torch.equal(alone, both[0])


@pytest.mark.parametrize("start", [-1, 13])
def test_a_rotation_beyond_the_head_is_refused(start: int) -> None:
    with pytest.raises(RequestError, match="rotary_start \\+ rotary_dim <= head_dim 20"):
        dataclasses.replace(REQUEST, rotary_start=start)
