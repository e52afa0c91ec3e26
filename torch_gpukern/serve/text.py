# SPDX-License-Identifier: BSD-3-Clause
"""Text from tokens as they come: whole characters only, and nothing that may still become a stop
string."""

from __future__ import annotations

from collections.abc import Sequence


class Stream:
    """The text of one answer, part by part. How its tokens come, one by one or several a step,
    makes no difference.

    Args:
        tokenizer: has `decode`.
        stop: strings that end the text, which is then without them. The one that begins first
            counts.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.tokens: list[int] = []  # up to the one that completed a stop string
        self.first = 0  # tokens before it are text that is known
        self.known = 0  # characters of the text of tokens[first:] that were taken
        self.length = 0  # characters of all tokens that were taken
        self.withheld = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, new: Sequence[int], last: bool = False) -> str:
        """The text that is certain now. `last`: no token follows."""
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
        """The characters whose bytes are all there and that were not taken yet."""
        text = self.tokenizer.decode(self.tokens[self.first :])
        # Bytes of an incomplete character decode to U+FFFD. Byte-level tokenizers make one of up to
        # three bytes. Those that fall back to bytes make one of each byte, whole characters before
        # the incomplete one included.
        whole = len(text) if last else len(text.rstrip("\ufffd"))
        fresh = text[self.known : whole]
        self.length += len(fresh)
        self.known = max(self.known, whole)
        if self.known == len(text) and len(self.tokens) - self.first > 32:
            self._forget(text)
        return fresh

    def _forget(self, text: str) -> None:
        """Decodes fewer tokens from now on: some 8, since a word's tokens decode differently
        without those before."""
        for first in range(len(self.tokens) - 8, self.first, -1):
            rest = self.tokenizer.decode(self.tokens[first:])
            # no character is cut
            if rest and text.endswith(rest) and not rest.startswith("\ufffd"):
                self.first, self.known = first, len(rest)
                return

    def _until_stop(self, fresh: str, last: bool) -> str:
        text = self.withheld + fresh
        ends = [at for at in map(text.find, self.stop) if at >= 0]
        # the longest end of the text that may become a stop string
        open_ = (
            0
            if last
            else max(
                (n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0
            )
        )
        if ends and min(ends) <= len(text) - open_:
            self.stopped, self.withheld = True, ""
            return text[: min(ends)]
        self.withheld = text[len(text) - open_ :]
        return text[: len(text) - open_]
