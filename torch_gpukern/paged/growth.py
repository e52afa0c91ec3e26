# SPDX-License-Identifier: BSD-3-Clause
"""How sequences of a PagedKVCache grow: new pages, copies of shared pages (copy on write), and the
slots of the new tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .sequences import Sequences, largest

CopyRows = Callable[[int, int, int], None]  # (source page, target page, number of tokens)


class OutOfPages(RuntimeError):
    """Raised if a call needs more pages than the cache has free. The call has changed nothing."""


class Growth:
    """Context in which sequences grow by `counts` tokens; `slots` is where the tokens go.

    The constructor enters the new pages into the table. If the body of `with` raises, the table is
    restored and nothing has changed. Otherwise leaving it copies shared pages and counts the
    tokens.
    """

    def __init__(
        self, sequences: Sequences, rows: np.ndarray, counts: int | np.ndarray, copy_rows: CopyRows
    ) -> None:
        size, pool = sequences.block_size, sequences.pool
        self.sequences, self.rows, self.copy_rows = sequences, rows, copy_rows
        lengths = sequences.lengths[rows]
        self.ends = ends = lengths + counts
        # the column of the first new token's page, and the tokens that the page has
        first, filled = np.divmod(lengths, size)
        # one token for each sequence, a decoding step, has a faster path
        one = isinstance(counts, int) and counts == 1
        if one:
            sequences.need_columns(largest(first) + 1)
            behind = (filled == 0).nonzero()[0]
            new = rows[behind], first[behind]
        else:
            have = first + (filled > 0)
            need = -(-ends // size)
            sequences.need_columns(largest(need) + 1)
            new = ranges(have, need)
            new = rows[new[0]], new[1]
        lasts = sequences.table[rows, first]
        shared = ((pool.references[lasts] > 1) & (filled > 0)).nonzero()[0]
        if len(shared):
            shared = self._copied(shared[ends[shared] > lengths[shared]], lasts, filled)
            new = np.append(rows[shared], new[0]), np.append(first[shared], new[1])
        # Table entries that change: first those of copied last pages, then those of new pages.
        self.filled = filled[shared]
        self.entries = entries = new
        self.pages = len(entries[0])
        if self.pages > pool.available:
            raise OutOfPages(
                f"PagedKVCache.extend: {self.pages} pages are needed for "
                f"{int((ends - lengths).sum())} "
                f"tokens, {pool.available} of {pool.num_blocks} are free"
            )
        self.before = sequences.table[entries]
        self.after = sequences.table[entries] = pool.next(self.pages)

        if one:
            self.slots = sequences.table[rows, first].astype(np.int64) * size + filled
            return
        which, position = ranges(lengths, ends)
        place, offset = np.divmod(position, size)
        place += (rows * sequences.table.shape[1])[which]
        self.slots = sequences.table.take(place).astype(np.int64) * size + offset

    def _copied(self, shared: np.ndarray, lasts: np.ndarray, filled: np.ndarray) -> np.ndarray:
        """Which of the growing sequences with a shared last page get a copy of it.

        If all holders of a page grow, the one with the most tokens in it keeps the page. It writes
        after the tokens of all others. So their copies are right, and so are the others themselves
        if this call fails.
        """
        remaining: dict[int, int] = {}
        copied = []
        for i in sorted(shared.tolist(), key=filled.__getitem__):
            page = int(lasts[i])
            left = remaining.get(page, int(self.sequences.pool.references[page]))
            if left > 1:
                copied.append(i)
                remaining[page] = left - 1
        return np.array(copied, np.intp)

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """(page, its copy, tokens to copy) of each shared page that will be copied."""
        # the copies are the first of the changed entries
        return list(zip(self.before.tolist(), self.after.tolist(), self.filled.tolist()))

    def __enter__(self) -> Growth:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        sequences = self.sequences
        if kind is not None:
            sequences.table[self.entries] = self.before
            return
        copies = self.copies
        try:  # a copy may raise; the lines after this block cannot
            for shared, own, tokens in copies:
                self.copy_rows(shared, own, tokens)  # the body may have written later slots already
        except BaseException:
            sequences.table[self.entries] = self.before
            raise
        sequences.pool.take(self.pages)
        for page, _, _ in copies:  # one by one, since several sequences may leave the same page
            sequences.pool.drop(np.array([page], np.int32))
        sequences.lengths[self.rows] = self.ends


def ranges(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers of all ranges [starts[i], ends[i]), concatenated, as (i of each, integers)."""
    counts = np.maximum(ends - starts, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(which))
    numbers += (starts - np.cumsum(counts) + counts)[which]
    return which, numbers
