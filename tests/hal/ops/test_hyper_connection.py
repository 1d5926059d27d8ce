"""Hyper-connections against transformers' DeepSeek-V4 modules, and lagged against loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from hal.errors import RequestError
from hal.ops.hyper_connection import HyperConnectionRequest, bytes_moved, flops, reference
from op_inputs import assert_within, normal
from oracle_modules import randomised

PRE = HyperConnectionRequest(
    kind="pre", num_streams=4, hidden_size=20, sinkhorn_iterations=20, dtype="float64"
)


def loops(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre, post, comb of each token from the formulas, in float64."""
    tokens, n, _ = streams.shape
    pre, post = torch.zeros(tokens, n), torch.zeros(tokens, n)
    pre, post = pre.double(), post.double()
    comb = torch.zeros(tokens, n, n, dtype=torch.float64)
    for t in range(tokens):
        flat = streams[t].double().flatten()
        flat = flat / torch.sqrt((flat**2).mean() + norm_eps)
        m = torch.stack([(row.double() * flat).sum() for row in projection])
        for h in range(n):
            pre[t, h] = 1 / (1 + torch.exp(-(m[h] * scale[0] + base[h]))) + eps
            post[t, h] = 2 / (1 + torch.exp(-(m[n + h] * scale[1] + base[n + h])))
            row = slice(2 * n + h * n, 2 * n + (h + 1) * n)
            logits = torch.exp(m[row] * scale[2] + base[row])
            comb[t, h] = logits / logits.sum() + eps
        for i in range(iterations):
            if i:
                for j in range(n):
                    comb[t, j] = comb[t, j] / (comb[t, j].sum() + eps)
            for k in range(n):
                comb[t, :, k] = comb[t, :, k] / (comb[t, :, k].sum() + eps)
    return pre, post, comb


def parts(rng: torch.Generator, n: int, d: int) -> dict[str, torch.Tensor]:
    rows = n * (2 + n)
    return {
        "projection": normal(rng, rows, n * d) * 0.1,
        "base": normal(rng, rows),
        "scale": normal(rng, 3),
    }


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_weights_and_mixing_are_their_formulas(
    rng: torch.Generator, dtype: str, n: int, iterations: int
) -> None:
    request = dataclasses.replace(PRE, num_streams=n, dtype=dtype, sinkhorn_iterations=iterations)
    static, streams = parts(rng, n, 20), normal(rng, 7, n, 20, dtype=dtype)
    streams[3] = 0.0
    x, post, comb = reference(request, **static, norm_eps=1e-6, eps=1e-6)(streams)
    pre, want_post, want_comb = loops(
        streams, **static, norm_eps=1e-6, eps=1e-6, iterations=iterations
    )
    assert x.dtype == streams.dtype
    assert post.dtype == comb.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert_within("hyper_connection", post, want_post)
    assert_within("hyper_connection", comb, want_comb)
    assert_within("hyper_connection", x, (pre[:, :, None] * streams.double()).sum(dim=1))
    y = normal(rng, 7, 20, dtype=dtype)
    got = reference(dataclasses.replace(request, kind="post"))(y, streams, post, comb)
    want = torch.zeros(7, n, 20, dtype=torch.float64)
    for h in range(n):
        want[:, h] = want_post[:, h, None] * y.double()
        for j in range(n):
            want[:, h] += want_comb[:, j, h, None] * streams[:, j].double()
    assert_within("hyper_connection", got, want, 4.0)


def test_comb_is_doubly_stochastic_after_sinkhorn(rng: torch.Generator) -> None:
    static, streams = parts(rng, 4, 20), normal(rng, 9, 4, 20)
    _, _, comb = reference(PRE, **static, norm_eps=1e-6, eps=1e-6)(streams)
    ones = torch.ones(9, 4, dtype=torch.float64)
    torch.testing.assert_close(comb.sum(dim=1), ones, rtol=0, atol=1e-5)
    # Rows come before the last columns: each iteration leaves them no farther from one.
    once = dataclasses.replace(PRE, sinkhorn_iterations=1)
    _, _, first = reference(once, **static, norm_eps=1e-6, eps=1e-6)(streams)
    errors = [(c.sum(dim=2) - 1).abs().sum(dim=1) for c in (comb, first)]
    assert (errors[0] <= errors[1] + 1e-4).all()
    assert (comb >= 0).all()


def test_pre_post_and_head_are_those_of_deepseek_v4(rng: torch.Generator) -> None:
    config = DeepseekV4Config(hidden_size=20, hc_mult=4, hc_sinkhorn_iters=20)
    module: Any = randomised(DeepseekV4HyperConnection(config), rng)
    streams = normal(rng, 11, 4, 20, dtype="float32")
    y = normal(rng, 11, 20, dtype="float32")
    with torch.no_grad():
        post, comb, x = module(streams[None])
        # As the decoder layer mixes them.
        mixed = post.unsqueeze(-1) * y[None].unsqueeze(-2) + comb.transpose(-1, -2) @ streams[None]
    kernel = reference(
        PRE,
        projection=module.fn.detach(),
        base=module.base.detach(),
        scale=module.scale.detach(),
        norm_eps=config.rms_norm_eps,
        eps=config.hc_eps,
    )
    got_x, got_post, got_comb = kernel(streams.double())
    for got, want in ((got_x, x), (got_post, post), (got_comb, comb)):
        torch.testing.assert_close(got, want[0].double(), rtol=1e-4, atol=1e-5)
    out = reference(dataclasses.replace(PRE, kind="post"))(
        y.double(), streams.double(), got_post, got_comb
    )
    torch.testing.assert_close(out, mixed[0].double(), rtol=1e-4, atol=1e-5)

    head: Any = randomised(DeepseekV4HyperHead(config), rng)
    with torch.no_grad():
        want = head(streams[None])[0].double()
    kernel = reference(
        dataclasses.replace(PRE, kind="head"),
        projection=head.hc_fn.detach(),
        base=head.hc_base.detach(),
        scale=head.hc_scale.detach(),
        norm_eps=config.rms_norm_eps,
        eps=config.hc_eps,
    )
    torch.testing.assert_close(kernel(streams.double()), want, rtol=1e-4, atol=1e-5)


def test_lagged_sublayers_collapse_with_the_weights_before(rng: torch.Generator) -> None:
    """Two sublayers and the output, each with the pre of the one before; the first has stream 0."""
    request = dataclasses.replace(PRE, is_lagged=True)
    head = reference(dataclasses.replace(request, kind="head"))
    expand = reference(dataclasses.replace(request, kind="post"))
    statics = [parts(rng, 4, 20), parts(rng, 4, 20)]
    streams = normal(rng, 6, 4, 20)
    before: torch.Tensor | None = None
    expected = streams.clone()
    expected_pre: torch.Tensor | None = None
    for static in statics:
        kernel = reference(request, **static, norm_eps=1e-20, eps=1e-6)
        x, post, comb, before = kernel(streams, before)
        streams = expand(torch.tanh(x), streams, post, comb)

        pre, want_post, want_comb = loops(
            expected, **static, norm_eps=1e-20, eps=1e-6, iterations=20
        )
        want_x = expected[:, 0]
        if expected_pre is not None:
            want_x = torch.einsum("th,thd->td", expected_pre, expected)
        torch.testing.assert_close(x, want_x)
        expected = want_post[:, :, None] * torch.tanh(want_x)[:, None] + torch.einsum(
            "tjh,tjd->thd", want_comb, expected
        )
        expected_pre = pre
        torch.testing.assert_close(streams, expected)
    assert before is not None
    assert expected_pre is not None
    torch.testing.assert_close(
        head(streams, before), torch.einsum("th,thd->td", expected_pre, expected)
    )


def test_work_is_that_of_the_real_tensors(rng: torch.Generator) -> None:
    request = dataclasses.replace(PRE, dtype="bfloat16")
    streams = normal(rng, 7, 4, 20, dtype="bfloat16")
    static = {k: v.float() for k, v in parts(rng, 4, 20).items()}
    x, post, comb = reference(request, **static)(streams)
    fixed = static["projection"].nbytes + static["base"].nbytes
    moved = streams.nbytes + x.nbytes + post.nbytes + comb.nbytes
    assert bytes_moved(request, 7) == fixed + moved
    lagged = dataclasses.replace(request, is_lagged=True)
    assert bytes_moved(lagged, 7) == fixed + moved + 2 * 7 * 4 * 4
    expand = dataclasses.replace(request, kind="post")
    out = reference(expand)(x, streams, post, comb)
    assert bytes_moved(expand, 7) == moved + out.nbytes
    head = dataclasses.replace(request, kind="head")
    assert bytes_moved(head, 7) == 4 * (4 * 20 + 1) * 4 + streams.nbytes + x.nbytes
    assert flops(head, 7) < flops(request, 7)


def test_what_is_missing_or_impossible_is_refused(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="projection, base and scale"):
        reference(PRE, projection=normal(rng, 24, 80))
    with pytest.raises(RequestError, match="kind one of"):
        dataclasses.replace(PRE, kind="mid")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(RequestError, match="num_streams >= 1"):
        dataclasses.replace(PRE, num_streams=0)
