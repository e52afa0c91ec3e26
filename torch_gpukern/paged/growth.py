"""How sequences of a PagedKVCache grow: their new pages, the copies of pages that they share, the slots of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..kv_cache import PagedKVCache


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than a call needs; the call has changed nothing."""


class Growth:
    """Sequences that grow: `slots` is where their tokens will lie. What stands under `with` may still fail; then nothing has
    changed. Behind it the tokens are counted.
    """

    def __init__(self, cache: PagedKVCache, rows: np.ndarray, counts: int | np.ndarray) -> None:
        size, pool = cache.block_size, cache._pool
        self.cache, self.rows = cache, rows
        lengths = cache._lengths[rows]
        self.ends = ends = lengths + counts
        first, filled = np.divmod(lengths, size)  # the page of the first new token, and the rows that it has
        one = isinstance(counts, int) and counts == 1  # a step of decoding, which is worth its own way
        if one:
            cache._need_columns(int(first.max(initial=0)) + 1)
            behind = (filled == 0).nonzero()[0]
            new = rows[behind], first[behind]
        else:
            have = first + (filled > 0)
            need = -(-ends // size)
            cache._need_columns(int(need.max(initial=0)) + 1)
            new = ranges(have, need)
            new = rows[new[0]], new[1]
        lasts = cache._table[rows, first]
        shared = ((pool.holds[lasts] > 1) & (filled > 0)).nonzero()[0]
        if len(shared):
            shared = self._copied(shared[ends[shared] > lengths[shared]], lasts)
            new = np.append(rows[shared], new[0]), np.append(first[shared], new[1])
        # Entries of the table that change: the copies of shared last pages, then the new pages.
        self.filled = filled[shared]
        self.entries = entries = new
        self.pages = len(entries[0])
        if self.pages > pool.available:
            raise OutOfPages(
                f"PagedKVCache.extend: {self.pages} pages are needed for {int((ends - lengths).sum())} "
                f"tokens, {pool.available} of {cache.num_blocks} are free"
            )
        self.before = cache._table[entries]
        self.after = cache._table[entries] = pool.next(self.pages)

        if one:
            self.slots = cache._table[rows, first].astype(np.int64) * size + filled
            return
        which, position = ranges(lengths, ends)
        place, offset = np.divmod(position, size)
        place += (rows * cache._table.shape[1])[which]
        self.slots = cache._table.take(place).astype(np.int64) * size + offset

    def _copied(self, shared: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Of the sequences with a shared last page those that get a copy: of its holders the last one to be served keeps it."""
        holds: dict[int, int] = {}
        copied = []
        for i in shared.tolist():
            page = int(lasts[i])
            left = holds.get(page, int(self.cache._pool.holds[page]))
            if left > 1:
                copied.append(i)
                holds[page] = left - 1
        return np.array(copied, np.intp)

    def __enter__(self) -> Growth:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        cache, pool, n = self.cache, self.cache._pool, len(self.filled)
        if kind is None:
            try:  # the copies may fail, what follows cannot
                for shared, own, rows in zip(self.before[:n].tolist(), self.after[:n].tolist(), self.filled.tolist()):
                    cache.k[:, own, :rows] = cache.k[:, shared, :rows]  # the rows behind them may be written already
                    cache.v[:, own, :rows] = cache.v[:, shared, :rows]
            except BaseException:
                cache._table[self.entries] = self.before
                raise
            pool.take(self.pages)
            for page in self.before[:n].tolist():  # one by one: siblings may leave the same page
                pool.drop(np.array([page], np.int32))
            cache._lengths[self.rows] = self.ends
        else:
            cache._table[self.entries] = self.before


def ranges(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers from starts[i] up to ends[i], one i behind the other, and the i of each; none where the end is below."""
    counts = np.maximum(ends - starts, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(which))
    numbers += (starts - np.cumsum(counts) + counts)[which]
    return which, numbers
