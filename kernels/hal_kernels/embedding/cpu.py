"""Embedding gather on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal_kernels.cpu_fault import Fault
from hal_kernels.cpu_intrinsics import pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import vector_to_read
from hal_kernels.cpu_simd import (
    LANES,
    element_kind,
    vector_load,
    vector_load_first,
    vector_store,
    vector_store_first,
)

_GRAIN_ELEMENTS = 32768


def bind_embedding(*, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Bind the gather of rows of ``weight`` [vocab_size, hidden_size] (contiguous).

    The kernel takes ids int64 [T] and returns [T, hidden_size].

    Machine code: vmovups on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support. The kernel itself raises
        IndexError for an id outside the table.
    """
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            f"the embedding table must be contiguous [vocab, hidden], got {list(weight.shape)} "
            f"with strides {list(weight.stride())}"
        )
    vocab_size, hidden_size = weight.shape
    dtype = weight.dtype
    fault = Fault(
        lambda token_id: IndexError(f"token id {token_id} is outside the {vocab_size} embeddings")
    )
    launch = bind_worker(
        _compile_embedding(hidden_size, element_kind(dtype)),
        2,
        (weight, vocab_size),
        fault,
        addresses=(0, 1),
    )
    grain = max(1, _GRAIN_ELEMENTS // hidden_size)

    def embedding(ids: torch.Tensor) -> torch.Tensor:
        ids = vector_to_read("ids of an embedding", ids, torch.int64)
        tokens = ids.shape[0]
        rows = torch.empty(tokens, hidden_size, dtype=dtype)
        launch(tokens, grain, ids.data_ptr(), rows.data_ptr())
        return rows

    return embedding


@functools.cache
def _compile_embedding(hidden_size: int, kind: int) -> CompiledWorker:
    tail = hidden_size % LANES
    full = hidden_size - tail
    zero = np.float32(0.0)

    def embedding(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        ids, rows, table, vocab_size = pointer_int64(args[0]), args[1], args[2], args[3]
        for token in range(begin, end):
            token_id = ids[token]
            if token_id < 0 or token_id >= vocab_size:
                pointer_int64(args[4])[0] = 1
                pointer_int64(args[5])[0] = token_id
                continue
            source = token_id * hidden_size
            target = token * hidden_size
            for i in range(0, full, LANES):
                vector_store(rows, target + i, vector_load(table, source + i, kind), kind)
            if tail > 0:
                value = vector_load_first(table, source + full, kind, tail, zero)
                vector_store_first(rows, target + full, value, kind, tail)

    return compile_worker(embedding)
