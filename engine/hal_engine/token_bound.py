"""The least number of tokens that a text can have, known without tokenising it.

A text of megabytes takes seconds to tokenise, and is refused for its length all the same. Where no
part of a tokenizer loses anything of a text, its tokens hold all bytes of the text, and none holds
more than the longest does: so many tokens it has at least. The same is true of its letters alone,
which says more: the longest tokens of a vocabulary are runs of spaces, dashes and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# NFC makes a string shorter by at most 3.5: ι as U+1FBE with two marks is 7 bytes, U+0390 has 2.
NFC_SHRINKS = 4
_ASCII_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NO_LETTERS = bytes(byte for byte in range(128) if byte not in _ASCII_LETTERS)
_KEEPING = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})

Counts = tuple[int, int]  # bytes in all, and those of letters


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """What the longest tokens of a vocabulary hold. For a tokenizer that loses nothing.

    unknown: bytes that no token has, which are left out. composes: the text is brought into the
    form NFC first. strips: a token may take any amount of white space around it with it.
    """

    most_bytes: int
    most_letters: int
    unknown: bytes
    composes: bool
    strips: bool

    def least_tokens(self, text: str) -> int:
        """No tokenisation of `text` is shorter. Takes milliseconds for a megabyte."""
        if self.strips:
            text = "".join(text.split())
        data = text.encode("utf-8", "surrogatepass")
        if self.composes and not text.isascii():
            return 0 if self.unknown else -(-len(data) // (NFC_SHRINKS * self.most_bytes))
        data = data.translate(None, self.unknown)
        letters = len(data.translate(None, _NO_LETTERS))
        return max(-(-len(data) // self.most_bytes), -(-letters // self.most_letters))


def token_bound(
    tokenizer: Mapping[str, Any],
    byte_level: Mapping[str, int],
    normalize: Callable[[str], str] | None,
) -> TokenBound | None:
    """The bound for what a tokenizer.json says; None where a text could lose something on the way.

    byte_level: the alphabet in which byte-level tokens are spelled. normalize: the tokenizer's own,
    if it has one.
    """
    steps = _steps(tokenizer.get("normalizer"), "normalizers")
    splits = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    is_byte_level = any(step.get("type") == "ByteLevel" for step in splits)
    unknown = _unknown_bytes(tokenizer["model"], byte_level if is_byte_level else None)
    if not (
        unknown is not None
        and all(map(_normalizer_keeps, steps))
        and all(map(_pre_tokenizer_keeps, splits))
        and all(map(_post_processor_keeps, _steps(tokenizer.get("post_processor"), "processors")))
        and tokenizer.get("truncation") is None
    ):
        return None
    added = tokenizer.get("added_tokens") or []
    texts = [token["content"] for token in added]
    if normalize is not None:
        texts += [normalize(text) for text in texts]
    alphabet = byte_level if is_byte_level else {}
    counts = _largest(_bytes_of(token, alphabet) for token in tokenizer["model"]["vocab"])
    most = [max(pair) for pair in zip(counts, _largest(map(str.encode, texts)), strict=True)]
    return TokenBound(
        most_bytes=max(1, most[0]),
        most_letters=max(1, most[1]),
        unknown=unknown,
        composes=any(step.get("type") == "NFC" for step in steps),
        strips=any(token.get("lstrip") or token.get("rstrip") for token in added),
    )


def _counts(data: bytes) -> Counts:
    return len(data), len(data.translate(None, _NO_LETTERS))


def _largest(tokens: Iterable[bytes]) -> Counts:
    most_bytes = most_letters = 0
    for token in tokens:
        if len(token) > most_letters:  # else neither can be more
            num_bytes, letters = _counts(token)
            most_bytes, most_letters = max(most_bytes, num_bytes), max(most_letters, letters)
    return most_bytes, most_letters


def _bytes_of(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Without an alphabet as it is spelled: a visible space is three bytes of the text, too."""
    if alphabet and all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")


def _steps(part: Any, key: str) -> list[Mapping[str, Any]]:
    """A part's steps in order: of a sequence, those in it."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part.get(key, ()) for step in _steps(inner, key)]


def _unknown_bytes(model: Mapping[str, Any], alphabet: Mapping[str, int] | None) -> bytes | None:
    """Bytes that vanish, or many of which are one token. None if whole characters may do so."""
    if model.get("type") != "BPE":
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocab = model["vocab"]
    if alphabet is not None:
        return bytes(byte for character, byte in alphabet.items() if character not in vocab)
    falls_back = model.get("byte_fallback") and all(f"<0x{b:02X}>" in vocab for b in range(256))
    return b"" if falls_back else None


def _normalizer_keeps(step: Mapping[str, Any]) -> bool:
    match step.get("type"):
        case "NFC" | "Prepend":
            return True
        case "Replace":
            old = (step.get("pattern") or {}).get("String")
            return isinstance(old, str) and _is_no_less(step.get("content"), old)
    return False


def _pre_tokenizer_keeps(step: Mapping[str, Any]) -> bool:
    match step.get("type"):
        case "ByteLevel" | "Digits":
            return True
        case "Metaspace":
            return _is_no_less(step.get("replacement"), " ")
        case "Split" | "Punctuation":
            return step.get("behavior") in _KEEPING
    return False


def _post_processor_keeps(step: Mapping[str, Any]) -> bool:
    """Whether it only adds tokens to those of the text."""
    match step.get("type"):
        case "ByteLevel":
            return True
        case "TemplateProcessing":
            pieces = step.get("single", ())
            return any(piece.get("Sequence", {}).get("id") == "A" for piece in pieces)
    return False


def _is_no_less(new: Any, old: str) -> bool:
    if not isinstance(new, str):
        return False
    return all(a >= b for a, b in zip(_counts(new.encode()), _counts(old.encode()), strict=True))
