"""Every problem that ours and the peers' kernels are compiled for."""

from __future__ import annotations

from kernel_peers import (
    attention_problems,
    product_problems,
    routing_problems,
    row_problems,
    sparse_problems,
    state_problems,
)

PROBLEMS = (
    *attention_problems.PROBLEMS,
    *product_problems.PROBLEMS,
    *row_problems.PROBLEMS,
    *routing_problems.PROBLEMS,
    *state_problems.PROBLEMS,
    *sparse_problems.PROBLEMS,
)
