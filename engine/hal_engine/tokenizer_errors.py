"""Errors of tokenizers and chat templates."""

from __future__ import annotations

from pathlib import Path

from hal.errors import UserError


class TokenizerError(UserError, ValueError):
    """A tokenizer cannot be loaded: file, key, required, found, remedy."""

    def __init__(
        self, file: Path | str, key: str, required: str, found: object, remedy: str = ""
    ) -> None:
        message = f"{file}: {key}: required {required}, found {found}"
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.file = str(file)
        self.key = key


class PromptTooLongError(UserError, ValueError):
    """A text has more tokens than asked for, as can be told without tokenising it."""

    def __init__(self, least_tokens: int, most_tokens: int) -> None:
        super().__init__(
            f"text: at most {most_tokens} tokens are required, it has at least {least_tokens}; "
            "shorten it"
        )
        self.least_tokens = least_tokens


class ChatTemplateError(UserError, ValueError):
    """A chat cannot be rendered: no template, a template that fails or runs away, or messages that
    the model cannot take. The message is fit for the client."""
