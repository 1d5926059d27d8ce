"""Cases of collectives over peers' memory, by two ranks that are both on the one device.

Their buffers are in its memory, so flags, epochs and sums are checked and no link is. On a GPU the
ranks run at the same time, each in a stream, and wait for each other. In the interpreter they take
turns: a rank that comes alone gives up at once, and what it left behind is there for the other, so
that after three turns each has seen the messages of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import Bench, Case, CaseMaker
from hal.ops.norm import RmsNormRequest
from hal.ops.norm import reference as exact_norm
from hal_kernels.collective.layout import (
    Algorithm,
    BufferLayout,
    buffer_layout,
    norm_row_block,
)
from hal_kernels.collective.peer_buffers import PeerBuffers
from hal_kernels.collective.triton import Kernel, bind_all_reduce_norm, bind_to_buffers
from hal_kernels.collective.triton_variants import MOST_NORM_WIDTH

_RANKS = 2
_TURNS = 3  # the second phase of a two-shot sum is right in the third
_MAX_POLLS = 4_000_000  # some seconds: a rank that does not come is an error, not a hang
_FP8 = 0.08


def makers() -> Iterator[CaseMaker]:
    for algorithm, name in (
        ("one_shot", "all_reduce_one_shot"), ("two_shot", "all_reduce_two_shot"),
        ("reduce_scatter", "reduce_scatter"), ("all_gather", "all_gather"),
    ):  # fmt: skip
        for is_push in (True, False):
            yield CaseMaker(
                name=f"{name}, two ranks on one device, {'push' if is_push else 'pull'}",
                kernels=(f"collective.{name}",),
                make=lambda b, a=algorithm, p=is_push: collective_case(b, a, p),
            )
    yield CaseMaker(
        name="all_reduce_one_shot, two ranks on one device, e4m3 on the wire",
        kernels=("collective.all_reduce_one_shot",),
        make=lambda b: collective_case(b, "one_shot", True, "fp8_e4m3fn"),
    )
    for rows, kernel, sizes in (
        ("rows", "all_reduce_norm", (4096, 264)),
        ("wide rows", "all_reduce_norm_looped", (16_384, 8200)),
    ):
        yield CaseMaker(
            name=f"all_reduce_norm of {rows}, two ranks on one device",
            kernels=(f"collective.{kernel}",),
            make=lambda b, sizes=sizes: norm_case(b, b.size(*sizes)),
        )


class _Ranks:
    """Both ranks' buffers, and calls of both."""

    def __init__(self, bench: Bench, layout: BufferLayout) -> None:
        self._is_dry, device = bench.is_dry, bench.device
        memory = [
            torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device) for _ in range(_RANKS)
        ]
        addresses = torch.tensor([m.data_ptr() for m in memory], device=device)
        self.buffers = [
            PeerBuffers(
                rank=rank, world_size=_RANKS, layout=layout, addresses=addresses,
                epochs=torch.zeros(layout.programs, dtype=torch.int32, device=device),
                status=torch.zeros(1, dtype=torch.int32, device=device), memory=memory,
            )
            for rank in range(_RANKS)
        ]  # fmt: skip
        self._streams: list[Any] = []

    def prepare(self, kernels: list[Kernel], args: list[tuple[torch.Tensor, ...]]) -> None:
        """Compiles and loads what a rank must not wait for while the other one polls. The kernels
        are ones that give up at once; the flags they raised are taken down again."""
        for kernel, given in zip(kernels, args, strict=True):
            kernel(*(one.clone() for one in given))
        if not self._is_dry:
            torch.cuda.synchronize()
            self._streams = [torch.cuda.Stream() for _ in range(_RANKS)]
        for one in self.buffers:
            one.memory[one.rank].zero_()
            one.epochs.zero_()
            one.status.zero_()

    def run(self, kernels: list[Kernel], args: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        """What each rank's call returns. Raises PeerTimeoutError where one did not come."""
        if self._is_dry:
            return self._in_turns(kernels, args)
        results: list[Any] = []
        torch.cuda.synchronize()
        for stream, kernel, given in zip(self._streams, kernels, args, strict=True):
            with torch.cuda.stream(stream):
                results.append(kernel(*given))
        torch.cuda.synchronize()
        for one in self.buffers:
            one.check()
        return results

    def _in_turns(self, kernels: list[Kernel], args: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        results: list[Any] = [None] * _RANKS
        for _ in range(_TURNS):
            for rank, (kernel, given) in enumerate(zip(kernels, args, strict=True)):
                self.buffers[rank].epochs.zero_()
                self.buffers[rank].status.zero_()
                results[rank] = kernel(*(one.clone() for one in given))
        for one in self.buffers:
            one.check()
        return results


def _case(
    bench: Bench, name: str, layout: BufferLayout, bind: Any, args: Any, exact: Any, **more: Any
) -> Case:
    ranks = _Ranks(bench, layout)
    polls = 0 if bench.is_dry else _MAX_POLLS
    kernels = [bind(one, polls) for one in ranks.buffers]
    ranks.prepare([bind(one, 0) for one in ranks.buffers], args)
    return Case(
        name=name,
        ours=lambda: ranks.run(kernels, [tuple(one.clone() for one in given) for given in args]),
        exact=exact,
        is_timed=False,  # the ranks share what each would have alone, and there is no link
        **more,
    )


def collective_case(bench: Bench, algorithm: Algorithm, is_push: bool, wire: str = "") -> Case:
    rows, width = bench.size(64, 3), bench.size(8192, 512)
    parts = [bench.bf16(rows, width) for _ in range(_RANKS)]
    layout = buffer_layout(
        algorithm, _RANKS, rows * width, element_bytes=2, wire_bytes=1 if wire else 0
    )

    def bind(buffers: PeerBuffers, polls: int) -> Kernel:
        return bind_to_buffers(
            buffers, algorithm, is_push=is_push, wire=wire, max_polls=polls,
            use_ptx=not bench.is_dry and not torch.version.hip,
            warp_size=int(bench.spec.attributes["warp_size"]),
        )  # fmt: skip

    def exact() -> list[torch.Tensor]:
        if algorithm == "all_gather":
            return [torch.cat(parts, dim=1).double()] * _RANKS
        total = sum(part.double() for part in parts)
        assert isinstance(total, torch.Tensor)
        if algorithm == "reduce_scatter":
            return list(total.chunk(_RANKS, dim=1))
        return [total] * _RANKS

    return _case(
        bench,
        f"{algorithm} {rows}x{width}, {'push' if is_push else 'pull'}{', ' + wire if wire else ''}",
        layout,
        bind,
        [(part,) for part in parts],
        exact,
        tolerance=_FP8 if wire else 2.0**-7,
    )


def norm_case(bench: Bench, hidden: int) -> Case:
    rows, block = bench.size(64, 3), norm_row_block(hidden, MOST_NORM_WIDTH)
    layout = buffer_layout("one_shot", _RANKS, rows * block, element_bytes=2, row_block=block)
    parts, residual = [bench.bf16(rows, hidden) for _ in range(_RANKS)], bench.bf16(rows, hidden)
    weight = (bench.randn(hidden).abs() + 0.5).bfloat16()

    def bind(buffers: PeerBuffers, polls: int) -> Kernel:
        return bind_all_reduce_norm(
            buffers, weight, 1e-6, is_push=True, max_polls=polls,
            use_ptx=not bench.is_dry and not torch.version.hip,
            warp_size=int(bench.spec.attributes["warp_size"]),
        )  # fmt: skip

    def exact() -> list[Any]:
        request = RmsNormRequest(hidden_size=hidden, dtype="float64", has_residual=True)
        golden = exact_norm(request, weight=weight.double(), eps=1e-6)
        total = sum(part.double() for part in parts)
        return [golden(total, residual.double())] * _RANKS

    return _case(
        bench,
        f"all_reduce_norm {rows}x{hidden}",
        layout,
        bind,
        [(part, residual) for part in parts],
        exact,
        tolerance=2.0**-6,
    )
