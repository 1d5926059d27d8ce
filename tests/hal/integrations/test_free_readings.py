"""What a function call means: its operands in the terms of an op give what the function gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from hal.dispatch_spy import EscapedCall
from hal.errors import RoutingError
from hal.integrations.allowances import Allowances
from hal.integrations.attention_places import SeenMasks
from hal.integrations.call_places import product_sizes, site_of
from hal.integrations.free_calls import FUNCTIONS
from hal.integrations.free_readings import Reading, read_call
from hal.ops.dense_attention import DenseAttentionRequest, reference
from hal.ops.embedding import EmbeddingRequest

WEIGHT, BIAS = torch.randn(6, 8), torch.randn(6)
TABLE = torch.randn(11, 4)
PATCH = torch.randn(5, 3, 2, 2)
X = torch.randn(2, 3, 8)


def find(tensor: Any) -> torch.Tensor | None:
    for own in (WEIGHT, BIAS, TABLE, PATCH):
        if tensor is own:
            return own
    if isinstance(tensor, torch.Tensor) and tensor.data_ptr() == WEIGHT.data_ptr():
        return WEIGHT if tensor.shape == WEIGHT.T.shape else None
    return None


def computed(reading: Reading) -> torch.Tensor:
    """What the op means, by other functions of torch than the one that was read."""
    if reading.attention is not None:
        call = reading.attention
        request = DenseAttentionRequest(
            num_heads=call.q.shape[1],
            num_kv_heads=call.k.shape[1],
            head_dim=call.q.shape[3],
            v_head_dim=call.v.shape[3],
            dtype="float32",
            mask=call.kind,
            is_causal=call.is_causal,
        )
        kernel = reference(request, scale=call.softmax_scale)
        return reading.finish(kernel(call.q, call.k, call.v, call.mask))
    if reading.kind == "embedding" and reading.matrix is not None:
        return reading.finish(reading.matrix[reading.operands[0]])
    if reading.kind == "linear" and reading.matrix is not None:
        y = torch.tensordot(reading.operands[0], reading.matrix, dims=([-1], [1]))
        return reading.finish(y if reading.bias is None else y + reading.bias)
    a, b = reading.operands
    return reading.finish(torch.einsum(reading.equation, a, b) if reading.equation else a @ b)


Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
SEEN = torch.rand(5, 9) > 0.3
SEEN[:, 0] = True
IMAGE = torch.randn(2, 3, 7, 6)  # what is over does not fill a patch
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any], str]] = {
    "linear": (functional.linear, (X, WEIGHT, BIAS), {}, "linear"),
    "linear by name": (functional.linear, (), {"input": X, "weight": WEIGHT}, "linear"),
    "linear of an activation": (functional.linear, (X, WEIGHT + 1, BIAS), {}, "matmul"),
    "linear with another bias": (functional.linear, (X, WEIGHT, BIAS + 1), {}, "linear"),
    "transposed": (torch.matmul, (X, WEIGHT.T), {}, "linear"),
    "as stored": (torch.matmul, (torch.randn(4, 6), WEIGHT), {}, "linear"),
    "matmul": (torch.matmul, (Q, Q.mT), {}, "matmul"),
    "bmm": (torch.bmm, (X, X.mT), {}, "matmul"),
    "einsum": (torch.einsum, ("bqhd,bkd->bqhk", Q, X), {}, "matmul"),
    "einsum of a list": (torch.einsum, ("ij,jk->ik", [WEIGHT.clone(), X[0].T]), {}, "matmul"),
    "addmm": (torch.addmm, (BIAS, torch.randn(4, 8), WEIGHT.T), {}, "linear"),
    "baddbmm": (
        torch.baddbmm,
        (torch.randn(2, 1, 3),),
        {"batch1": X, "batch2": X.mT, "beta": 0.5, "alpha": 2.0},
        "matmul",
    ),
    "embedding": (functional.embedding, (torch.tensor([[1, 10], [0, 1]]), TABLE), {}, "embedding"),
    "attention": (
        functional.scaled_dot_product_attention,
        (Q, K, V),
        {"attn_mask": SEEN, "enable_gqa": True, "scale": 0.4},
        "attention",
    ),
    "causal attention": (
        functional.scaled_dot_product_attention,
        (Q, K, V),
        {"is_causal": True, "enable_gqa": True},
        "attention",
    ),
    "patches": (functional.conv2d, (IMAGE, PATCH, None, 2), {}, "linear"),
    "patches with names": (
        functional.conv2d,
        (IMAGE,),
        {"weight": PATCH, "stride": (2, 2), "padding": "valid"},
        "linear",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_readings_mean_what_the_function_does(name: str) -> None:
    function, args, kwargs, kind = CASES[name]
    reading = read_call(FUNCTIONS[function], function, args, kwargs, find)
    assert (reading.kind, reading.refusal) == (kind, "")
    want = function(*args, **kwargs)
    got = computed(reading)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any], str]] = {
    "out": (torch.matmul, (X, X.mT), {"out": torch.empty(0)}, "out="),
    "three operands": (torch.einsum, ("ij,jk,kl->il", WEIGHT, WEIGHT.T, WEIGHT), {}, "einsum"),
    "overlapping": (functional.conv2d, (IMAGE, PATCH), {}, "stride \\(1, 1\\)"),
    "depthwise": (functional.conv1d, (X, torch.randn(3, 1, 2)), {"stride": 2, "groups": 3}, "3 gr"),
    "dropout": (functional.scaled_dot_product_attention, (Q, Q, Q, None, 0.1), {}, "dropout"),
    "max_norm": (functional.embedding, (torch.tensor([1]), TABLE, None, 1.0), {}, "max_norm"),
    "loose table": (functional.embedding, (torch.tensor([1]), TABLE + 1), {}, "table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_op_means_says_why(name: str) -> None:
    import re

    function, args, kwargs, said = REFUSED[name]
    reading = read_call(FUNCTIONS[function], function, args, kwargs, find)
    assert re.search(said, reading.refusal)


@pytest.mark.parametrize(
    ("a", "b", "equation", "want"),
    [
        ((2, 3, 4), (4, 5), "", (6, 5, 4)),
        ((2, 1, 3, 4), (7, 4, 5), "", (42, 5, 4)),
        ((3, 4), (4,), "", (3, 1, 4)),
        ((2, 5, 3, 8), (2, 7, 8), "bqhd,bkd->bqhk", (30, 7, 8)),
    ],
)
def test_sizes_of_products(a: Any, b: Any, equation: str, want: tuple[int, int, int]) -> None:
    first, second = torch.randn(a), torch.randn(b)
    assert product_sizes(first, second, equation) == want
    result = torch.einsum(equation, first, second) if equation else first @ second
    assert want[0] * want[1] == result.numel()


def test_layers_share_a_line() -> None:
    request = EmbeddingRequest(vocab_size=2, hidden_size=2, dtype="float32")
    assert site_of("model.layers.12.mlp.experts.3.up", request)[:2] == (
        "model.layers.*.mlp.experts.3.up",
        12,
    )
    assert site_of("lm_head", request)[:2] == ("lm_head", None)


def test_masks_of_floats_that_only_hide() -> None:
    masks = SeenMasks()
    seen = torch.rand(1, 1, 4, 4) > 0.5
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    answer = masks.as_boolean(added)
    assert torch.equal(answer, seen)
    assert masks.as_boolean(added) is answer  # asked once
    added[0, 0, 0, 0] = -1.0
    assert masks.as_boolean(added) is added  # written to since: a bias now
    assert masks.as_boolean(seen) is seen
    assert torch.equal(masks.as_boolean(seen.int()), seen)


def test_allowances() -> None:
    allowed = Allowances(["aten::conv*", "modeling_x.py:12"])
    assert allowed.covers(EscapedCall("aten::convolution", "/a/b.py:1"))
    assert allowed.covers(EscapedCall("aten::mm", "/lib/modeling_x.py:12"))
    assert not allowed.covers(EscapedCall("aten::mm", "/lib/modeling_x.py:112"))
    allowed.check_used()
    with pytest.raises(RoutingError, match="idle"):
        Allowances(["idle"]).check_used()
