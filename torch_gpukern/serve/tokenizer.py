# SPDX-License-Identifier: BSD-3-Clause
"""Text and tokens of a served model: a tokenizer of transformers, or bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .extras import CHAT, need
from .request import Refused

REPLACEMENT = "\ufffd"  # what bytes decode to that are no character


class Bytes:
    """The tokenizer of models without one: a token below 256 is a byte, others are U+25A1."""

    end_ids: frozenset[int] = frozenset()  # tokens that end an answer

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        box = "\u25a1".encode()
        return b"".join(bytes([t]) if t < 256 else box for t in tokens).decode(errors="replace")

    def piece(self, token: int) -> tuple[str, bytes | None]:
        """The text of one token, and its bytes."""
        text = self.decode([token])
        return text, bytes([token]) if token < 256 else text.encode()

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise Refused("messages", "this model has no tokenizer, so it has no chat template")


class Tokenizer:
    """A tokenizer of transformers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        end = inner.eos_token_id
        self.end_ids = frozenset() if end is None else frozenset([end])
        self.lock = threading.Lock()  # prompts are encoded in threads of their own

    def encode(self, text: str) -> list[int]:
        """With the tokens that stand in front of a text, such as a beginning mark."""
        with self.lock:
            return self.inner.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def piece(self, token: int) -> tuple[str, bytes | None]:
        """The text of one token, and its bytes where they are known: a token may be a part of a
        character."""
        text = self.inner.decode([token], clean_up_tokenization_spaces=False)
        name = self.inner.convert_ids_to_tokens(token) or ""
        if name.startswith("\u2581") and not text.startswith(" "):
            text = " " + text  # sentencepiece drops the space at the beginning of a text
        return text, None if REPLACEMENT in text else text.encode()

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation up to where the assistant speaks, by the tokenizer's own
        template."""
        if not self.inner.chat_template:
            raise Refused(
                "messages",
                "this model's tokenizer has no chat template; use POST /v1/completions, or a model "
                "that was made for conversations",
            )
        (jinja2,) = need(CHAT)
        with self.lock:
            try:
                text = self.inner.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
                raise Refused("messages", f"the chat template refuses: {error}") from None
            return self.inner.encode(text, add_special_tokens=False)  # the template has them
