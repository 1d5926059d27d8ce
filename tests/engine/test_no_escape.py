"""No matrix product, attention or collective of the serve path runs outside a bound op."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import tiny_models
from hal.binding import BoundOps
from hal.dispatch_spy import DispatchSpy
from hal.plugins.manager import load_backends
from hal_engine import building
from hal_engine.api import GenerationRequest, GrammarSpec, SamplingParams
from hal_engine.batch import Batch
from hal_engine.engine_core import EngineCore
from hal_engine.engine_loop import Engine
from hal_engine.offline import generate_sync
from hal_engine.runner import LocalRunner
from hal_engine.serving import open_engine

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_models.make_tiny_model("qwen3", folder, seed=torch.seed() % 2**31)
    return folder


class Watched:
    """A spy that is on whenever the engine's thread steps, and the batches of those steps."""

    def __init__(self) -> None:
        self.spy = DispatchSpy()
        self.batches: list[Batch] = []
        self.ops: list[BoundOps] = []
        self.escape: Callable[[], Any] | None = None
        self.thread_ops = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        step, execute = EngineCore.step, LocalRunner.execute

        def spied_step(core: EngineCore) -> Any:
            with self.spy:
                return step(core)

        def recorded_execute(runner: LocalRunner, batch: Batch) -> torch.Tensor:
            self.batches.append(Batch.from_json(batch.to_json()))
            logits = execute(runner, batch)
            if self.escape is not None:
                self.escape()
            return logits

        def bound_ops(*args: Any, **options: Any) -> BoundOps:
            self.ops.append(BoundOps(*args, **options, wrap=self.spy.wrap))
            return self.ops[-1]

        patch.setattr(EngineCore, "step", spied_step)
        patch.setattr(LocalRunner, "execute", recorded_execute)
        patch.setattr(building, "BoundOps", bound_ops)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    found.install(monkeypatch)
    return found


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[Engine]:
    engine = open_engine(model, num_blocks=128, **options)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def requests_of_every_kind(vocab_size: int) -> list[GenerationRequest]:
    """Long and short prompts; greedy, sampled, penalised, constrained, with logprobs of both."""
    rng = random.Random(torch.seed())
    kinds = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, top_k=7, top_p=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.2, min_p=0.05, ignore_eos=True, logprobs=4),
        SamplingParams(
            max_tokens=9,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias={3: -2.0},
            ignore_eos=True,
        ),
        SamplingParams(max_tokens=9, prompt_logprobs=2, temperature=0.5, seed=1),
    ]
    requests = []
    for number, length in enumerate((1, 3, 20, 70, 150) * 2):
        requests.append(
            GenerationRequest(
                request_id=f"r{number}",
                prompt_token_ids=tuple(rng.randrange(2, vocab_size) for _ in range(length)),
                sampling=kinds[number % len(kinds)],
                grammar=GrammarSpec(kind="regex", text="[ab]+c") if number == 5 else None,
            )
        )
    return requests


def check_nothing_escaped(watched: Watched) -> None:
    assert not watched.spy.escaped, watched.spy.escaped[:3]
    mixed = [b for b in watched.batches if b.decode and b.prefill]
    assert mixed, "a step with decode and prefill together must have been among them"
    assert any(s.start > 0 for b in watched.batches for s in b.prefill), "a later chunk as well"


def check_counts(watched: Watched, counts: dict[tuple[str, str], int], num_layers: int) -> None:
    """Each site was called once for every step that needs it."""
    batches = watched.batches
    steps = len(batches)
    with_logits = sum(
        any(s.logits != "none" for s in (*batch.decode, *batch.prefill)) for batch in batches
    )
    wanted = {
        ("embed", "any"): steps,
        ("final_norm", "any"): with_logits,
        ("lm_head", "any"): with_logits,
    }
    layer_sites = {site.split(".", 2)[2] for site, _ in counts if site.startswith("layers.0.")}
    assert {"qkv_proj", "rope_kv_write", "attention", "o_proj"} <= layer_sites
    for layer in range(num_layers):
        for name in layer_sites - {"attention"}:
            # Behind the last attention, only rows whose logits are wanted go on.
            is_last = layer == num_layers - 1 and name.startswith(("gate_up", "down"))
            wanted[(f"layers.{layer}.{name}", "any")] = with_logits if is_last else steps
        key = f"layers.{layer}.attention"
        wanted[(key, "decode")] = sum(bool(batch.decode) for batch in batches)
        wanted[(key, "prefill")] = sum(bool(batch.prefill) for batch in batches)
    sampled = counts.pop(("sampler.top_k_top_p", "any"))
    assert 0 < sampled <= steps
    gathers = counts.pop(("lm_head_all_gather", "any"), with_logits)
    assert gathers == with_logits
    assert counts == wanted


def counts_of(watched: Watched) -> dict[tuple[str, str], int]:
    totals: Counter[tuple[str, str]] = Counter()
    for count in watched.ops[-1].counts():
        totals[(count.site, count.phase)] += count.calls
    return dict(totals)


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_whole_serve_path(watched: Watched, tiny_folder: Path, precision: str) -> None:
    with opened(tiny_folder, precision=precision, max_num_batched_tokens=48) as engine:
        rehearsed = len(watched.batches)
        assert rehearsed, "the rehearsal while the model loads is watched too"
        completions = generate_sync(engine, requests_of_every_kind(tiny_models.VOCAB_SIZE))
        assert not [c.error for c in completions if c.error]
        steps = engine.stats().steps
    assert steps == len(watched.batches) - rehearsed
    check_nothing_escaped(watched)
    check_counts(watched, counts_of(watched), NUM_LAYERS)


def test_torch_products_are_seen_inside_bound_ops(watched: Watched, tiny_folder: Path) -> None:
    """With the reference, every product and attention is torch's: seen, and all of them inside."""
    use = {"gemm": "reference.gemm", "attention": "reference.attention"}
    with opened(tiny_folder, precision="fp32", max_num_batched_tokens=48, use=use) as engine:
        generate_sync(engine, requests_of_every_kind(tiny_models.VOCAB_SIZE))
    check_nothing_escaped(watched)
    counts = counts_of(watched)
    products = sum(calls for (site, _), calls in counts.items() if site.endswith(("proj", "head")))
    assert watched.spy.num_tracked >= products > 0
    leaves = watched.spy.leaf_ops[("layers.1.o_proj", "reference.gemm")]
    assert leaves["aten::matmul"] == counts[("layers.1.o_proj", "any")]


def test_whole_serve_path_of_two_ranks(watched: Watched, tiny_folder: Path) -> None:
    with opened(tiny_folder, precision="fp32", max_num_batched_tokens=48, tp=2) as engine:
        generate_sync(engine, requests_of_every_kind(tiny_models.VOCAB_SIZE))
    check_nothing_escaped(watched)
    check_counts(watched, counts_of(watched), NUM_LAYERS)
    leaves = watched.spy.leaf_ops[("layers.0.o_all_reduce", "cpu.collective.gloo")]
    assert leaves["c10d::allreduce_"] == len(watched.batches)


def test_whole_serve_path_of_the_real_model(watched: Watched, smollm2_gguf: Path) -> None:
    with opened(smollm2_gguf, max_num_batched_tokens=96) as engine:
        completions = generate_sync(engine, requests_of_every_kind(40_000))
        assert not [c.error for c in completions if c.error]
    check_nothing_escaped(watched)
    check_counts(watched, counts_of(watched), 30)


# ---- the spy itself ----

_A = torch.randn(8, 8)


def _reduce(tmp_path: Path) -> Callable[[], Any]:
    registry = load_backends()
    runtime = registry.create_runtime(registry.describe("cpu:0"))
    group = runtime.create_group(0, 1, str(tmp_path / "rendezvous"))
    return partial(torch.distributed.all_reduce, torch.ones(3), group=group.process_group)


ESCAPES: dict[str, tuple[str, Callable[[], Any]]] = {
    "mm": ("aten::mm", lambda: torch.mm(_A, _A)),
    "linear": ("aten::linear", lambda: functional.linear(_A, _A, torch.ones(8))),
    "einsum": ("aten::einsum", lambda: torch.einsum("ij,jk->ik", _A, _A)),
    "mm-inside-tensordot": ("aten::mm", lambda: torch.tensordot(_A, _A, 1)),
    "convolution": ("aten::convolution", lambda: functional.conv1d(_A, _A[:, :, None])),
    "attention": (
        "aten::scaled_dot_product_attention",
        lambda: functional.scaled_dot_product_attention(_A[None], _A[None], _A[None]),
    ),
    "embedding": ("aten::embedding", lambda: functional.embedding(torch.tensor([1]), _A)),
}


@pytest.mark.parametrize("name", [*ESCAPES, "all_reduce"])
def test_an_escape_is_caught(
    watched: Watched, tiny_folder: Path, name: str, tmp_path: Path
) -> None:
    """A runner that does one thing behind the layer's back, in every step."""
    if name == "all_reduce":
        op, watched.escape = "c10d::allreduce_", _reduce(tmp_path)
    else:
        op, watched.escape = ESCAPES[name]
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(4, 5, 6), sampling=SamplingParams(max_tokens=3)
    )
    with opened(tiny_folder, precision="fp32") as engine:
        generate_sync(engine, [request])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert watched.batches
    assert [call.op for call in watched.spy.escaped] == [op] * len(watched.batches)
    assert {Path(__file__).name in call.location for call in watched.spy.escaped} == {True}
