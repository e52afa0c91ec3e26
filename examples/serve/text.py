# SPDX-License-Identifier: BSD-3-Clause
"""Text from tokens as they come: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence


class Bytes:
    """The tokenizer of models without one: a token below 256 is a byte, others are U+25A1."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        box = "\u25a1".encode()
        return b"".join(bytes([t]) if t < 256 else box for t in tokens).decode(errors="replace")


class Stream:
    """The text of one answer, part by part.

    Args:
        tokenizer: has `decode`.
        stop: strings that end the text, which is then without them.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.tokens: list[int] = []
        self.first = 0  # tokens before it are text that is known
        self.taken = 0  # tokens whose text was taken
        self.known = 0  # characters of the text of tokens[first:] that were taken
        self.held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, new: Sequence[int], last: bool = False) -> str:
        """The text that is certain now. `last`: no token follows."""
        if self.stopped:
            return ""
        self.tokens += new
        text = self.tokenizer.decode(self.tokens[self.first :])
        if text.endswith("\ufffd") and not last and len(self.tokens) - self.taken < 8:
            fresh = ""  # a character of which bytes are missing
        else:
            fresh = text[self.known :]
            self.known, self.taken = len(text), len(self.tokens)
            if len(self.tokens) - self.first > 32:  # a word's tokens decode differently without those before
                self.first = len(self.tokens) - 8
                self.known = len(self.tokenizer.decode(self.tokens[self.first :]))
        text = self.held + fresh
        ends = [at for at in map(text.find, self.stop) if at >= 0]
        if ends:
            self.stopped, self.held = True, ""
            return text[: min(ends)]
        keep = 0 if last else max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]
