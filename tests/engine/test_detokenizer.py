from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_engine.detokenizer import Detokenizer


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return [*pieces, data[start:]]


def stream(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(lambda i: pieces[i], stops)
    out = []
    for i in range(len(pieces)):
        out.append(detokenizer.append(i))
        if detokenizer.stopped:
            break
    out.append(detokenizer.finish())
    return out, detokenizer.stopped


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where to cut, found by reading one character at a time."""
    for end in range(1, len(text) + 1):
        matches = [len(s) for s in stops if text[:end].endswith(s)]
        if matches:
            return end - max(matches)
    return None


def test_incomplete_characters_are_held_back() -> None:
    data = "a€😀".encode()
    out, _ = stream([data[i : i + 1] for i in range(len(data))])
    assert out == ["a", "", "", "€", "", "", "", "😀", ""]


def test_bytes_that_are_no_character_become_replacement_characters() -> None:
    out, _ = stream([b"a\xff", b"\xe2\x82", b"b", b"\xf0\x9f"])
    assert "".join(out) == b"a\xff\xe2\x82b\xf0\x9f".decode("utf-8", "replace")
    assert out[-1] == "�"  # the unfinished one, at the end


def test_a_possible_stop_is_held_back_and_released() -> None:
    assert stream([b"ab", b"cE", b"N", b"x", b"END", b"more"], ["END"]) == (
        ["ab", "c", "", "ENx", "", ""],
        True,
    )
    assert stream([b"abEN"], ["END"]) == (["ab", "EN"], False)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ["abc", "b"], "a"),  # b is complete first
        ("abc", ["bc", "abc"], ""),  # both complete at once: the longer one
        ("aab", ["ab"], "a"),
        ("xxy", ["xy"], "x"),
    ],
)
def test_which_of_two_stops_wins(text: str, stops: list[str], expected: str) -> None:
    out, stopped = stream([text.encode()], stops)
    assert (stopped, "".join(out)) == (True, expected)


def test_before_min_tokens_no_stop_is_seen() -> None:
    detokenizer = Detokenizer(lambda i: [b"ST", b"OP", b"STOP", b"x"][i], ["STOP"])
    assert detokenizer.append(0, may_stop=False) == "ST"
    assert detokenizer.append(1, may_stop=True) == "OP"
    assert (detokenizer.append(2), detokenizer.stopped) == ("", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="not empty"):
        Detokenizer(lambda i: b"", [""])


@given(data=st.binary(max_size=40), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_streamed_text_is_the_whole_decoding(data: bytes, sizes: list[int]) -> None:
    out, _ = stream(cut(data, sizes))
    assert "".join(out) == data.decode("utf-8", "replace")


@given(
    text=st.text(alphabet="abé😀", max_size=24),
    sizes=st.lists(st.integers(0, 5), max_size=20),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stops_do_not_depend_on_token_borders(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    out, stopped = stream(cut(text.encode(), sizes), stops)
    expected = first_stop(text, stops)
    assert stopped == (expected is not None)
    assert "".join(out) == (text if expected is None else text[:expected])
