"""The counts that estimates rest on, against counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import RequestError
from hal.ops.checks import entries_read, one_of, positive, require, seen_entries
from op_inputs import UNTIMED


@UNTIMED
@given(tokens=st.integers(0, 60), ratio=st.integers(1, 9), most=st.integers(0, 12))
def test_pairs_of_a_prompt_are_counted_query_by_query(tokens: int, ratio: int, most: int) -> None:
    seen = [(p + 1) // ratio for p in range(tokens)]
    want = sum(min(n, most) if most else n for n in seen)
    assert seen_entries(tokens, ratio, most) == want
    for phase in ("prefill", "any"):
        assert entries_read(phase, tokens, 10**6, ratio, most) == want


@UNTIMED
@given(
    tokens=st.integers(0, 9),
    context=st.integers(0, 100),
    ratio=st.integers(1, 9),
    most=st.integers(0, 12),
)
def test_decode_reads_the_context_for_each_token(
    tokens: int, context: int, ratio: int, most: int
) -> None:
    entries = max(context, 1) // ratio
    want = tokens * (min(entries, most) if most else entries)
    assert entries_read("decode", tokens, context, ratio, most) == want


def test_the_first_check_that_is_not_met_is_raised() -> None:
    require("x request", *positive(a=1, b=2), one_of("kind", "y", ("y", "z")))
    with pytest.raises(RequestError, match="b >= 1") as raised:
        require("x request", *positive(a=1, b=0), one_of("kind", "w", ("y", "z")))
    assert raised.value.who == "x request"
    assert raised.value.found == "0"
    with pytest.raises(RequestError, match="kind one of 'y', 'z'"):
        require("x request", one_of("kind", "w", ("y", "z")))
