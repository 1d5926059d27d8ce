"""Every problem that ours and the peers' kernels are compiled for."""

from __future__ import annotations

from kernel_peers import (
    attention_problems,
    cache_problems,
    dense_problems,
    four_bit_problems,
    latent_problems,
    packed_problems,
    product_problems,
    routing_problems,
    row_problems,
    sparse_problems,
    state_problems,
    stream_problems,
)

PROBLEMS = (
    *attention_problems.PROBLEMS,
    *product_problems.PROBLEMS,
    *row_problems.PROBLEMS,
    *routing_problems.PROBLEMS,
    *state_problems.PROBLEMS,
    *sparse_problems.PROBLEMS,
    *dense_problems.PROBLEMS,
    *four_bit_problems.PROBLEMS,
    *latent_problems.PROBLEMS,
    *cache_problems.PROBLEMS,
    *stream_problems.PROBLEMS,
    *packed_problems.PROBLEMS,
)
