"""Runs batches on one rank: turns a batch into tensors, calls the decoder, returns logits."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch

from hal.binding import BoundOps
from hal.hookspecs import CapturingRuntime, Runtime
from hal.ops.attention import AttentionMetadata
from hal.ops.formats import torch_dtype
from hal.ops.request import TokenRange
from hal_engine.api import RequestRefusedError
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.captured_steps import CapturedSteps
from hal_engine.config import ModelConfig
from hal_engine.models.decoder import Decoder
from hal_engine.models.step_inputs import StepInputs
from hal_engine.precision import Precision
from hal_engine.shards import Shard


class LocalRunner:
    """A `ModelRunner` for the rank in this process. Not safe from several threads."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        precision: Precision,
        shard: Shard,
        decoder: Decoder,
        ops: BoundOps,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        runtime: Runtime | None = None,
        captured: Sequence[TokenRange] = (),
    ) -> None:
        """runtime: of the device, if it captures steps. captured: numbers of sequences whose decode
        steps are (see `step_capture`)."""
        self._config = config
        self._decoder = decoder
        self._num_blocks, self._block_size = num_blocks, block_size
        self._max_model_len = max_model_len
        shape = (num_blocks, block_size, shard.num_kv_heads, config.head_dim)
        dtype = torch_dtype(precision.kv_dtype)
        self._caches = [
            (zeroed_host_memory(shape, dtype), zeroed_host_memory(shape, dtype))
            for _ in range(config.num_layers)
        ]
        # Not a method: what the captures hold must not hold the runner that holds them.
        self._forward = _forward_over(decoder, self._caches)
        self._captured: CapturedSteps | None = None
        if captured and isinstance(runtime, CapturingRuntime):
            self._captured = CapturedSteps(
                runtime=runtime,
                forward=self._forward,
                ops=ops,
                sizes=captured,
                caches=[tensor for pair in self._caches for tensor in pair],
                block_size=block_size,
                max_model_len=max_model_len,
            )
        self._top_k_top_p = None
        if shard.rank == 0:
            self._top_k_top_p = ops.bind("sampler.top_k_top_p")

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def supports_embeddings(self) -> bool:
        return False

    def execute(self, batch: Batch) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        with torch.inference_mode():
            if self._captured is not None and self._captured.serves(batch):
                return self._captured.run(batch)
            return self._forward(self._inputs(batch))

    def rehearse_captures(self) -> None:
        """Captures a step of each range of sizes, so that a kernel that cannot be captured is found
        before the first request. Writes into KV blocks. Raises CaptureError."""
        if self._captured is not None:
            with torch.inference_mode():
                self._captured.rehearse(self._num_blocks, self._max_model_len)

    @property
    def num_replays(self) -> int:
        """See `ModelRunner.num_replays`."""
        return 0 if self._captured is None else self._captured.num_replays

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        raise RequestRefusedError(
            f"embeddings: a model trained for embeddings is required, {self._config.family} is a "
            "text generator; use /v1/completions or /v1/chat/completions"
        )

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """See `ModelRunner.top_k_top_p`."""
        if self._top_k_top_p is None:
            raise RuntimeError("runner: only rank 0 samples")
        masked: torch.Tensor = self._top_k_top_p(logits.shape[0], logits, top_k, top_p)
        return masked

    def close(self) -> None:
        if self._captured is not None:
            self._captured.close()
        self._caches.clear()

    def _inputs(self, batch: Batch) -> StepInputs:
        block_size = self._block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for s in batch.decode:
            position = s.start
            token_ids.append(s.token_ids[0])
            positions.append(position)
            slots.append(s.block_ids[position // block_size] * block_size + position % block_size)
        for s in batch.prefill:
            token_ids += s.token_ids
            span = range(s.start, s.start + len(s.token_ids))
            positions += span
            blocks = s.block_ids
            slots += [blocks[p // block_size] * block_size + p % block_size for p in span]
        rows = _logit_rows(batch)
        n = len(token_ids)
        return StepInputs(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            num_tokens=n,
            num_decode_tokens=len(batch.decode),
            decode=self._metadata(batch.decode),
            prefill=self._metadata(batch.prefill),
            logit_rows=None if len(rows) == n else torch.tensor(rows, dtype=torch.int64),
            num_logit_rows=len(rows),
        )

    def _metadata(self, sequences: Sequence[ScheduledSequence]) -> AttentionMetadata | None:
        if not sequences:
            return None
        starts, lengths, most_blocks = [0], [], 1
        for s in sequences:
            starts.append(starts[-1] + len(s.token_ids))
            lengths.append(s.start + len(s.token_ids))
            most_blocks = max(most_blocks, -(-lengths[-1] // self._block_size))
        table = [
            s.block_ids[:most_blocks] + [0] * (most_blocks - len(s.block_ids)) for s in sequences
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            max_query_len=max(len(s.token_ids) for s in sequences),
            max_seq_len=max(lengths),
        )


def _forward_over(
    decoder: Decoder, caches: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[StepInputs], torch.Tensor]:
    """A step of the decoder over these caches."""

    def forward(step: StepInputs) -> torch.Tensor:
        return decoder.forward(step, caches)

    return forward


def zeroed_host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor whose pages exist only once they are written, aligned to a page.

    torch.zeros writes every byte: a cache sized for the worst case would hold that memory from the
    start. Huge pages spare the attention kernels most of their address translations; Linux gives
    them to private mappings, to shared ones (mmap's default) only where it is configured to.
    """
    num_bytes = max(1, math.prod(shape)) * dtype.itemsize
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def _logit_rows(batch: Batch) -> list[int]:
    """Rows of the flat batch whose logits are wanted, in order."""
    rows: list[int] = []
    first = 0
    for s in (*batch.decode, *batch.prefill):
        last = first + len(s.token_ids) - 1
        if s.logits == "last":
            rows.append(last)
        elif s.logits == "all":
            rows += range(first, last + 1)
        first = last + 1
    return rows
