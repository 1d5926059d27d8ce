"""A model that cannot be fooled: its next token depends on every token it finds in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch

from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.batch import Batch
from hal_engine.engine_loop import Engine
from hal_engine.scheduler import SchedulerConfig
from hal_engine.structured_output import GrammarLimits

VOCAB_SIZE = 272  # 256 bytes, eos, two markers, and ids no token has
EOS = 256


class ByteTokenizer:
    """One token a byte; 256 is the end of text, 257 and 258 are chat markers."""

    vocab_size = 259
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS, 257, 258})
    has_chat_template = False

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def least_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<|%d|>" % token_id

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        return [257, *"".join(m["content"] for m in messages).encode(), 258]

    def close(self) -> None:
        """Nothing runs outside."""


def next_logits(history: Sequence[int], vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """The model: logits drawn from a hash of the whole history."""
    digest = blake2b(np.asarray(history, dtype=np.int64).tobytes(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    return generator.standard_normal(vocab_size, dtype=np.float32)


def greedy_tokens(prompt: Sequence[int], count: int, *, ignore_eos: bool = True) -> list[int]:
    """What the model says to a prompt, computed without any cache."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(next_logits(history).argmax()))
        if not ignore_eos and history[-1] == EOS:
            break
    return history[len(prompt) :]


class FakeRunner:
    """Keeps tokens where a model keeps keys and values, and reads them through the block table."""

    supports_embeddings = True
    num_replays = 0

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        change: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
        on_execute: Callable[[int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.batches: list[tuple[int, int, int]] = []  # decode, prefill sequences, tokens
        self.is_closed = False
        self._change = change
        self._on_execute = on_execute
        self._kv = np.full(num_blocks * block_size, -1, dtype=np.int64)

    def execute(self, batch: Batch) -> torch.Tensor:
        if self._on_execute is not None:
            self._on_execute(len(self.batches))
        batch = Batch.from_json(batch.to_json())
        self.batches.append((len(batch.decode), len(batch.prefill), batch.num_tokens))
        entries = [*batch.decode, *batch.prefill]
        written: set[int] = set()
        for entry in entries:
            for position, token in enumerate(entry.token_ids, entry.start):
                slot = self._slot(entry.block_ids, position)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self._kv[slot] = token
        rows = []
        for entry in entries:
            end = entry.start + len(entry.token_ids)
            history = [int(self._kv[self._slot(entry.block_ids, p)]) for p in range(end)]
            assert min(history) >= 0, "a slot was read that nobody wrote"
            first = {"none": end, "last": end - 1, "all": entry.start}[entry.logits]
            rows += [next_logits(history[: p + 1]) for p in range(first, end)]
        logits = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB_SIZE)
        return self._change(len(self.batches), logits) if self._change else logits

    def _slot(self, block_ids: list[int], position: int) -> int:
        block_id = block_ids[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id * self.block_size + position % self.block_size

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[float(len(ids)), float(sum(ids))] for ids in token_ids]

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        values, index = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1])
        values = values.masked_fill(rank >= top_k[:, None], float("-inf"))
        mass = values.softmax(-1).cumsum(-1)
        before = mass - values.softmax(-1)
        values = values.masked_fill((before >= top_p[:, None]) & (rank > 0), float("-inf"))
        return torch.empty_like(logits).scatter_(1, index, values)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def fake_runner() -> type[FakeRunner]:
    return FakeRunner


@pytest.fixture(scope="session")
def oracle() -> Callable[..., list[int]]:
    return greedy_tokens


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[..., np.ndarray]:
    return next_logits


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerationRequest]:
    """`make_request(prompt, id, deadline_s=…, grammar=…, **sampling)`; ignores EOS by default."""

    def make(
        prompt: Sequence[int] | str, request_id: str = "r", **options: Any
    ) -> GenerationRequest:
        outer = {k: options.pop(k) for k in ("deadline_s", "grammar") if k in options}
        options.setdefault("ignore_eos", True)
        ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
        sampling = SamplingParams(**options)
        return GenerationRequest(
            request_id=request_id, prompt_token_ids=ids, sampling=sampling, **outer
        )

    return make


@pytest.fixture(scope="session")
def make_engine(byte_tokenizer: ByteTokenizer) -> Callable[..., Engine]:
    """`make_engine(runner, grammar_limits=…, **scheduler_config)`; the test closes it."""

    def make(
        runner: FakeRunner, *, grammar_limits: GrammarLimits | None = None, **config: Any
    ) -> Engine:
        return Engine(
            "fake",
            runner,
            byte_tokenizer,
            SchedulerConfig(**config),
            plan_json={"hash": "abc"},
            op_calls=list,
            grammar_limits=grammar_limits,
        )

    return make
