# SPDX-License-Identifier: BSD-3-Clause
"""Drafts of the next tokens: what followed the same n-gram before.

A draft is a tree. Its first branch is what followed the newest match. Further branches are what
followed earlier matches, where that differs. With one branch a draft is a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

# The share of guesses that are right: before the first one, and how much the newest one counts.
RIGHT, NEWEST = 0.5, 0.125
MOST_EXPECTED = 16  # tokens of a draft that may be expected to be right
MOST_MATCHES = 16  # earlier places of an n-gram that are read for further branches


@dataclass
class Draft:
    """Drafted tokens.

    Attributes:
        parents: for each token the one before it, as its number in `tokens`; -1 is the request's
            newest token. A parent comes before its children, and the first branch before the
            others.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @classmethod
    def chain(cls, tokens: list[int]) -> Draft:
        return cls(tokens, list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def branches(self) -> bool:
        """Whether it is no chain."""
        return any(parent != i - 1 for i, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        """How many tokens each is behind the request's newest token."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 + (found[parent] if parent >= 0 else 0))
        return found

    def paths(self) -> list[list[int]]:
        """The drafted tokens up to each one, itself included."""
        found: list[list[int]] = []
        for parent, token in zip(self.parents, self.tokens, strict=True):
            found.append([*(found[parent] if parent >= 0 else ()), token])
        return found

    def right(self, drawn: Sequence[int]) -> list[int]:
        """The numbers of the drafted tokens that are right, from the first on. drawn: the token
        that was drawn behind the request's newest token, then those behind each drafted token."""
        child = {(p, t): i for i, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True))}
        path, at = [], -1
        while (at := child.get((at, drawn[at + 1]), -1)) >= 0:
            path.append(at)
        return path


class Trie:
    """Continuations of one text, merged where they begin alike. At most `most` branches."""

    def __init__(self, most: int) -> None:
        self.most, self.leaves = most, 0
        self.tokens: list[int] = []
        self.children: list[dict[int, int]] = [{}]  # of the root, then of each token

    def add(self, continuation: Sequence[int], room: int) -> None:
        """Adds the continuation, with at most `room` new tokens, if it is no branch too many."""
        at, known = 0, 0
        for token in continuation:
            if token not in self.children[at]:
                break
            at, known = self.children[at][token], known + 1
        new = continuation[known : known + room]
        if not new:
            return
        if at == 0 or self.children[at]:  # else it makes a branch longer
            if self.leaves == self.most:
                return
            self.leaves += 1
        for token in new:
            self.tokens.append(token)
            self.children[at][token] = at = len(self.tokens)
            self.children.append({})

    def draft(self) -> Draft:
        """Its tokens in depth-first order, so that a branch that was added first is contiguous."""
        draft = Draft()
        stack = [(child, -1) for child in reversed(self.children[0].values())]
        while stack:
            node, parent = stack.pop()
            place = len(draft)
            draft.tokens.append(self.tokens[node - 1])
            draft.parents.append(parent)
            stack += [(child, place) for child in reversed(self.children[node].values())]
        return draft


class NGrams:
    """Where the n-grams of a sequence were seen, for drafts after prompt lookup (Saxena 2023)."""

    def __init__(self, longest: int = 3, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        # an n-gram, and where the token after it stands: the newest place
        self.after: dict[tuple[int, ...], int] = {}
        # for each size and place, the place before it of the same n-gram, or -1
        self.earlier: dict[int, list[int]] = {n: [] for n in self.sizes}
        self.known = 0
        self.guesses: set[int] | None = None  # what drafts say of the token at `at`
        self.at = self.run = 0
        self.right = RIGHT  # the share of guesses that were right, the newer ones counting more
        self.ahead = 0  # tokens that the next draft may have

    def expected(self, most: int) -> float:
        """How many tokens of a draft of at most so many will be right, if each is as often right as
        those were that `streak` has seen; 0 if there is no draft."""
        return sum(self.right**n for n in range(1, min(most, self.ahead) + 1))

    def streak(self, tokens: list[int], branches: int = 1) -> int:
        """How many tokens in a row drafts would have been right up to now; 0 if there is no draft
        of the next token. Call it whenever tokens has grown."""
        if self.guesses is not None:
            right = tokens[self.at] in self.guesses
            self.run = self.run + len(tokens) - self.at if right else 0
            self.right += NEWEST * (right - self.right)
        if branches == 1:
            draft = self.draft(tokens, MOST_EXPECTED)
            self.ahead, guesses = len(draft), draft.tokens[:1]
        else:  # which may have longer branches than the first
            guesses = self.draft(tokens, 1, branches).tokens
            self.ahead = MOST_EXPECTED if guesses else 0
        self.guesses, self.at = set(guesses) if guesses else None, len(tokens)
        return self.run if guesses else 0

    def draft(
        self, tokens: list[int], most: int, branches: int = 1, room: int | None = None
    ) -> Draft:
        """Tokens that followed the longest n-gram at the end of tokens when it was last seen, then
        those of earlier and shorter matches that differ.

        Args:
            most: tokens of a branch.
            branches: at most so many.
            room: tokens of the whole draft; None is no bound but these.
        """
        self._learn(tokens)
        room = most * branches if room is None else room
        if branches == 1:
            for n in self.sizes:
                for at in self._places(tokens, n):
                    return Draft.chain(tokens[at : at + min(most, room)])
            return Draft()
        trie = Trie(branches)
        for n in self.sizes:
            for at in self._places(tokens, n):
                trie.add(tokens[at : at + most], room - len(trie.tokens))
                if trie.leaves == branches or len(trie.tokens) == room:
                    return trie.draft()
        return trie.draft()

    def _learn(self, tokens: list[int]) -> None:
        after = self.after
        for n in self.sizes:
            earlier, first = self.earlier[n], max(self.known, n)
            earlier += [-1] * (min(first, len(tokens)) - len(earlier))
            # the n-grams that end before the last token
            parts = (tokens[first - n + i : len(tokens) - n + i] for i in range(n))
            for end, key in enumerate(zip(*parts), first):
                earlier.append(after.get(key, -1))
                after[key] = end
        self.known = len(tokens)

    def _places(self, tokens: list[int], n: int) -> Iterator[int]:
        """Where the tokens stand that followed the last n ones, the newest first."""
        at = self.after.get(tuple(tokens[len(tokens) - n :]), -1) if n <= len(tokens) else -1
        for _ in range(MOST_MATCHES):
            if at < 0:
                return
            yield at
            at = self.earlier[n][at]


def mask_of(counts: Sequence[int], drafts: Sequence[Draft]) -> np.ndarray:
    """bool [T, S], for `paged_attn`: which new tokens of its own request each token of a step sees.
    Request i has counts[i] tokens and the drafted ones behind them. S is the most that one has."""
    longest = max(n + len(draft) for n, draft in zip(counts, drafts, strict=True))
    mask = np.zeros((sum(counts) + sum(map(len, drafts)), longest), np.bool_)
    first = 0
    levels: dict[int, tuple[list[int], list[int], list[int]]] = {}  # rows, their parents, columns
    for n, draft in zip(counts, drafts, strict=True):
        mask[first : first + n, :n] = np.tri(n, dtype=np.bool_)
        for i, (parent, depth) in enumerate(zip(draft.parents, draft.depths, strict=True)):
            rows, parents, columns = levels.setdefault(depth, ([], [], []))
            rows.append(first + n + i)
            parents.append(first + n + parent)
            columns.append(n + i)
        first += n + len(draft)
    for depth in sorted(levels):
        rows, parents, columns = levels[depth]
        mask[rows] = mask[parents]
        mask[rows, columns] = True
    return mask
