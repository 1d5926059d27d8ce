"""Shape classes: which calls share one, and how one is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_kernels.tuning.shapes import parse_shape, rows_class, shape_class

NAMES = {"size_names": ("k", "n"), "forms": ("plain", "gated"), "dtypes": ("bfloat16", "float16")}


@given(st.integers(1, 8192))
def test_a_class_of_rows_holds_them_and_less_than_twice_as_many(rows: int) -> None:
    found = rows_class(rows)
    assert rows <= found
    assert found == 16 or found < 2 * rows
    assert rows_class(found) == found


def test_very_many_rows_are_one_class() -> None:
    assert rows_class(100_000) == rows_class(8192) == 8192


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 20_000))
def test_a_class_is_read_as_it_is_written(n: int, k: int, rows: int) -> None:
    shape = shape_class("float16", "gated", rows, {"n": n, "k": k})
    assert parse_shape(str(shape), **NAMES) == shape  # type: ignore[arg-type]


def test_the_first_form_and_dtype_need_not_be_written() -> None:
    shape = parse_shape("n=64, k=128, rows=3", **NAMES)  # type: ignore[arg-type]
    assert str(shape) == "dtype=bfloat16,form=plain,k=128,n=64,rows=16"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n=64,k=128", "rows too"),
        ("n=64,rows=1", "k too"),
        ("n=64,k=128,rows=0", "rows as a number"),
        ("n=64,k=-1,rows=1", "k as a number"),
        ("n=64,k=128,rows=" + "9" * 400, "rows as a number"),
        ("n=64,n=65,k=128,rows=1", "each once"),
        ("n=64,k=128,rows=1,m=2", "found m"),
        ("n=64,k=128,rows=1,form=wide", "plain, gated"),
        ("n=64,k=128,rows=1,dtype=int3", "bfloat16, float16"),
        ("", "NAME=VALUE"),
        ("n64", "NAME=VALUE"),
        ("n=६४,k=128,rows=1", "NAME=VALUE"),
    ],
)
def test_a_text_that_is_none_says_why(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_shape(text, **NAMES)  # type: ignore[arg-type]
