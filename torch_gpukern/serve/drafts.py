# SPDX-License-Identifier: BSD-3-Clause
"""Drafts of the next tokens: what followed the same n-gram before."""

from __future__ import annotations


class NGrams:
    """Where the n-grams of a sequence were last seen, for drafts after prompt lookup (Saxena
    2023)."""

    def __init__(self, longest: int = 3, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        # an n-gram, and where the token after it stands
        self.after: dict[tuple[int, ...], int] = {}
        self.known = 0
        self.guess: int | None = None  # what a draft says of the token at `at`
        self.at = self.right = 0

    def streak(self, tokens: list[int]) -> int:
        """How many tokens in a row drafts would have been right up to now; 0 if there is no draft
        of the next token. Call it whenever tokens has grown."""
        if self.guess is not None:
            self.right = self.right + len(tokens) - self.at if tokens[self.at] == self.guess else 0
        draft = self.draft(tokens, 1)
        self.guess, self.at = draft[0] if draft else None, len(tokens)
        return self.right if draft else 0

    def draft(self, tokens: list[int], most: int) -> list[int]:
        """At most so many tokens that followed the longest n-gram at the end of tokens, when it was
        last seen."""
        for end in range(self.known, len(tokens)):  # n-grams that end before the last token
            for n in self.sizes:
                if n <= end:
                    self.after[tuple(tokens[end - n : end])] = end
        self.known = len(tokens)
        for n in self.sizes:
            at = self.after.get(tuple(tokens[len(tokens) - n :])) if n <= len(tokens) else None
            if at is not None:
                return tokens[at : at + most]
        return []
