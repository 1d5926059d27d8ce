"""An audited program computes what it computes alone: bit for bit, random numbers included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hal
from observed import calls_of, observe

Program = Callable[[], Any]


def _train_with_dropout() -> Any:
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(24, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 12)), torch.randint(0, 5, (8,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def _encoder_on_its_fast_path() -> Any:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        return model(torch.randn(2, 7, 16))


def _lstm() -> Any:
    return torch.nn.LSTM(6, 7, num_layers=2, batch_first=True, dropout=0.2)(torch.randn(2, 5, 6))


def _convolutions() -> Any:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    )
    out = model(torch.randn(2, 3, 9, 9))
    out.sum().backward()
    return [out, model[0].weight.grad]


def _autocast_and_checkpoint() -> Any:
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = checkpoint(lambda y: layer(y).relu(), x, use_reentrant=False)
    out.float().sum().backward()
    return [out, x.grad]


def _inference_mode_composites() -> Any:
    with torch.inference_mode():
        a = torch.randn(4, 5, 6)
        return [
            torch.einsum("bij,bkj->bik", a, a),
            torch.tensordot(a, a, dims=([2], [2])),
            F.multi_head_attention_forward(
                *(torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8), 8, 2),
                *(torch.randn(24, 8), torch.randn(24), None, None, False, 0.0),
                *(torch.randn(8, 8), torch.randn(8)),
            )[0],
            a.reshape(20, 6).to(torch.bfloat16).float(),
        ]


def _transforms() -> Any:
    weight = torch.randn(4, 4)
    x = torch.randn(3, 4)
    per_row = torch.func.vmap(torch.func.grad(lambda row: (weight @ row).sin().sum()))(x)
    return [per_row, torch.func.jvp(torch.sin, (x,), (x,))[1]]


def _generator_in_no_grad() -> Any:
    layer = torch.nn.Linear(4, 4)

    def rows() -> Iterator[torch.Tensor]:
        with torch.no_grad():
            for _ in range(3):
                yield layer(torch.randn(2, 4))

    grads = []
    for row in rows():
        grads += [row, torch.tensor(torch.is_grad_enabled())]
    return grads


def _script() -> Any:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    return [scripted(torch.randn(2, 4)) for _ in range(3)]


def _language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=6, do_sample=True, pad_token_id=0)


PROGRAMS: list[Program] = [
    _train_with_dropout,
    _encoder_on_its_fast_path,
    _lstm,
    _convolutions,
    _autocast_and_checkpoint,
    _inference_mode_composites,
    _transforms,
    _generator_in_no_grad,
    _script,
    _language_model,
]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


@pytest.mark.parametrize("mode", ["full", "light"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_results_are_bit_identical(program: Program, mode: Literal["full", "light"]) -> None:
    seed = int(torch.randint(0, 2**31, ()))
    torch.manual_seed(seed)
    expected = _flat(program())
    expected_state = torch.get_rng_state()
    torch.manual_seed(seed)
    with hal.audit(mode=mode) as report:
        found = _flat(program())
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.is_contiguous() == other.is_contiguous()
    assert report.trace.ops
    assert not [note for note in report.result.notes if "failed" in note]


def test_fast_path_of_the_encoder_stays() -> None:
    """Torch leaves it when it sees a mode of torch functions; the audit hides its own."""
    names = calls_of(observe(_encoder_on_its_fast_path))
    assert names["_transformer_encoder_layer_fwd"] == 2


def test_a_mode_of_the_program_still_counts() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 7, 16)

    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    def program() -> None:
        with torch.no_grad(), Counting():
            layer(x)

    program()
    alone, Counting.calls = Counting.calls, 0
    trace = observe(program)
    assert Counting.calls == alone
    assert calls_of(trace)["_transformer_encoder_layer_fwd"] == 0


def test_dispatch_modes_of_the_program_nest() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    a = torch.randn(8, 8)

    def program() -> int:
        with FlopCounterMode(display=False) as counter:
            torch.mm(a, a)
        return counter.get_total_flops()

    assert program() == 2 * 8**3
    with hal.audit() as report:
        assert program() == 2 * 8**3
    assert calls_of(report.trace)["mm"] == 1


def test_deep_copies_and_pickles() -> None:
    import io

    layer = torch.nn.Linear(3, 3)

    def program() -> torch.Tensor:
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(layer).state_dict(), buffer)
        buffer.seek(0)
        loaded: torch.Tensor = torch.load(buffer)["weight"]
        return loaded

    with hal.audit():
        assert torch.equal(program(), layer.weight)
