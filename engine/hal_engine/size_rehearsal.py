"""A rehearsal of every size of step, where kernels are compiled at the first call of their kind.

Kernels take other tiles for other numbers of rows, and compilers another form of each for sizes
that are multiples of 16: one short prompt meets few of them. What cannot be compiled is found here,
before the server is ready, and not by the first long prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hal.plan import Plan
from hal_engine.batch import Batch, LogitsWanted, ModelRunner, ScheduledSequence
from hal_engine.building import Progress

# Of `logits="all"`, as prompt log probabilities ask for: so many bytes at a time.
_MOST_LOGITS_BYTES = 64 << 20


def compiles_at_first_call(plan: Plan) -> bool:
    """Whether an implementation that the plan chose is a kernel that the device's compiler makes
    when it is first called."""
    return any(leaf.kind == "kernel" for op in plan.ops for leaf in op.choice.leaf)


def sizes_to_meet(plan: Plan, most: int) -> list[int]:
    """Numbers of tokens up to `most`, ascending: of each class of rows (up to a power of two) one
    that is a multiple of 16 and one that is not, and the ends of the plan's ranges."""
    powers = [1 << k for k in range(max(1, most).bit_length())]
    ends = [end for op in plan.ops for end in (op.tokens.low, op.tokens.high)]
    wanted = {*powers, *(power - 1 for power in powers), *ends, most}
    return sorted(size for size in wanted if 1 <= size <= most)


def rehearse_sizes(
    runner: ModelRunner,
    plan: Plan,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    progress: Progress | None = None,
) -> int:
    """Runs a step of each size in each phase, and forgets; returns how many. On the thread that
    will run the steps, before the first request: it writes into the KV blocks.

    progress: told after each, since a device's compiler may take minutes for all of them.

    Raises what the runner raises: KernelBuildError for a kernel that cannot be compiled.
    """
    room = runner.num_blocks * runner.block_size
    prompts = sizes_to_meet(plan, min(max_num_batched_tokens, room))
    decodes = sizes_to_meet(plan, min(max_num_seqs, max_num_batched_tokens, runner.num_blocks))
    batches = [*_prompts(runner, prompts, max_num_seqs), *_decodes(runner, decodes)]
    for done, batch in enumerate(batches, start=1):
        logits = runner.execute(batch)
        if batch.decode:
            _sample(runner, logits)
        if progress is not None:
            progress("compile", done, len(batches))
    return len(batches)


def _prompts(runner: ModelRunner, sizes: Sequence[int], most: int) -> Iterator[Batch]:
    """Prompts of so many tokens in all, none longer than a context and at most `most` of them, and
    the last tokens of a prompt as long as one."""
    # What contexts and sequences do not hold together is no step.
    able = [size for size in sizes if size <= most * runner.max_model_len]
    for size in able:
        yield Batch(prefill=_sequences(runner, size, "last"))
        if size * runner.vocab_size * 4 <= _MOST_LOGITS_BYTES:
            yield Batch(prefill=_sequences(runner, size, "all"))
    longest = _longest_context(runner)
    chunk = min(16, longest)
    blocks = list(range(-(-longest // runner.block_size)))
    yield Batch(
        prefill=[ScheduledSequence(0, _token_ids(runner, chunk), longest - chunk, blocks, "last")]
    )


def _sequences(runner: ModelRunner, size: int, logits: LogitsWanted) -> list[ScheduledSequence]:
    """`size` tokens in as few sequences as contexts and blocks allow."""
    found: list[ScheduledSequence] = []
    first_block = 0
    while size:
        left = (runner.num_blocks - first_block) * runner.block_size
        length = min(size, runner.max_model_len, left)
        if not length:
            break  # sequences of short contexts leave blocks half empty
        count = -(-length // runner.block_size)
        blocks = list(range(first_block, first_block + count))
        ids = _token_ids(runner, length)
        found.append(ScheduledSequence(len(found), ids, 0, blocks, logits))
        first_block, size = first_block + count, size - length
    return found


def _decodes(runner: ModelRunner, sizes: Sequence[int]) -> Iterator[Batch]:
    """Steps of so many sequences, and of one whose context is each power of two and the longest."""
    for size in sizes:
        yield Batch(
            decode=[
                ScheduledSequence(i, [i % runner.vocab_size], 0, [i], "last") for i in range(size)
            ]
        )
    longest = _longest_context(runner)
    contexts = [1 << k for k in range(longest.bit_length()) if 1 << k < longest]
    for length in (*contexts, longest):
        blocks = list(range(-(-length // runner.block_size)))
        yield Batch(decode=[ScheduledSequence(0, [0], length - 1, blocks, "last")])


def _sample(runner: ModelRunner, logits: torch.Tensor) -> None:
    """As the sampler does for requests with limits of their own."""
    rows, device = len(logits), logits.device
    most = min(8, runner.vocab_size)
    with torch.inference_mode():
        runner.top_k_top_p(
            logits.clone(),
            torch.full((rows,), most, dtype=torch.int64, device=device),
            torch.full((rows,), 0.9, dtype=torch.float32, device=device),
        )


def _longest_context(runner: ModelRunner) -> int:
    return max(1, min(runner.max_model_len, runner.num_blocks * runner.block_size))


def _token_ids(runner: ModelRunner, count: int) -> list[int]:
    return [7 * i % runner.vocab_size for i in range(count)]
