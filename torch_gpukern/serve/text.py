# SPDX-License-Identifier: BSD-3-Clause
"""Decodes the tokens of an answer as they arrive. Text is returned when its characters are complete and
when it can no longer become part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence


class Stream:
    """The text of one answer, part by part. It does not depend on how many tokens arrive at once.

    Args:
        tokenizer: has `decode`.
        stop: strings that end the text. They are not part of it. If several occur, the one that begins
            first counts.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.tokens: list[int] = []  # up to the one that completed a stop string
        self.first = 0  # tokens before this one need no decoding any more
        self.known = 0  # complete characters in the text of tokens[first:]
        self.length = 0  # complete characters in the text of all tokens
        self.withheld = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, new: Sequence[int], last: bool = False) -> str:
        """Adds tokens and returns the text that is certain now. `last`: no token follows."""
        parts = []
        for token in new:
            if self.stopped:
                break
            self.tokens.append(token)
            parts.append(self._until_stop(self._fresh(False), False))
        if last and not self.stopped:
            parts.append(self._until_stop(self._fresh(True), True))
        return "".join(parts)

    def _fresh(self, last: bool) -> str:
        """The characters that have become complete since the last call."""
        text = self.tokenizer.decode(self.tokens[self.first :])
        # The bytes of an incomplete character decode to U+FFFD. Byte-level tokenizers make a single
        # U+FFFD of them. Tokenizers that fall back to bytes make one of each byte, even of the bytes of
        # complete characters before the incomplete one.
        whole = len(text) if last else len(text.rstrip("\ufffd"))
        fresh = text[self.known : whole]
        self.length += len(fresh)
        self.known = max(self.known, whole)
        if self.known == len(text) and len(self.tokens) - self.first > 32:
            self._forget(text)
        return fresh

    def _forget(self, text: str) -> None:
        """Moves `first` to about the eighth last token, so that less text is decoded from now on. The
        tokens in between are kept because a word's tokens decode differently without those before."""
        for first in range(len(self.tokens) - 8, self.first, -1):
            rest = self.tokenizer.decode(self.tokens[first:])
            if rest and text.endswith(rest) and not rest.startswith("\ufffd"):
                self.first, self.known = first, len(rest)
                return

    def _until_stop(self, fresh: str, last: bool) -> str:
        """The text up to a stop string, without an end that may still become one."""
        text = self.withheld + fresh
        ends = [at for at in map(text.find, self.stop) if at >= 0]
        open_ = 0  # the length of the longest end of the text that may become a stop string
        if not last:
            lengths = (n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n]))
            open_ = max(lengths, default=0)
        if ends and min(ends) <= len(text) - open_:
            self.stopped, self.withheld = True, ""
            return text[: min(ends)]
        self.withheld = text[len(text) - open_ :]
        return text[: len(text) - open_]
