"""Why ours has something worse than a peer, where that is no matter of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

# (problem, target, metric) -> why; the first that fits. Patterns as in a shell.
_WHY: tuple[tuple[str, str, str, str], ...] = (
    (
        "decode attention*", "*", "resident warps",
        "The smaller tile of the other has as many bytes in flight: blocks times shared memory.",
    ),
    (
        "prefill attention*", "*", "resident warps",
        "The other's tiles of 16 rows hold more warps and read seven times as much.",
    ),
    (
        "prefill attention*", "gfx1100", "bytes",
        "Tiles of 128 rows leave one block resident, of 64 rows two; the other's spill.",
    ),
    (
        "MLA decode*", "gfx1100", "load width",
        "Rows are multiplied in chunks of 64 columns by eight warps; whole rows spill.",
    ),
    (
        "MLA decode*", "*", "bytes",
        "Splits are of 512 keys whatever the number of sequences, so that one alone fills a "
        "device; the sums of 16 splits are 8% of what is read here. Tiles of more than 16 heads "
        "read less and spill.",
    ),
    (
        "MLA decode*", "gfx9*", "resident warps",
        "32 rows a tile take 292 registers, 16 would take 194: which is faster is not measured.",
    ),
    (
        "FP8 block product, decode", "*", "bytes",
        "64 columns a tile are twice the programs for 16 rows, which the second half reads again "
        "from the cache.",
    ),
    (
        "*FP8 block*, prefill", "gfx*", "bytes",
        "Tiles of 64 columns keep three blocks resident in place of two; `hal kernels tune` "
        "measures which is faster on a device.",
    ),
    (
        "experts, bf16, prefill", "*", "bytes",
        "Tiles of 256 columns leave room for one block, and for none in 64 KiB.",
    ),
    (
        "experts, bf16, *", "*", "resident warps",
        "The smaller tiles of the other have as many bytes in flight and read the rows more often.",
    ),
    (
        "rope", "*", "bytes",
        "The 512 bytes of a token's cosines and sines are read by two or three programs in place "
        "of one, which each hold fewer registers.",
    ),
    (
        "router, sqrt*", "*", "resident warps",
        "A warp holds 512 scores beside their biased ones, which may choose in groups too.",
    ),
    (
        "router, s*", "sm_*", "resident warps",
        "One warp chooses for a token without a barrier, so the number of blocks is the limit.",
    ),
    (
        "router, softmax", "gfx*", "load width",
        "128 logits on 64 lanes are 8 bytes a lane; the other takes eight tokens a program.",
    ),
)  # fmt: skip


def explanation(problem: str, target: str, worse: Mapping[str, str]) -> str:
    """Why the metrics are worse; "" where nothing is, or nothing is known of it."""
    found = []
    for metric in worse:
        for of, on, about, why in _WHY:
            if fnmatchcase(problem, of) and fnmatchcase(target, on) and about == metric:
                found.append(why)
                break
    return " ".join(dict.fromkeys(found))
