"""The least number of tokens of a text: never more than there are, and enough to refuse early."""

from __future__ import annotations

import json
import random
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from hal_engine.checkpoint.gguf_header import read_gguf_header
from hal_engine.config import load_model_config
from hal_engine.token_bound import NFC_SHRINKS
from hal_engine.tokenizer import TextTokenizer, load_tokenizer
from hal_engine.tokenizer_errors import PromptTooLongError
from hal_engine.tokenizer_gguf import tokenizer_of_metadata

POOLS = [
    "abcdefghijklmnopqrstuvwxyz",
    "the and with from return function ",
    "0123456789",
    " \t\n\r\u00a0\u3000\u2003\x1c\x85",
    ".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+~`",
    "-=_*# ",
    "äöüßéèñçøåžşğ\u2581",
    "日本語中文한국어ไทยالعربية",
    "😀🎉👍🏽🇩🇪\u200d\ufe0f\U000f0000\U0010fffd",
    "\u1fbe\u0308\u0301\u212a\u212b\u2126A\u030a\u1fef",
    "\x00\x04\x06\x13\x14\x16\x1d\x7f",
]
WORDS = ["<|im_end|>", "<|im_start|>", "<pad>", "<MASK>", "\u1fbe\u0308\u0301", "a b", "a\u2581b"]
SEED = torch.seed() % 2**31


def texts(rng: random.Random, longest: list[str]) -> Iterator[str]:
    """Runs of one kind, mixtures, and the tokens that hold the most."""
    for pool in POOLS:
        yield "".join(rng.choice(pool) for _ in range(rng.randint(1, 400)))
        yield rng.choice(pool) * rng.randint(1, 400)
    for word in [*WORDS, *longest]:
        yield word * rng.randint(1, 30)
        yield (word + rng.choice([" ", "  ", "\n", "\u3000"]) * rng.randint(1, 60)) * 7
    for _ in range(200):
        pieces = []
        for _ in range(rng.randint(1, 20)):
            pool = rng.choice(POOLS)
            pieces.append("".join(rng.choice(pool) for _ in range(rng.randint(1, 30))))
            pieces.append(rng.choice(["", " ", *WORDS, *longest]))
        yield "".join(pieces)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tokenizers.Tokenizer:
    return tokenizer_of_metadata(smollm2_gguf, read_gguf_header(smollm2_gguf).metadata)


def trained(byte_fallback: bool, longest: int = 64) -> tokenizers.Tokenizer:
    """Byte-level, or in characters with a fallback to bytes; with tokens of long runs.

    longest: most characters of a token.
    """
    model = models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    special = ["<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if byte_fallback:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        alphabet = []
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special[:1],
        initial_alphabet=alphabet,
        max_token_length=longest,
    )
    corpus = [
        "\u0390" * 40,
        " " * 40,
        "-" * 50,
        "return function",
        "naïve 日本語 " * 3,
        "a b c " * 9,
    ]
    backend.train_from_iterator(corpus * 9, trainer)
    state = json.loads(backend.to_str())
    for token in special[1:]:
        state["model"]["vocab"][token] = len(state["model"]["vocab"])
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _plain(backend: tokenizers.Tokenizer) -> None:
    """As it is."""


def _strips(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken("<MASK>", lstrip=True, rstrip=True, special=True)])
    backend.add_tokens([AddedToken("<pad>", lstrip=True, rstrip=True, normalized=True)])


def _composes(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()


def _composes_for_added_tokens(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("\u1fbe\u0308\u0301", normalized=True)])


def _replaces(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.add_tokens([AddedToken("a b", normalized=True)])


def _templates(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\s+(?!\S)|\s+|\p{L}+"), behavior="isolated"),
            pre_tokenizers.Punctuation(),
            backend.pre_tokenizer,
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<MASK> $A", special_tokens=[("<MASK>", backend.token_to_id("<MASK>") or 0)]
    )


def test_an_added_token_may_stand_for_a_longer_text_than_its_own() -> None:
    """It is compared with what the normaliser made of the text, and of itself."""
    own = " ".join("abcdefghijkl")
    backend = trained(byte_fallback=True, longest=8)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.add_tokens([AddedToken(own, normalized=True)])
    tokenizer = served(backend)
    for text in (own.replace(" ", "\u2581") * 9, own * 9):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert 1 <= tokenizer.least_tokens(text) <= len(ids) <= 10


Change = Callable[[tokenizers.Tokenizer], None]


def served(backend: tokenizers.Tokenizer) -> TextTokenizer:
    backend.decoder = tokenizers.decoders.ByteLevel()
    return TextTokenizer(
        backend, source=Path("."), eos_token_ids=[0], chat_template=None, template_tokens={}
    )


@pytest.mark.parametrize(
    "change",
    [_plain, _strips, _composes, _composes_for_added_tokens, _replaces, _templates],
)
@pytest.mark.parametrize("kind", ["smollm2", "byte-level", "byte fallback"])
def test_no_text_has_fewer_tokens(
    kind: str, change: Change, smollm2_gguf: Path, smollm2: tokenizers.Tokenizer
) -> None:
    if kind == "smollm2":
        backend = tokenizers.Tokenizer.from_str(smollm2.to_str())
    else:
        backend = trained(kind == "byte fallback")
    if change is _templates:
        _strips(backend)
    change(backend)
    tokenizer = served(backend)
    vocab = backend.get_vocab()
    by_length = sorted(vocab, key=lambda token: len(backend.decode([vocab[token]])))
    longest = [backend.decode([vocab[token]]) for token in by_length[-8:]]
    positive = 0
    for text in texts(random.Random(SEED), longest):
        least = tokenizer.least_tokens(text)
        positive += least > 1
        for parse_special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
            assert least <= len(ids), (SEED, kind, change.__name__, text)
    # Where bytes are unknown and texts are composed first, only ASCII has a bound.
    is_ascii_only = kind == "smollm2" and "composes" in change.__name__
    assert positive > (20 if is_ascii_only else 100)


def _lowers(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def _drops_spaces(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer]
    )


def _removes(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior="removed"), backend.pre_tokenizer]
    )


def _shortens(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Replace("aaaa", "a")


def _replaces_by_pattern(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Replace(tokenizers.Regex(" +"), "\u2581")


@pytest.mark.parametrize(
    "change", [_lowers, _drops_spaces, _removes, _shortens, _replaces_by_pattern]
)
def test_a_tokenizer_that_can_lose_something_has_no_bound(change: Change) -> None:
    backend = trained(byte_fallback=False)
    change(backend)
    assert served(backend).least_tokens("a" * 10**6) == 0


def test_characters_that_are_unknown_have_no_bound() -> None:
    """Any number of them is one token, or none at all."""
    backend = trained(byte_fallback=True)
    state = json.loads(backend.to_str())
    del state["model"]["vocab"]["<0x07>"]
    assert served(tokenizers.Tokenizer.from_str(json.dumps(state))).least_tokens("\x07" * 999) == 0
    state["model"] = {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}
    assert served(tokenizers.Tokenizer.from_str(json.dumps(state))).least_tokens("a" * 999) == 0


@cache
def _longest_spelling(decomposed: str) -> int:
    """Most bytes of a character that stands for one of a canonical decomposition."""
    return _singletons().get(decomposed, 0) or len(decomposed.encode())


@cache
def _singletons() -> dict[str, int]:
    most: dict[str, int] = {}
    for character in _characters():
        whole = unicodedata.normalize("NFD", character)
        if len(whole) == 1:
            most[whole] = max(most.get(whole, 0), len(character.encode()))
    return most


def _characters() -> list[str]:
    return [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]


def test_composing_shortens_no_text_by_more_than_is_assumed() -> None:
    """For each character: the longest text that is brought into its form, by all of Unicode."""
    worst = 0.0
    for character in _characters():
        parts = unicodedata.normalize("NFD", character)
        longest = sum(map(_longest_spelling, parts))
        assert len(character.encode()) <= longest  # so no other spelling of its parts is longer
        if unicodedata.is_normalized("NFC", character):
            worst = max(worst, longest / len(character.encode()))
    assert 3 <= worst <= NFC_SHRINKS
    text = "\u1fbe\u0308\u0301"
    assert len(text.encode()) == 3.5 * len(unicodedata.normalize("NFC", text).encode())


def prose(rng: random.Random, num_chars: int) -> str:
    words = ["".join(rng.choices(POOLS[0], k=rng.randint(2, 9))) for _ in range(500)]
    return " ".join(rng.choices(words, k=num_chars // 4))[:num_chars]


def test_megabytes_are_told_to_be_too_long_at_once(smollm2_gguf: Path) -> None:
    tokenizer = load_tokenizer(load_model_config(smollm2_gguf))
    text = prose(random.Random(SEED), 4 * 2**20)
    try:
        began = time.perf_counter()
        least = tokenizer.least_tokens(text)
        assert time.perf_counter() - began < 0.5  # tokenising takes ten times that
        assert least > 100_000
        encoder = tokenizer._encoder
        tokenizer._encoder = tokenizer._plain = _Untouched()  # type: ignore[assignment]
        message: dict[str, Any] = {"role": "user", "content": text[: 2**20] + "<|im_end|>"}
        with pytest.raises(PromptTooLongError) as raised:
            tokenizer.render_chat([message], most_tokens=8191)
        assert 8191 < raised.value.least_tokens <= len(encoder.encode(message["content"]).ids) + 40
    finally:
        tokenizer.close()


class _Untouched:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the text was tokenised: {name}")
