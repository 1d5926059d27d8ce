"""Greedy continuations and logits against transformers, however the engine batches them."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import greedy_oracle
import tiny_models
from greedy_oracle import GreedyOracle, LoadedModel, complete
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.config import load_model_config
from hal_engine.serving import open_engine
from hal_engine.tokenizer import load_tokenizer

NUM_PROMPTS = 32
LOGIT_TOLERANCE = 1e-4  # of the largest logit, both in float32
# What the slower ways of running are checked with every time: short ones, and some of several
# KV blocks and chunks.
FEW = (0, 5, 8, 10, 18, 19, 30, 31)
MOST_TIES = 1  # of 32 x 64 tokens; none is expected


@pytest.fixture(scope="module")
def registry() -> BackendRegistry:
    return load_backends()


# ---- the real model ----


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> GreedyOracle:
    model = greedy_oracle.load_gguf_in_float32(smollm2_gguf)
    tokenizer = load_tokenizer(load_model_config(smollm2_gguf))
    prompts = [
        tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        for text in greedy_oracle.TEXTS
    ]
    assert len(prompts) == NUM_PROMPTS
    continuations = greedy_oracle.greedy(model, prompts, greedy_oracle.NUM_NEW_TOKENS, batch=16)
    return GreedyOracle(model, prompts, continuations)


@pytest.fixture(scope="module")
def fp32(smollm2_gguf: Path, registry: BackendRegistry) -> LoadedModel:
    return greedy_oracle.load_model(smollm2_gguf, registry, precision="fp32", num_blocks=512)


@pytest.fixture(scope="module")
def as_stored(smollm2_gguf: Path, registry: BackendRegistry) -> LoadedModel:
    return greedy_oracle.load_model(smollm2_gguf, registry, precision="auto", num_blocks=512)


def test_oracle_is_varied(oracle: GreedyOracle) -> None:
    """A comparison of 32 equal or empty texts would show nothing."""
    assert len({tuple(c) for c in oracle.continuations}) == NUM_PROMPTS
    assert len({token for c in oracle.continuations for token in c}) > 300
    lengths = {len(p) for p in oracle.prompts}
    assert min(lengths) == 1
    assert max(lengths) > 100


@pytest.mark.parametrize("precision", ["fp32", "as_stored"])
def test_all_together(oracle: GreedyOracle, precision: str, request: pytest.FixtureRequest) -> None:
    """The 4-bit weights as stored are the same numbers, so their tokens are the same too."""
    model: LoadedModel = request.getfixturevalue(precision)
    with model.engine() as engine:
        ties = oracle.check(complete(engine, oracle.prompts))
        assert engine.stats().kv_blocks_used == 0
    assert ties <= MOST_TIES, oracle.ties


def _each_way(oracle: GreedyOracle, model: LoadedModel, indices: Any) -> int:
    """Chunks, reused prefixes, preemption, and one at a time; returns the number of ties."""
    prompts = [oracle.prompts[i] for i in indices]
    ties = 0
    with model.engine(max_num_seqs=4, max_num_batched_tokens=16) as engine:
        ties += oracle.check(complete(engine, prompts), indices)
        chunked_steps = engine.stats().steps
        again = complete(engine, prompts)
        ties += oracle.check(again, indices)
        assert engine.stats().cached_prompt_tokens > 0
        assert sum(c.events[0].num_cached_tokens for c in again) > 0
    blocks = [-(-(len(p) + greedy_oracle.NUM_NEW_TOKENS) // 16) for p in prompts]
    few_blocks = max(max(blocks), sum(sorted(blocks)[-8:]) // 3)
    with model.engine(max_num_seqs=8, num_blocks=few_blocks, prefix_reuse=False) as engine:
        ties += oracle.check(complete(engine, prompts), indices)
        assert engine.stats().preemptions > 0
        assert chunked_steps > 0
    with model.engine(prefix_reuse=False) as engine:
        alone = prompts[:3] if len(prompts) < NUM_PROMPTS else prompts
        completions = complete(engine, alone, in_flight=1)
        ties += oracle.check(completions, list(indices)[: len(alone)])
        assert engine.stats().steps == len(alone) * greedy_oracle.NUM_NEW_TOKENS
    return ties


def test_some_prompts_each_way(oracle: GreedyOracle, fp32: LoadedModel) -> None:
    assert _each_way(oracle, fp32, FEW) <= MOST_TIES, oracle.ties


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "as_stored"])
def test_every_prompt_each_way(
    oracle: GreedyOracle, precision: str, request: pytest.FixtureRequest
) -> None:
    model: LoadedModel = request.getfixturevalue(precision)
    assert _each_way(oracle, model, range(NUM_PROMPTS)) <= MOST_TIES, oracle.ties


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_ranks(oracle: GreedyOracle, smollm2_gguf: Path) -> None:
    """Nine query heads and three key-value heads on two ranks."""
    import asyncio

    engine = open_engine(smollm2_gguf, precision="fp32", tp=2, num_blocks=512)
    try:
        ties = oracle.check(complete(engine, oracle.prompts))
    finally:
        asyncio.run(engine.close())
    assert ties <= MOST_TIES, oracle.ties


@pytest.mark.parametrize("precision", ["fp32", "as_stored"])
def test_logits_of_prefill_and_decode(
    oracle: GreedyOracle, precision: str, request: pytest.FixtureRequest
) -> None:
    model: LoadedModel = request.getfixturevalue(precision)
    longest = max(range(NUM_PROMPTS), key=lambda i: len(oracle.prompts[i]))
    prompt = oracle.prompts[longest]
    ids = prompt + oracle.continuations[longest][:8]
    with torch.inference_mode():
        want = oracle.model(torch.tensor([ids])).logits[0]
    blocks = torch.randperm(512)[: len(ids) // 16 + 1].tolist()
    rows = [
        model.runner.execute(
            Batch(prefill=[ScheduledSequence(0, prompt, 0, blocks, "all")])
        ).clone()
    ]
    for position in range(len(prompt), len(ids)):
        entry = ScheduledSequence(0, [ids[position]], position, blocks, "last")
        rows.append(model.runner.execute(Batch(decode=[entry])).clone())
    assert _relative(torch.cat(rows), want) <= LOGIT_TOLERANCE


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got - want).abs().max() / want.abs().max())


# ---- tiny models of every family ----


@pytest.fixture(scope="module", params=list(tiny_models.FAMILIES))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tiny_models.TinyModel:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_models.make_tiny_model(request.param, folder, seed=torch.seed() % 2**31)


@pytest.fixture(scope="module")
def tiny_oracle(tiny: tiny_models.TinyModel) -> GreedyOracle:
    rng = random.Random(torch.seed())
    shared = [rng.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(40)]
    prompts = [
        [*shared[: 8 * (i % 6)], *(rng.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(i + 1))]
        for i in range(NUM_PROMPTS)
    ]
    continuations = greedy_oracle.greedy(
        tiny.oracle, prompts, greedy_oracle.NUM_NEW_TOKENS, batch=NUM_PROMPTS
    )
    return GreedyOracle(tiny.oracle, prompts, continuations)


@pytest.fixture(scope="module")
def tiny_loaded(tiny: tiny_models.TinyModel, registry: BackendRegistry) -> LoadedModel:
    return greedy_oracle.load_model(
        tiny.folder, registry, precision="fp32", num_blocks=512, max_num_batched_tokens=128
    )


def test_tiny_together(tiny_oracle: GreedyOracle, tiny_loaded: LoadedModel) -> None:
    with tiny_loaded.engine() as engine:
        assert tiny_oracle.check(complete(engine, tiny_oracle.prompts)) <= MOST_TIES


def test_tiny_each_way(tiny_oracle: GreedyOracle, tiny_loaded: LoadedModel) -> None:
    assert _each_way(tiny_oracle, tiny_loaded, range(NUM_PROMPTS)) <= MOST_TIES, tiny_oracle.ties


def test_sequences_of_one_batch_share_blocks_that_it_fills(
    tiny: tiny_models.TinyModel, tiny_loaded: LoadedModel
) -> None:
    """As the scheduler lets equal prompts that came together do."""
    ids = torch.randint(2, tiny_models.VOCAB_SIZE, (40,)).tolist()
    other = [*ids[:32], *torch.randint(2, tiny_models.VOCAB_SIZE, (5,)).tolist()]
    batch = Batch(
        prefill=[
            ScheduledSequence(0, ids, 0, [7, 300, 12], "all"),
            ScheduledSequence(1, ids[32:], 32, [7, 300, 44], "all"),
            ScheduledSequence(2, other[32:], 32, [7, 300, 2], "all"),
        ]
    )
    got = tiny_loaded.runner.execute(batch).split([40, 8, 5])
    with torch.inference_mode():
        want, forked = (tiny.oracle(torch.tensor([p])).logits[0] for p in (ids, other))
    for part, rows in zip(got, (want, want[32:], forked[32:]), strict=True):
        assert _relative(part, rows) <= LOGIT_TOLERANCE


# ---- precisions that round more ----


class RoundingLinear(nn.Module):
    """A product with int8 weights per row and int8 activations per token, in float64."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = _rounded(linear.weight.detach().double())
        self.bias = None if linear.bias is None else linear.bias.detach().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _rounded(x) @ self.weight.T
        return y if self.bias is None else y + self.bias


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return torch.round(rows / scale) * scale


def test_w8a8_against_the_same_rounding(registry: BackendRegistry, tmp_path: Path) -> None:
    """In float64 from the definition of the format. Rounding turns differences of 1e-7 into whole
    steps now and then, so the distance is compared with what the rounding itself changes."""
    model = tiny_models.make_tiny_model("llama", tmp_path, seed=torch.seed() % 2**31)
    loaded = greedy_oracle.load_model(tmp_path, registry, precision="w8a8", num_blocks=64)
    ids = torch.randint(2, tiny_models.VOCAB_SIZE, (64,)).tolist()
    entry = ScheduledSequence(0, ids, 0, [3, 9, 1, 40], "all")
    got = loaded.runner.execute(Batch(prefill=[entry])).double()
    exact_model = model.oracle.double()
    with torch.inference_mode():
        exact = exact_model(torch.tensor([ids])).logits[0]
        for name, module in list(exact_model.named_modules()):
            if isinstance(module, nn.Linear):
                exact_model.set_submodule(name, RoundingLinear(module))
        want = exact_model(torch.tensor([ids])).logits[0]
    rounding = float((want - exact).norm() / exact.norm())
    error = float((got - want).norm() / want.norm())
    print(f"w8a8: rounding {rounding:.2e}, distance to the same rounding {error:.2e}")
    assert 1e-3 < rounding < 0.1
    # Another rounding would be as far away as two independent ones: 1.4 times.
    assert error < 0.7 * rounding


@pytest.mark.parametrize(
    "precision",
    [
        "w8a8",
        "w4a8",
        pytest.param("w8", marks=pytest.mark.long),
        pytest.param("w4", marks=pytest.mark.long),
    ],
)
def test_rounded_precisions_of_the_real_model(
    oracle: GreedyOracle, smollm2_gguf: Path, registry: BackendRegistry, precision: str
) -> None:
    """Logits after each token of the oracle's texts; w4 is the checkpoint's own 4 bits.

    A few tokens have activations that dwarf the rest of their row, and one int8 step of such a row
    is large: the plain-torch reference with the same rounding is as far from float32 there. So the
    median is bounded where rows are rounded, and the worst token where the weights are as stored.
    """
    loaded = greedy_oracle.load_model(smollm2_gguf, registry, precision=precision, num_blocks=64)
    cosines, agree, total = [], 0, 0
    for i in (1, 4, 17):
        ids = oracle.prompts[i] + oracle.continuations[i]
        with torch.inference_mode():
            want = oracle.model(torch.tensor([ids])).logits[0]
        entry = ScheduledSequence(0, ids, 0, list(range(len(ids) // 16 + 1)), "all")
        got = loaded.runner.execute(Batch(prefill=[entry]))
        cosines.append(torch.nn.functional.cosine_similarity(got, want, dim=-1))
        agree += int((got.argmax(-1) == want.argmax(-1)).sum())
        total += len(ids)
    worst, median = float(torch.cat(cosines).min()), float(torch.cat(cosines).median())
    print(
        f"{precision}: cosine worst {worst:.5f}, median {median:.5f}; "
        f"{agree} of {total} best tokens the same"
    )
    if precision == "w4":
        assert agree == total
    assert (worst if precision == "w4" else median) > 0.985
    assert agree >= 0.9 * total


@pytest.mark.long
def test_w8_is_the_model_with_rounded_weights(
    oracle: GreedyOracle, smollm2_gguf: Path, registry: BackendRegistry
) -> None:
    """Its activations are float32, so that nothing but the weights differs from float32."""
    loaded = greedy_oracle.load_model(smollm2_gguf, registry, precision="w8", num_blocks=64)
    rounded = copy.deepcopy(oracle.model)
    embedding = rounded.get_input_embeddings().weight.detach()
    for module in rounded.modules():
        if isinstance(module, nn.Linear):  # the head's weight is the embedding's, which stays
            module.weight = nn.Parameter(_rounded(module.weight.detach()), requires_grad=False)
    assert rounded.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
    for i in (1, 4, 17):
        ids = oracle.prompts[i] + oracle.continuations[i]
        with torch.inference_mode():
            want = rounded(torch.tensor([ids])).logits[0]
        entry = ScheduledSequence(0, ids, 0, list(range(len(ids) // 16 + 1)), "all")
        got = loaded.runner.execute(Batch(prefill=[entry]))
        assert _relative(got, want) <= LOGIT_TOLERANCE
