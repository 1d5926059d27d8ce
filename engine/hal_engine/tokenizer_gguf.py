"""A `tokenizers` tokenizer from the metadata of a GGUF file (byte-level BPE, "gpt2").

The file names its pre-tokenizer only; what a name means is a fact of llama.cpp
(src/llama-vocab.cpp). A name that is not known here is refused: a wrong split gives other tokens
for some texts, without any sign of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from hal_engine.tokenizer_errors import TokenizerError

# Where the pieces of text end within which bytes may merge, as the models' authors publish it.
_GPT4_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class _Split:
    """How one named pre-tokenizer splits, and what else the name implies in llama.cpp."""

    pattern: str | None = None  # None: GPT-2's own, built into ByteLevel
    splits_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_SPLITS: dict[str, _Split] = {
    "gpt-2": _Split(),
    "smollm": _Split(splits_digits=True),
    "qwen2": _Split(_GPT4_LIKE.replace("{DIGITS}", "")),
    "llama-bpe": _Split(
        _GPT4_LIKE.replace("{DIGITS}", "{1,3}"), ignores_merges=True, adds_bos=True
    ),
}


def tokenizer_of_metadata(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises TokenizerError for a tokenizer kind or a pre-tokenizer that is not known, and for
    damaged lists of tokens and merges."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            path, "tokenizer.ggml.model", "'gpt2' (byte-level BPE)", repr(kind), _FOLDER_REMEDY
        )
    split = _split(path, metadata)
    tokens, types = _tokens(path, metadata)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(path, metadata, set(tokens)),
        ignore_merges=split.ignores_merges,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    _add_post_processor(tokenizer, path, metadata, split, tokens)
    return tokenizer


_FOLDER_REMEDY = "use the Hugging Face folder of this model"


def _split(path: Path, metadata: Mapping[str, Any]) -> _Split:
    key = "tokenizer.ggml.pre"
    name = metadata.get(key)
    if isinstance(name, str) and name in _SPLITS:
        return _SPLITS[name]
    nearest = difflib.get_close_matches(str(name), _SPLITS, n=1)
    remedy = f"the nearest is {nearest[0]!r}; {_FOLDER_REMEDY}" if nearest else _FOLDER_REMEDY
    required = f"one of {', '.join(_SPLITS)}"
    raise TokenizerError(path, key, required, "nothing" if name is None else repr(name), remedy)


def _tokens(path: Path, metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens, types = _list(path, metadata, "tokens", str), metadata.get("tokenizer.ggml.token_type")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        repeated = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise TokenizerError(
            path, "tokenizer.ggml.tokens", "each token once", f"{repeated!r} twice"
        )
    if types is None:
        return tokens, [_NORMAL] * len(tokens)
    types = _list(path, metadata, "token_type", int)
    if len(types) != len(tokens):
        found = f"{len(types)} for {len(tokens)} tokens"
        raise TokenizerError(path, "tokenizer.ggml.token_type", "one type a token", found)
    return tokens, types


def _list(path: Path, metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        found = "nothing" if values is None else type(values).__name__
        raise TokenizerError(path, key, f"a list of {kind.__name__}", found)
    return values


def _merges(path: Path, metadata: Mapping[str, Any], vocab: set[str]) -> list[tuple[str, str]]:
    merges = []
    for line in _list(path, metadata, "merges", str):
        left, separator, right = line.partition(" ")
        if not separator or left not in vocab or right not in vocab or left + right not in vocab:
            required = "pairs of tokens whose join is a token"
            raise TokenizerError(path, "tokenizer.ggml.merges", required, repr(line[:80]))
        merges.append((left, right))
    return merges


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = []
    if split.splits_digits:  # before the byte level, or numbers outside ASCII split otherwise
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    own_regex = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex))
    sequence: pre_tokenizers.PreTokenizer = pre_tokenizers.Sequence(steps)
    return sequence


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones match in any text but are ordinary text."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    own = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])


def _add_post_processor(
    tokenizer: Tokenizer,
    path: Path,
    metadata: Mapping[str, Any],
    split: _Split,
    tokens: list[str],
) -> None:
    """Begin and end tokens around a text, where the file (or its pre-tokenizer's name) says so."""
    parts = ["$A"]
    special: list[tuple[str, int]] = []
    for name, default in (("bos", split.adds_bos), ("eos", False)):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = metadata.get(key)
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise TokenizerError(path, key, f"an id in 0..{len(tokens) - 1}", repr(token_id))
        special.append((tokens[token_id], token_id))
        parts = [tokens[token_id], *parts] if name == "bos" else [*parts, tokens[token_id]]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=special
        )
