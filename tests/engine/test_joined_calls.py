"""Decoders whose plans join calls up to a size: sums over ranks with the norms behind them, norms
and rotation of q and k with the KV write, a decode's attention with the output projection, products
with the residual and the norms behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.ops.request import OpRequest
from hal.plugins.manager import load_backends
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal.waivers import WaiverBook
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.building import build_rank
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from thread_group import ThreadGroup, on_threads

TOLERANCE = 1e-4  # of the largest logit, both in float32
MOST_TOKENS = 64


def few(request: OpRequest, most: int) -> list[Reason]:
    """A size of its own for a candidate that is meant for few rows."""
    if request.tokens.high <= most:
        return []
    found = str(request.tokens)
    return [Reason(what="size", required="few", found=found, kind=ReasonKind.SCOPE)]


class Offering:
    """The registry of this host, where the references of some ops are fast paths: of collectives at
    any size (ranks are threads here), of the others for at most so many tokens."""

    def __init__(self, most_joined: int, *ops: str) -> None:
        self._registry: Any = load_backends()
        self._most_joined, self._ops = most_joined, ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        found: Sequence[KernelCandidate] = self._registry.candidates(op, device)
        if op not in self._ops:
            return found
        (golden,) = [c for c in found if c.tier is Tier.REFERENCE]

        def reasons(request: OpRequest) -> list[Reason]:
            return [] if op == "collective" else few(request, self._most_joined)

        return [
            dataclasses.replace(
                golden, name=f"few.{op}", tier=Tier.NATIVE, not_supported_reasons=reasons
            )
        ]


@pytest.mark.parametrize("most_joined", [0, 8, MOST_TOKENS])
def test_the_same_logits_whatever_is_joined(tmp_path: Path, most_joined: int) -> None:
    model = tiny_models.make_tiny_model("llama", tmp_path, seed=torch.seed() % 2**31)
    options = EngineOptions(
        precision="fp32", tp=2, max_num_batched_tokens=MOST_TOKENS, num_blocks=8
    )
    registry: Any = Offering(most_joined, "collective", "all_reduce_norm")
    planned = plan_model(tmp_path, options, registry, WaiverBook())
    sizes = {
        op.site.site.removeprefix("layers.*."): str(op.tokens)
        for op in planned.plan.ops
        # No norm of a layer is behind the last sum.
        if "reduce" in op.site.site and op.site.layers != (2,)
    }
    joined = {f"{name}_reduce_norm": f"1-{most_joined}" for name in ("o", "down")}
    apart = {f"{name}_all_reduce": f"{most_joined + 1}-64" for name in ("o", "down")}
    wanted = (joined if most_joined else {}) | (apart if most_joined < MOST_TOKENS else {})
    assert {name: sizes.get(name) for name in wanted} == wanted

    ids = torch.randint(2, tiny_models.VOCAB_SIZE, (36,)).tolist()

    def run(group: ThreadGroup) -> tuple[torch.Tensor, dict[str, int]]:
        runner, ops = build_rank(planned, group.rank, group, 8)
        parts = [
            runner.execute(Batch(prefill=[ScheduledSequence(0, ids[a:b], a, [5, 2, 7], "all")]))
            for a, b in ((0, 20), (20, 28), (28, 33))
        ]
        parts += [
            runner.execute(Batch(decode=[ScheduledSequence(0, [ids[i]], i, [5, 2, 7], "last")]))
            for i in range(33, 36)
        ]
        calls: dict[str, int] = {}
        for count in ops.counts():
            calls[count.op] = calls.get(count.op, 0) + count.calls
        return torch.cat(parts), calls

    results = on_threads(2, run, one_at_a_time=True)
    with torch.inference_mode():
        want = model.oracle(torch.tensor([ids])).logits[0]
    for got, calls in results:
        assert float((got - want).abs().max() / want.abs().max()) <= TOLERANCE
        steps = {0: 0, 8: 5, MOST_TOKENS: 6}[most_joined]  # of 6, those that are small enough
        assert calls.get("all_reduce_norm", 0) == 5 * steps  # three layers, the last has one norm
        assert calls["collective.all_reduce"] == 6 * 6 - 5 * steps


OPTIONS = EngineOptions(
    precision="fp32", max_num_batched_tokens=MOST_TOKENS, max_num_seqs=4, num_blocks=16
)


def planned_with(folder: Path, most_joined: int) -> tuple[PlannedModel, dict[tuple[str, str], str]]:
    """The plan, and sizes of its calls of attention and of the projection, by name and phase."""
    registry: Any = Offering(most_joined, "attention_projection")
    planned = plan_model(folder, OPTIONS, registry, WaiverBook())
    names = ("attention", "attention_projection", "o_proj")
    found = {
        (op.site.site.removeprefix("layers.*."), op.site.request.phase): str(op.tokens)
        for op in planned.plan.ops
    }
    return planned, {key: size for key, size in found.items() if key[0] in names}


def test_the_same_logits_with_attention_and_projection_in_one_call(tmp_path: Path) -> None:
    """Steps of one and of three decoding rows, alone and before a chunk of a prompt."""
    family = "llama-tied-llama3-rope"
    model = tiny_models.make_tiny_model(family, tmp_path, seed=torch.seed() % 2**31)
    planned, sizes = planned_with(tmp_path, 2)
    apart = {("attention", "prefill"): "1-64", ("o_proj", "prefill"): "1-64"}
    assert sizes == apart | {
        ("attention_projection", "decode"): "1-2",
        ("attention", "decode"): "3-4",
        ("o_proj", "decode"): "3-4",
    }
    whole, sizes = planned_with(tmp_path, 4)
    assert sizes == apart | {("attention_projection", "decode"): "1-4"}
    plain, sizes = planned_with(tmp_path, 0)
    assert sizes["o_proj", "any"] == "1-64"
    memory = plain.plan.memory
    assert memory is not None
    # The weight of the projection is one, however many calls hold it.
    assert memory == planned.plan.memory == whole.plan.memory

    ids = [torch.randint(2, tiny_models.VOCAB_SIZE, (9,)).tolist() for _ in range(4)]
    blocks = [[3 * i] for i in range(4)]
    runner, ops = build_rank(planned, 0, None, 16)
    runner.execute(
        Batch(prefill=[ScheduledSequence(i, ids[i][:6], 0, blocks[i], "last") for i in range(3)])
    )

    def token(i: int, at: int) -> ScheduledSequence:
        return ScheduledSequence(i, [ids[i][at]], at, blocks[i], "last")

    got = [
        runner.execute(Batch(decode=[token(i, 6) for i in range(3)])),
        runner.execute(
            Batch(
                decode=[token(0, 7)],
                prefill=[ScheduledSequence(3, ids[3], 0, blocks[3], "last")],
            )
        ),
        runner.execute(Batch(decode=[token(0, 8)])),
    ]
    ends = [(0, 6), (1, 6), (2, 6), (0, 7), (3, 8), (0, 8)]
    with torch.inference_mode():
        want = [model.oracle(torch.tensor([ids[i]])).logits[0, at] for i, at in ends]
    difference = (torch.cat(got) - torch.stack(want)).abs().max()
    assert float(difference / torch.stack(want).abs().max()) <= TOLERANCE
    joined = sum(c.calls for c in ops.counts() if c.op == "attention_projection")
    assert joined == 2 * 3  # two of the steps have few enough rows, in three layers
    runner.close()


def test_a_projection_with_a_bias_stays_apart(tmp_path: Path) -> None:
    tiny_models.make_tiny_model("llama", tmp_path, seed=torch.seed() % 2**31)
    _, sizes = planned_with(tmp_path, MOST_TOKENS)
    assert ("attention_projection", "decode") not in sizes


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("most_joined", [8, MOST_TOKENS])
def test_the_same_logits_with_norms_rotation_and_write_in_one_call(
    tmp_path: Path, family: str, most_joined: int
) -> None:
    """With the norms of q and k (qwen3) and without; steps of 20, 8 and 1 tokens."""
    model = tiny_models.make_tiny_model(family, tmp_path, seed=torch.seed() % 2**31)
    registry: Any = Offering(most_joined, "rope_kv_write")
    planned = plan_model(tmp_path, OPTIONS, registry, WaiverBook())
    found = {
        op.site.site.removeprefix("layers.*."): str(op.tokens)
        for op in planned.plan.ops
        if op.site.site.endswith(("rope", "kv_write", "q_norm", "k_norm"))
    }
    names = ("rope", "kv_write", *(("q_norm", "k_norm") if family == "qwen3" else ()))
    apart = dict.fromkeys(names, f"{most_joined + 1}-64") if most_joined < MOST_TOKENS else {}
    assert found == {"rope_kv_write": f"1-{most_joined}"} | apart
    runner, ops = build_rank(planned, 0, None, 16)
    ids = torch.randint(2, tiny_models.VOCAB_SIZE, (29,)).tolist()
    got = [
        runner.execute(Batch(prefill=[ScheduledSequence(0, ids[a:b], a, [5, 2], "all")]))
        for a, b in ((0, 20), (20, 28))
    ]
    got.append(runner.execute(Batch(decode=[ScheduledSequence(0, [ids[28]], 28, [5, 2], "last")])))
    with torch.inference_mode():
        want = model.oracle(torch.tensor([ids])).logits[0]
    assert float((torch.cat(got) - want).abs().max() / want.abs().max()) <= TOLERANCE
    calls = sum(c.calls for c in ops.counts() if c.op == "rope_kv_write")
    assert calls == 3 * (2 if most_joined == 8 else 3)  # steps of few tokens, in three layers
    runner.close()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("most_joined", [8, MOST_TOKENS])
def test_the_same_logits_with_products_and_norms_in_one_call(
    tmp_path: Path, family: str, most_joined: int
) -> None:
    """With biases (llama) and without; steps of 20, 8 and 1 tokens on one rank. Behind the last
    layer's product only some rows are normed, so it stays apart."""
    model = tiny_models.make_tiny_model(family, tmp_path, seed=torch.seed() % 2**31)
    registry: Any = Offering(most_joined, "gemm_norm")
    planned = plan_model(tmp_path, OPTIONS, registry, WaiverBook())
    found: dict[str, dict[int, list[str]]] = {}
    for op in planned.plan.ops:
        name = op.site.site.removeprefix("layers.*.")
        if name in ("o_proj", "post_norm", "o_proj_norm", "down_proj", "down_proj_norm"):
            for layer in op.site.layers:
                found.setdefault(name, {}).setdefault(layer, []).append(str(op.tokens))
    apart = [] if most_joined == MOST_TOKENS else [f"{most_joined + 1}-64"]
    joined = [f"1-{most_joined}"]
    assert found["o_proj_norm"] == dict.fromkeys(range(3), joined)
    assert found["down_proj_norm"] == dict.fromkeys(range(2), joined)
    assert found["down_proj"] == dict.fromkeys(range(2) if apart else (), apart) | {2: ["1-64"]}
    assert found.get("o_proj", {}) == (dict.fromkeys(range(3), apart) if apart else {})
    assert found.get("post_norm", {}) == (dict.fromkeys(range(3), apart) if apart else {})
    alone = plan_model(tmp_path, OPTIONS, Offering(0, "gemm_norm"), WaiverBook())  # type: ignore[arg-type]  # a registry that offers more
    assert planned.plan.memory == alone.plan.memory

    runner, ops = build_rank(planned, 0, None, 16)
    ids = torch.randint(2, tiny_models.VOCAB_SIZE, (29,)).tolist()
    got = [
        runner.execute(Batch(prefill=[ScheduledSequence(0, ids[a:b], a, [5, 2], "all")]))
        for a, b in ((0, 20), (20, 28))
    ]
    got.append(runner.execute(Batch(decode=[ScheduledSequence(0, [ids[28]], 28, [5, 2], "last")])))
    with torch.inference_mode():
        want = model.oracle(torch.tensor([ids])).logits[0]
    assert float((torch.cat(got) - want).abs().max() / want.abs().max()) <= TOLERANCE
    calls = sum(c.calls for c in ops.counts() if c.op == "gemm_norm")
    assert calls == 5 * (2 if most_joined == 8 else 3)  # three layers, the last has one norm
    runner.close()
