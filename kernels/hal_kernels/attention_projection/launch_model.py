"""In which way a decode attends and projects, and over how many programs: by the bytes it reads.

A model, not a measurement: nobody timed the two ways beside each other yet. Free of torch and
triton.
"""

from __future__ import annotations

from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.formats import DTYPE_BYTES

UNKNOWN_UNITS = 64  # multiprocessors where nobody says how many there are: a small device


def pieces_of_one_pass(
    request: AttentionProjectionRequest, units: int, tiles: int, sequences: int
) -> int:
    """Pieces of the result that each cached head and sequence is cut into, at most `tiles`: as many
    programs as the device runs at a time."""
    programs = request.num_kv_heads * sequences
    return max(1, min(tiles, -(-units // programs)))


def prefers_one_pass(
    request: AttentionProjectionRequest, pieces: int, sequences: int, longest: int
) -> bool:
    """Whether the keys and the weight that one pass reads again weigh less than the weight once.

    Each piece reads the keys and values of its sequence and cached head, each sequence the weight.
    longest: keys of the longest sequence.
    """
    keys = min(longest, request.window) if request.window else longest
    dims = request.head_dim + request.v_head_dim
    rows = sequences * request.num_kv_heads * keys * dims * DTYPE_BYTES[request.kv_dtype]
    weight = request.hidden_size * request.num_heads * request.v_head_dim
    weight *= DTYPE_BYTES[request.dtype]
    return (pieces - 1) * rows + (sequences - 1) * weight <= weight


def groups_of_heads(request: AttentionProjectionRequest, units: int, tiles: int) -> int:
    """Groups of heads whose products are summed afterwards: one, unless the tiles of the result
    leave half of the device idle. It does not depend on the batch, so neither does the order in
    which a row is summed."""
    if 2 * tiles > units:
        return 1
    return min(request.num_heads, units // tiles)
