"""Text to token ids and back, and chats to prompts, by the `tokenizers` library.

Implements `hal_engine.api.Tokenizer`. Two encoders are kept: one finds special tokens in the text,
the other reads them as plain text; the second is for whatever a user typed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from hal_engine.chat_template import ChatTemplate, HiddenText, SpecialTextGuard, plain_messages
from hal_engine.checkpoint.gguf_header import read_gguf_header
from hal_engine.config import ModelConfig
from hal_engine.strict_json import JsonFileError, read_json_object, read_regular_text
from hal_engine.token_bound import token_bound
from hal_engine.token_bytes import byte_decoder, byte_level_table
from hal_engine.tokenizer_errors import ChatTemplateError, PromptTooLongError, TokenizerError
from hal_engine.tokenizer_gguf import tokenizer_of_metadata

# Below this an encoding takes well under 10 ms, which is not worth another thread's work.
_RELEASING_FROM_CHARS = 2048
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_tokenizer(config: ModelConfig) -> TextTokenizer:
    """The tokenizer beside `config.source`. Raises TokenizerError, or ChatTemplateError for a
    template that does not compile."""
    source = Path(config.source)
    if config.source_format == "gguf":
        return _load_gguf(source, config)
    return _load_folder(source.parent, config)


def _load_gguf(path: Path, config: ModelConfig) -> TextTokenizer:
    metadata = read_gguf_header(path).metadata
    encoder = tokenizer_of_metadata(path, metadata)
    template = metadata.get("tokenizer.chat_template")
    tokens: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = encoder.id_to_token(token_id) if isinstance(token_id, int) else None
        if token is not None:
            tokens[f"{name}_token"] = token
    return TextTokenizer(
        encoder,
        source=path,
        eos_token_ids=config.eos_token_ids,
        chat_template=template if isinstance(template, str) else None,
        template_tokens=tokens,
    )


def _load_folder(folder: Path, config: ModelConfig) -> TextTokenizer:
    file = folder / "tokenizer.json"
    try:
        text = read_regular_text(file)
        settings_file = folder / "tokenizer_config.json"
        settings = read_json_object(settings_file) if settings_file.exists() else {}
        template = _folder_template(folder, settings)
    except JsonFileError as error:
        raise TokenizerError(
            file, "(file)", "a tokenizer", error, "tokenizer.json is needed beside config.json"
        ) from error
    try:
        encoder = Encoder.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever is wrong
        raise TokenizerError(file, "(file)", "a tokenizers file", error) from error
    encoder.no_truncation()
    encoder.no_padding()
    tokens = {
        name: token
        for name in _TEMPLATE_TOKENS
        if (token := _token_text(settings.get(name))) is not None
    }
    own_eos = encoder.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    eos = [*config.eos_token_ids, *([own_eos] if own_eos is not None else [])]
    return TextTokenizer(
        encoder,
        source=file,
        eos_token_ids=eos,
        chat_template=template,
        template_tokens=tokens,
    )


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_regular_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


class TextTokenizer:
    """A tokenizer with a vocabulary, special tokens and perhaps a chat template."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        source: Path,
        eos_token_ids: Sequence[int],
        chat_template: str | None,
        template_tokens: Mapping[str, str],
    ) -> None:
        self._source = source
        self._encoder = encoder
        added = encoder.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        special = [token for token in added.values() if token.special]
        self._special_flags = {token.content: token for token in special}
        self._special_ids = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        serialized = encoder.to_str()
        described = json.loads(serialized)
        self._to_bytes = byte_decoder(described, source)
        normalizer = encoder.normalizer
        self._bound = token_bound(
            described, byte_level_table(), normalizer and normalizer.normalize_str
        )
        self._vocab_size = encoder.get_vocab_size(with_added_tokens=True)
        self._plain, self._anchor = _plain_encoder(serialized)
        self._guard = SpecialTextGuard(self._special_flags)
        self._eos = frozenset(eos_token_ids)
        self._template = ChatTemplate(chat_template, template_tokens) if chat_template else None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of tokens that are control, not text."""
        return frozenset(self._special_ids.values())

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: put the model's begin (and end) tokens around it. parse_special: text
        like `<|im_end|>` becomes that token; otherwise it stays ordinary text. ValueError for a
        lone surrogate, which is no character.
        """
        _check_text(text)
        encoder = self._encoder if parse_special else self._plain
        return _ids(encoder, text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, however it is tokenised; 0 where this
        tokenizer could leave out something of a text. Milliseconds for a megabyte."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`; ids that no token has are left out, broken UTF-8 becomes U+FFFD."""
        known = [token_id for token_id in token_ids if 0 <= token_id < 2**32]
        text: str = self._encoder.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: a special token's name, b"" for an id without token."""
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        token = self._encoder.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return b"" if token is None else self._to_bytes(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a rendered chat; text in messages never becomes a special token.

        Raises ChatTemplateError (no template, a failing one, content that is not text),
        PromptTooLongError (surely more than `most_tokens`; nothing is tokenised then) and
        ValueError (a lone surrogate).
        """
        if self._template is None:
            raise ChatTemplateError(
                f"{self._source}: required a chat template, found none; use /v1/completions"
            )
        hidden = self._guard.begin()
        text = self._template.render(
            {
                "messages": hidden.hide(plain_messages(messages)),
                "tools": hidden.hide(list(tools)) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        _check_text(text)
        if most_tokens is not None:
            least = self.least_tokens(text if hidden.is_empty else hidden.restore(text))
            if least > most_tokens:
                raise PromptTooLongError(least, most_tokens)
        if hidden.is_empty:
            return self.encode(text, add_special_tokens=False, parse_special=True)
        return self._encode_hidden(text, hidden)

    def close(self) -> None:
        """Ends the process that renders the template."""
        if self._template is not None:
            self._template.close()

    def _encode_hidden(self, text: str, hidden: HiddenText) -> list[int]:
        """Special tokens of the template as tokens, all between them as plain text."""
        ids: list[int] = []
        start = 0
        for match in self._guard.whole_matches(text):
            flags = self._special_flags[match[0]]
            before = text[start : match.start()]
            ids += self._encode_piece(before.rstrip() if flags.lstrip else before, hidden, not ids)
            ids.append(self._special_ids[match[0]])
            start = match.end()
            if flags.rstrip:
                start += len(text[start:]) - len(text[start:].lstrip())
        return ids + self._encode_piece(text[start:], hidden, not ids)

    def _encode_piece(self, piece: str, hidden: HiddenText, is_first: bool) -> list[int]:
        if not piece:
            return []
        text = hidden.restore(piece)
        if is_first:
            return _ids(self._plain, text, False)
        # Some tokenizers treat the very start of a text in their own way; the anchor stands there.
        return _ids(self._plain, self._anchor + text, False)[1:]


def _ids(encoder: Encoder, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. Other threads run meanwhile if it is long.

    The library's `encode` holds the interpreter's lock to its end, which is seconds for a megabyte;
    its batches do not.
    """
    ids: list[int]
    if len(text) < _RELEASING_FROM_CHARS:
        ids = encoder.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
    return ids


def _plain_encoder(serialized: str) -> tuple[Encoder, str]:
    """A copy that reads special tokens as text, with one unguessable token of its own."""
    plain = Encoder.from_str(serialized)
    plain.encode_special_tokens = True
    anchor = f"\ue000{secrets.token_hex(16)}\ue001"
    plain.add_tokens([AddedToken(anchor, special=False, normalized=False)])
    return plain, anchor


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at position {error.start}"
        raise ValueError(
            f"text: required Unicode characters, found a lone surrogate {found}"
        ) from (error)
