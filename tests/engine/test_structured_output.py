from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

from hal_engine.api import GrammarSpec, QueueFullError, RequestRefusedError
from hal_engine.structured_output import (
    GrammarCompiler,
    GrammarError,
    GrammarLimits,
    GrammarMatcher,
)

EOS = 256
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer)


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.bitmask(), bitorder="little")).tolist())


def follow(matcher: GrammarMatcher, text: bytes) -> None:
    for token in text:
        matcher.bitmask()
        matcher.advance(token)


def random_walk(matcher: GrammarMatcher, seed: int, most: int = 600) -> bytes:
    """Follows the mask with random choices; prefers to end when it may."""
    rng = np.random.default_rng(seed)
    out = bytearray()
    while not matcher.is_complete:
        tokens = sorted(allowed(matcher))
        assert not set(tokens) & {257, 258, 259}, "a control token inside the text"
        if EOS in tokens and (len(out) > 40 or tokens == [EOS]):
            break
        tokens = [t for t in tokens if t < 256]
        closing = [t for t in tokens if chr(t) in '"}]']
        token = int(rng.choice(closing if closing and rng.random() < 0.3 else tokens))
        matcher.advance(token)
        out.append(token)
        assert len(out) < most
    return bytes(out)


@pytest.mark.parametrize("seed", range(5))
def test_json_schema_walks_are_valid(compiler: GrammarCompiler, seed: int) -> None:
    spec = GrammarSpec(kind="json_schema", text=json.dumps(PERSON))
    person = json.loads(random_walk(compiler.compile_now(spec), seed).decode("utf-8", "replace"))
    assert list(person) == ["name", "age", "tags"]
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"a", "b"}
    assert len(person["tags"]) <= 3


@pytest.mark.parametrize("seed", range(3))
def test_regex_and_choice_and_lark_and_object(compiler: GrammarCompiler, seed: int) -> None:
    regex = GrammarSpec(kind="regex", text=r"[a-c]{2,5}-[0-9]+x")
    assert re.fullmatch(rb"[a-c]{2,5}-[0-9]+x", random_walk(compiler.compile_now(regex), seed))
    choices = ["yes", "nö", 'q"\\\n\x01', "[a-z]+"]
    choice = compiler.compile_now(GrammarSpec(kind="choice", text=json.dumps(choices)))
    assert random_walk(choice, seed).decode() in choices
    lark = compiler.compile_now(GrammarSpec(kind="lark", text='start: "a" start "b" | "c"'))
    assert re.fullmatch(rb"a*cb*", random_walk(lark, seed))
    first = compiler.compile_now(GrammarSpec(kind="json_object", text=""))
    assert allowed(first) == {ord("{")}


def test_the_end_is_allowed_only_where_the_grammar_accepts(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile_now(GrammarSpec(kind="regex", text="ab?"))
    assert allowed(matcher) == {ord("a")}
    matcher.advance(ord("a"))
    assert (allowed(matcher), matcher.is_complete) == ({ord("b"), EOS}, False)
    matcher.advance(ord("b"))
    assert matcher.is_complete


def test_a_token_against_the_grammar_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile_now(GrammarSpec(kind="regex", text="ab"))
    with pytest.raises(GrammarError) as caught:
        matcher.advance(ord("z"))
    # The mask did not allow it: whoever drew it is wrong, not whoever wrote the grammar.
    assert caught.value.fault == "server"


AMBIGUOUS = GrammarSpec(kind="lark", text='start: x\nx: x x | "a" | ""')


def test_a_limit_that_is_met_on_the_way_is_the_fault_of_the_request(byte_tokenizer: Any) -> None:
    limits = GrammarLimits(max_items_in_row=20)
    matcher = GrammarCompiler(byte_tokenizer, limits).compile_now(AMBIGUOUS)
    with pytest.raises(GrammarError, match="max is 20") as caught:
        follow(matcher, b"a" * 30)
    assert caught.value.failure().fault == "request"
    with pytest.raises(GrammarError, match="max is 20"):  # and stays so
        matcher.bitmask()


def test_a_panic_of_the_library_is_not_the_fault_of_the_request() -> None:
    error = GrammarError("panic: index out of bounds\n  0: somewhere\n")
    assert error.failure().fault == "server"
    assert str(error) == "panic: index out of bounds"


@pytest.mark.parametrize(
    ("kind", "text", "match"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a" * 5000, "at most 4096 characters"),
        ("regex", "(" * 100 + "a" + ")" * 100, "at most 64 brackets deep"),
        ("json_schema", "[]", "must be an object, found list"),
        ("json_schema", "{", "must be JSON"),
        ("json_schema", '{"type": "nothing"}', "nothing"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}', "json_schema grammar"),
        ("json_schema", '{"$ref": "#"}', "json_schema grammar"),
        ("json_schema", '{"a":' * 80 + "1" + "}" * 80, "brackets deep"),
        ("json_schema", json.dumps({"description": "x" * 70_000}), "at most 65536"),
        ("choice", "[]", "1 to 1024"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", '"a"', "list of strings"),
        ("choice", json.dumps(["x"] * 2000), "1 to 1024"),
        ("lark", "start: nowhere", "lark grammar"),
        ("regex", "\ud800", "valid Unicode"),
    ],
)
def test_bad_grammars_are_refused(
    compiler: GrammarCompiler, kind: Any, text: str, match: str
) -> None:
    with pytest.raises(RequestRefusedError, match=re.escape(match)):
        compiler.compile_now(GrammarSpec(kind=kind, text=text))


BOMBS = {
    "nested repetition": ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "exponential backtracking": ("regex", "(x+x+)+y"),
    "exponential automaton": ("regex", "[ab]*a[ab]{900}"),
    "counted": ("regex", "((((a{0,255}b){0,255}c){0,255}d){0,255}e){0,255}"),
    "wide": ("regex", "(" + "|".join(f"a{i}.*b{i}" for i in range(400)) + ")"),
    "union of large": ("regex", "|".join(f"(.{{{i}}}a)" for i in range(600, 900))[:4096]),
    "huge array": (
        "json_schema",
        '{"type":"array","minItems":90000,"maxItems":100000,"items":{"type":"number"}}',
    ),
    "many patterns": (
        "json_schema",
        json.dumps({"anyOf": [{"type": "string", "pattern": f"^a{i}.*b$"} for i in range(900)]}),
    ),
    "ambiguous": ("lark", "start: x x x x\nx: x x | " + '"a" | ""'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_or_harmless(compiler: GrammarCompiler, name: str) -> None:
    """A grammar may be refused, or fail while running; it may not hold a thread."""
    kind, text = BOMBS[name]
    start = time.thread_time()
    longest = 0.0
    try:
        matcher = compiler.compile_now(GrammarSpec(kind=kind, text=text))  # type: ignore[arg-type]
        for token in b"a" * 200:
            step = time.thread_time()
            if token not in allowed(matcher):
                token = min(allowed(matcher))
            longest = max(longest, time.thread_time() - step)
            if token >= 256:
                break
            matcher.advance(token)
            if matcher.is_complete:
                break
    except (RequestRefusedError, GrammarError):
        longest = max(longest, 0.0)
    assert time.thread_time() - start < 5
    assert longest < 0.5


def test_compilation_has_a_deadline_and_does_not_hold_the_loop(byte_tokenizer: Any) -> None:
    limits = GrammarLimits(compile_timeout_s=0.02, max_compiling=2)
    compiler = GrammarCompiler(byte_tokenizer, limits)
    release = threading.Event()
    compiler.compile_now = lambda spec: release.wait(60)  # type: ignore[method-assign,assignment,return-value]
    spec = GrammarSpec(kind="regex", text="a")

    async def scenario() -> list[BaseException | Any]:
        tasks = [asyncio.ensure_future(compiler.compile(spec)) for _ in range(3)]
        await asyncio.sleep(0)
        ticks = 0
        while not all(t.done() for t in tasks):
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks > 0
        return await asyncio.gather(*tasks, return_exceptions=True)

    slow, queued, third = asyncio.run(scenario())
    release.set()
    compiler.close()
    assert isinstance(slow, RequestRefusedError)
    assert "must compile within" in str(slow)
    # The others are no worse than any: they may come again.
    for error in (queued, third):
        assert isinstance(error, QueueFullError)
        assert (error.bound, error.what) == (2, "grammars")


def test_a_compilation_that_nobody_waits_for_is_not_begun(byte_tokenizer: Any) -> None:
    compiler = GrammarCompiler(byte_tokenizer)
    release, begun = threading.Event(), []

    def compile_now(spec: GrammarSpec) -> Any:
        begun.append(spec.text)
        return release.wait(60)

    compiler.compile_now = compile_now  # type: ignore[method-assign]

    async def scenario() -> None:
        specs = [GrammarSpec(kind="regex", text=text) for text in "abc"]
        first, second, third = (asyncio.ensure_future(compiler.compile(spec)) for spec in specs)
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        release.set()
        await asyncio.gather(first, third)

    asyncio.run(scenario())
    compiler.close()
    assert begun == ["a", "c"]


def test_a_tokenizer_without_end_is_refused() -> None:
    class NoEnd:
        vocab_size = 256
        eos_token_ids: frozenset[int] = frozenset()
        special_token_ids: frozenset[int] = frozenset()

    compiler = GrammarCompiler(NoEnd())  # type: ignore[arg-type]
    with pytest.raises(RequestRefusedError, match="end-of-text"):
        compiler.compile_now(GrammarSpec(kind="regex", text="a"))
