"""The requests that the support matrix asks every candidate about: calls of real models, by name.

Within an op their order is the order of the letters in docs/support-matrix.csv, so a new one goes
to the end of its op.
"""

from __future__ import annotations

from collections.abc import Mapping

from hal.ops.request import OpRequest
from matrix_attention import ATTENTION
from matrix_collectives import COLLECTIVES
from matrix_products import PRODUCTS
from matrix_rows import ROWS

REQUESTS: Mapping[str, Mapping[str, OpRequest]] = {
    **ATTENTION,
    **PRODUCTS,
    **ROWS,
    **COLLECTIVES,
}
