"""Devices and inputs of the tests of accelerators' torch candidates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.request import OpRequest, TokenRange

TOKENS = TokenRange(1, 64)
# Of 8 bits of mantissa, a few roundings, relative to the largest value of the result.
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5}


def device_of(backend: str, arch: str, *features: str) -> DeviceSpec:
    return DeviceSpec(
        device_id="x",
        vendor=backend,
        backend=backend,
        name=arch,
        arch=arch,
        torch_device="cuda",
        features=frozenset(features),
    )


# A platform whose torch is used as it dispatches itself, and one with torch's own variants.
OTHER = device_of("metax", "xcore1000", "matrix.bfloat16")
HOPPER = device_of("nvidia", "sm_90", "matrix.bfloat16", "matrix.fp8_e4m3fn", "matrix.int8")


def serving(candidates: Sequence[KernelCandidate], request: OpRequest) -> list[KernelCandidate]:
    found = [c for c in candidates if c.serves(request)]
    assert found, [(c.name, c.not_supported_reasons(request)) for c in candidates]
    return found


def check(got: torch.Tensor, want: torch.Tensor, dtype: str, what: str) -> None:
    error = (got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1e-6)
    assert error <= TOLERANCE[dtype], (what, float(error))


def paged(lengths: list[int], queries: list[int], size: int) -> tuple[int, AttentionMetadata]:
    blocks = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(blocks) + 3).int()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        start = sum(blocks[:i])
        table[i, :count] = order[start : start + count]
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    return len(order), AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )


def changed(request: Any, **changes: Any) -> Any:
    return dataclasses.replace(request, **changes)
