"""A problem for the comparison of kernels: a package of one kernel, beside a small one of ours."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_peers.launches import Launch, Problem, no_product, row_kernel

_ARGUMENTS = {**dict.fromkeys(("x_ptr", "y_ptr"), "*bf16"), "N": 4096, "first": 16, "stride": 1}


def _launch(peer: str, function: str, *blocks: int, skips: Sequence[str] = ()) -> Launch:
    return Launch(
        peer=peer,
        wheel="tiny_wheel",
        path="tiny/kernels.py",
        function=function,
        arguments=lambda _: _ARGUMENTS,
        configurations=lambda _: [{"BLOCK": block, "num_warps": 2} for block in blocks],
        moves=lambda tiles: int(tiles["BLOCK"]) * 4,
        source="here",
        given=lambda _: {"IS_FAST": "False"},
        skips=dict.fromkeys(skips, "of another maker"),
    )


PROBLEMS = (
    Problem(
        name="copy",
        what="one row",
        dtype=no_product,
        own=row_kernel("embedding.gather", "h2048", 4096, "bfloat16"),
        peers=(
            _launch("Wide", "scaled_copy", 1024),
            _launch("Chosen", "scaled_copy", 1024, 64),
            _launch("Renamed", "other", 64),
            _launch("Elsewhere", "scaled_copy", 64, skips=("sm_90", "gfx942")),
        ),
        formula="once each way",
    ),
    Problem(
        name="another",
        what="not asked for",
        dtype=no_product,
        own=row_kernel("absent", "", 0),
        peers=(),
        formula="",
    ),
)
