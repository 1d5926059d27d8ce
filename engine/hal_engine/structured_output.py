"""Output that must follow a grammar: JSON schema, any JSON, regular expression, choice, Lark.

The parser is llguidance (https://github.com/guidance-ai/llguidance); this file feeds it a
vocabulary, bounds what a stranger's grammar may cost, and turns its errors into refusals. Limits,
in this order: length and nesting of the text before anything parses it, the library's own limits
on grammar size and lexer work, and a deadline for the compilation and its first token mask.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hal_engine.api import (
    Failure,
    Fault,
    GrammarSpec,
    QueueFullError,
    RequestRefusedError,
    Tokenizer,
)
from hal_engine.event_streams import call_in_loop

if TYPE_CHECKING:
    import llguidance


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What one grammar may cost."""

    max_text_chars: int = 65_536
    max_regex_chars: int = 4_096
    max_nesting: int = 64
    max_choices: int = 1_024
    compile_timeout_s: float = 5.0
    max_compiling: int = 16  # compilations in progress or waiting; more are refused
    max_items_in_row: int = 2_000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_lexer_states: int = 50_000
    max_grammar_size: int = 100_000


# How the library's messages begin where the grammar is not to blame: it broke inside, or refuses
# a token that its own mask allowed.
_LIBRARY_FAILED = re.compile(
    r"panic:|Parser Error: token .* doesn't satisfy the grammar", re.DOTALL
)


class GrammarError(Exception):
    """The grammar of a running request ended in an error.

    `fault` is "request" for a grammar that met a limit or leaves no way on, "server" for a defect
    of the library.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_in_short(message))
        self.fault: Fault = "server" if _LIBRARY_FAILED.match(message) else "request"

    def failure(self) -> Failure:
        return Failure(self.fault, f"structured output: {self}")


class GrammarMatcher:
    """The state of one sequence in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def bitmask(self) -> npt.NDArray[np.uint8]:
        """Tokens that may come next: uint8, bit i%8 (lowest first) of byte i//8 is token i.

        Raises GrammarError when the grammar met one of its limits or allows no token.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._raise_error()
        return mask

    def advance(self, token_id: int) -> None:
        """Takes the drawn token. Raises GrammarError if the grammar does not allow it."""
        self._matcher.consume_token(token_id)
        self._raise_error()

    @property
    def is_complete(self) -> bool:
        """Nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())


def _in_short(message: str) -> str:
    """The first line, and the one that says what is wrong with a regular expression."""
    first, *others = message.strip().split("\n")
    reasons = [line for line in others if line.startswith("error:")]
    return " ".join([first[:300], *reasons])[:500]


class _Vocabulary:
    """The vocabulary in the shape that llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = sorted(tokenizer.eos_token_ids)
        if not eos:
            raise RequestRefusedError(
                "structured output: the tokenizer must name an end-of-text token, it names none"
            )
        self.eos_token_id = eos[0]
        self.bos_token_id: int | None = None
        self.special_token_ids = sorted(tokenizer.special_token_ids | tokenizer.eos_token_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


class GrammarCompiler:
    """Compiles grammars on a thread of its own, so that neither the engine nor the server waits.

    The vocabulary is read on the first use: it costs a second that most servers never need.
    """

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits | None = None) -> None:
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._ll_tokenizer: llguidance.LLTokenizer | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hal-grammar")
        self._count_lock = threading.Lock()  # several event loops and the thread
        self._num_compiling = 0

    async def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Raises RequestRefusedError: bad grammar, over a limit. QueueFullError: too many at once,
        or those before it took too long."""
        check_before_parsing(spec, self.limits)
        timeout_s = self.limits.compile_timeout_s * (1 if self._ll_tokenizer is not None else 10)
        full = QueueFullError(
            self._num_compiling, self.limits.max_compiling, timeout_s, what="grammars"
        )
        if self._num_compiling >= self.limits.max_compiling:
            raise full
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def work() -> GrammarMatcher:
            call_in_loop(loop, started.set)
            return self.compile_now(spec)

        future = self._submit(work)
        try:
            try:
                await asyncio.wait_for(started.wait(), timeout_s)
            except TimeoutError:
                raise full from None
            # The deadline does not stop the thread: the library's own limits do, a little later.
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            raise RequestRefusedError(
                f"structured output: a {spec.kind} grammar must compile within {timeout_s:g} s and "
                "this one did not; simplify it"
            ) from None
        finally:
            future.cancel()  # if nobody waits for it and it has not begun

    def _submit(self, work: Callable[[], GrammarMatcher]) -> Future[GrammarMatcher]:
        with self._count_lock:
            self._num_compiling += 1
        future = self._executor.submit(work)
        future.add_done_callback(self._compiled)
        return future

    def _compiled(self, _: object) -> None:
        with self._count_lock:
            self._num_compiling -= 1

    def compile_now(self, spec: GrammarSpec) -> GrammarMatcher:
        """Compiles on the calling thread. Raises RequestRefusedError."""
        import llguidance

        check_before_parsing(spec, self.limits)
        if self._ll_tokenizer is None:
            vocabulary = _Vocabulary(self._tokenizer)
            self._ll_tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(vocabulary),
                n_vocab=self._tokenizer.vocab_size,
                eos_token=sorted(self._tokenizer.eos_token_ids),
            )
        limits = self.limits
        matcher = llguidance.LLMatcher(
            self._ll_tokenizer,
            _grammar_text(spec),
            log_level=0,
            limits=llguidance.LLParserLimits(
                max_items_in_row=limits.max_items_in_row,
                initial_lexer_fuel=limits.initial_lexer_fuel,
                step_lexer_fuel=limits.step_lexer_fuel,
                step_max_items=limits.step_max_items,
                max_lexer_states=limits.max_lexer_states,
                max_grammar_size=limits.max_grammar_size,
                verbose_errors=False,
            ),
        )
        compiled = GrammarMatcher(matcher)
        try:
            compiled._raise_error()
            compiled.bitmask()  # the library works lazily: a bomb goes off here, not in the engine
        except GrammarError as error:
            raise RequestRefusedError(f"structured output: {spec.kind} grammar: {error}") from error
        return compiled

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _grammar_text(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form."""
    import llguidance

    from_schema = llguidance.LLMatcher.grammar_from_json_schema
    try:
        if spec.kind == "json_schema":
            return str(from_schema(spec.text))
        if spec.kind == "json_object":
            return str(from_schema('{"type": "object"}'))
        if spec.kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(spec.text))
        if spec.kind == "choice":
            # As an expression, with every character by its code point: nothing left to escape.
            words = ("".join(f"\\x{{{ord(c):x}}}" for c in w) for w in _choices(spec.text))
            return str(llguidance.LLMatcher.grammar_from_regex("|".join(words)))
        return str(llguidance.LLMatcher.grammar_from_lark(spec.text))
    except ValueError as error:
        raise RequestRefusedError(
            f"structured output: {spec.kind} grammar: {_in_short(str(error))}"
        ) from error


def check_before_parsing(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Refuses by length and nesting what no parser should see. Raises RequestRefusedError."""
    what = f"structured output: a {spec.kind} grammar"
    most = limits.max_regex_chars if spec.kind == "regex" else limits.max_text_chars
    if len(spec.text) > most:
        raise RequestRefusedError(
            f"{what} may have at most {most} characters, found {len(spec.text)}"
        )
    depth = _nesting(spec.text)
    if depth > limits.max_nesting:
        raise RequestRefusedError(
            f"{what} may nest at most {limits.max_nesting} brackets deep, found {depth}"
        )
    try:
        spec.text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefusedError(f"{what} must be valid Unicode: {error.reason}") from error
    if spec.kind == "json_schema":
        _check_schema(spec.text, what)
    elif spec.kind == "choice":
        choices = _choices(spec.text)
        if not 1 <= len(choices) <= limits.max_choices:
            raise RequestRefusedError(
                f"{what} needs 1 to {limits.max_choices} strings, found {len(choices)}"
            )


def _nesting(text: str) -> int:
    """The deepest nesting of brackets. Quotes are not looked at: an upper bound is enough."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}" and depth:
            depth -= 1
    return deepest


def _check_schema(text: str, what: str) -> None:
    try:
        schema: Any = json.loads(text)
    except ValueError as error:
        raise RequestRefusedError(f"{what} must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestRefusedError(f"{what} must be an object, found {type(schema).__name__}")


def _choices(text: str) -> Sequence[str]:
    try:
        choices: Any = json.loads(text)
    except ValueError as error:
        raise RequestRefusedError(
            f"structured output: choice must be a JSON list of strings: {error}"
        ) from error
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise RequestRefusedError(
            "structured output: choice must be a JSON list of strings that are not empty"
        )
    return choices
