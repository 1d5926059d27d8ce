"""How many entries are scored at a time, and what memory that takes. Free of torch and triton."""

from __future__ import annotations

from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import CANDIDATE_BLOCK_ENTRIES

SCORE_BYTES = 256 * 2**20
"""What the scores of a piece take at most, where a piece is not the smallest one."""
SMALLEST_PIECE = 4096
"""Entries; twice what the lists of known models hold, so that merging is the lesser part."""
ANY_CONTEXT = 2**31 - 1  # entries
_UNIT = 1024  # entries: whole tiles of any configuration, and whole candidate blocks


def piece_size(tokens: int, entries: int) -> int:
    """Entries of a piece, a multiple of 1,024, for so many queries over so many entries."""
    fitting = SCORE_BYTES // (4 * max(1, tokens)) // _UNIT * _UNIT
    whole = -(-max(1, entries) // _UNIT) * _UNIT
    return min(max(fitting, SMALLEST_PIECE), whole)


def scores_candidates_alone(request: IndexSelectionRequest) -> bool:
    """Whether only the entries of a query's candidate blocks are scored. A prompt's queries have
    lists of their own but share the keys of a tile: there all are scored, and the choice is
    limited."""
    return request.is_limited and request.phase == "decode"


def workspace_bytes(request: IndexSelectionRequest, entries: int = ANY_CONTEXT) -> int:
    """What a call at the most tokens of its range takes beside its operands and results, in a
    context of so many entries; by default in any, as longer ones take more pieces of one size."""
    tokens = request.tokens.high
    if scores_candidates_alone(request):
        return tokens * (4 * request.candidate_blocks * CANDIDATE_BLOCK_ENTRIES + 4)
    size = piece_size(tokens, entries)
    kept = min(2, -(-max(1, entries) // size) - 1)  # running choices, read and written in turn
    row = 4 * size + 8 * kept * (request.top_k // request.pool_size) + 4
    if request.candidate_blocks:
        row += 4 * size // CANDIDATE_BLOCK_ENTRIES  # marks of a limited choice, or maxima
    if request.publishes_candidates:
        row += 8 * kept * request.candidate_blocks + 4
    return tokens * row
