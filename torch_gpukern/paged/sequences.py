# SPDX-License-Identifier: BSD-3-Clause
"""The sequences of a PagedKVCache: the pages of each, its length, and the digests of its published
pages.

All state is in arrays with a row for each sequence, so that a call over many sequences takes a few
array operations.
"""

from collections.abc import Iterable
from itertools import pairwise
from operator import index

import numpy as np

from .pool import NO_PAGE, PagePool

NO_WINDOW = np.iinfo(np.int64).max


class Sequences:
    """Sequences by handle, and their rows in the arrays.

    Attributes:
        table: [rows, columns] int32: the pages. A sequence of n tokens uses the first ceil(n /
            block_size) entries of its row. Other entries and those of released pages are NO_PAGE.
        lengths: [rows] int64: tokens.
        chains: for each row the root digest, then a digest for each of its published pages.
    """

    def __init__(self, pool: PagePool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.table = np.full((0, 1), NO_PAGE, np.int32)
        self.lengths = np.zeros(0, np.int64)
        self.chains: list[list[bytes]] = []
        self._released = np.zeros(0, np.int64)  # number of leading pages that were released
        # the narrowest window of all calls of `release`; NO_WINDOW without a call
        self._windows = np.zeros(0, np.int64)
        self._outdated = np.zeros(0, np.bool_)  # has tokens from before the last `forget`
        self._row_of: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._next_handle = 0
        self._seen = np.zeros(0, np.int64)  # scratch of `rows`
        # the last argument and result of `rows`: one decoding step asks several times
        self._asked = list[int](), np.zeros(0, np.intp)

    @property
    def handles(self) -> list[int]:
        return list(self._row_of)

    def row(self, sequence: int) -> int:
        try:
            return self._row_of[sequence]
        except KeyError:
            raise _unknown(sequence) from None

    def rows(self, what: str, sequences: Iterable[int], distinct: bool = True) -> np.ndarray:
        """The rows of B handles. Raises KeyError for an unknown handle, and ValueError if
        `distinct` and a handle occurs twice."""
        sequences = list(sequences)
        if sequences == self._asked[0]:
            return self._asked[1]
        try:
            rows = np.fromiter(map(self._row_of.__getitem__, sequences), np.intp, len(sequences))
        except KeyError as error:
            raise _unknown(error.args[0]) from None
        if distinct and len(rows) > 1:
            order = np.arange(len(rows))
            self._seen[rows] = order
            if (self._seen[rows] != order).any():
                raise ValueError(f"PagedKVCache.{what}: a sequence is named twice")
        if distinct:
            self._asked = sequences, rows
        return rows

    def pages(self, row: int) -> np.ndarray:
        """A view of the table entries that a row uses."""
        return self.table[row, : -(-int(self.lengths[row]) // self.block_size)]

    def longest(self, rows: np.ndarray) -> int:
        """The number of pages of the longest of these sequences."""
        return -(-largest(self.lengths[rows]) // self.block_size)

    def seen_pages(self, rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """The leading pages that all of the newest `queries` tokens of a sequence see whole. 0 if
        pages of the sequence were released."""
        lengths = self.lengths[rows]
        seen = np.minimum(lengths, lengths - queries + 1) // self.block_size
        return np.where(self._released[rows] > 0, 0, np.maximum(seen, 0))

    def need_columns(self, n: int) -> None:
        have = self.table.shape[1]
        if n > have:
            self.table = np.pad(
                self.table, ((0, 0), (0, max(n, 2 * have) - have)), constant_values=NO_PAGE
            )

    def may_publish(self, row: int) -> bool:
        """Whether no key of the sequence depends on tokens from before the last `forget`."""
        return not self._outdated[row]

    # ---- changes other than growth (growth.py) ----

    def add(self, chain: list[bytes]) -> tuple[int, int]:
        """The handle and the row of a new sequence without tokens."""
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        handle = self._next_handle
        self._next_handle += 1
        self._row_of[handle] = row
        self.lengths[row] = self._released[row] = 0
        self._windows[row] = NO_WINDOW
        self._outdated[row] = False
        self.chains[row] = chain
        return handle, row

    def add_on(self, chain: list[bytes], pages: np.ndarray) -> int:
        """The handle of a new sequence that consists of these full pages."""
        self.need_columns(len(pages))
        handle, row = self.add(chain)
        self.table[row, : len(pages)] = pages
        self.lengths[row] = len(pages) * self.block_size
        self.pool.share(pages)
        return handle

    def fork(self, sequence: int, length: int | None) -> int:
        """The handle of a new sequence that shares the first tokens of another."""
        parent = self.row(sequence)
        length = int(self.lengths[parent]) if length is None else index(length)
        self._check_lengths("fork", np.array([parent]), np.array([length]))
        n = -(-length // self.block_size)
        handle, row = self.add(self.chains[parent][: 1 + length // self.block_size])
        self.table[row, :n] = self.table[parent, :n]
        self.lengths[row] = length
        self._released[row] = self._released[parent]
        self._windows[row] = self._windows[parent]
        self._outdated[row] = self._outdated[parent] and length > 0
        self.pool.share(self.table[row, self._released[row] : n])
        return handle

    def remove(self, sequence: int) -> None:
        row = self.row(sequence)
        pages = self.pages(row)
        self._drop(pages[self._released[row] :])
        pages[:] = NO_PAGE
        del self._row_of[sequence]
        self._asked = [], self._asked[1][:0]
        self._free_rows.append(row)

    def truncate(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        self._check_lengths("truncate", rows, lengths)
        before = -(-self.lengths[rows] // self.block_size)
        kept = -(-lengths // self.block_size)
        self.lengths[rows] = lengths
        self._outdated[rows] &= lengths > 0
        for i in np.flatnonzero(kept < before):
            self._drop(self.table[rows[i], kept[i] : before[i]])
        for row, n in zip(rows.tolist(), lengths.tolist()):
            del self.chains[row][1 + n // self.block_size :]

    def moves(
        self, rows: np.ndarray, lengths: np.ndarray, kept: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The slots that `keep` reads and those that it writes, without tokens that stay."""
        self._check_lengths("keep", rows, lengths)
        sources, targets = [], []
        for row, length, positions in zip(rows.tolist(), lengths.tolist(), kept, strict=True):
            have, end = int(self.lengths[row]), length + len(positions)
            if end <= have and positions == list(range(length, end)):
                continue  # they stay
            before = [length - 1, *positions]
            if any(x >= y for x, y in pairwise(before)) or before[-1] >= have:
                raise ValueError(
                    f"PagedKVCache.keep: kept is {positions}; expected ascending positions from "
                    f"{length} to {have - 1}"
                )
            at, to = np.array(positions, np.int64), np.arange(length, end)
            at, to = at[at != to], to[at != to]
            pages = self.table[row, to // self.block_size]
            published = (len(self.chains[row]) - 1) * self.block_size
            if (self.pool.references[pages] > 1).any() or (to < published).any():
                raise ValueError(
                    "PagedKVCache.keep: a page that tokens move to is shared or published; call "
                    "keep before fork and publish"
                )
            sources.append(self._slots(row, at))
            targets.append(self._slots(row, to))
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *sources]), np.concatenate([none, *targets])

    def _slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        pages = self.table[row, positions // self.block_size].astype(np.int64)
        return pages * self.block_size + positions % self.block_size

    def release(self, rows: np.ndarray, window_left: int) -> None:
        self._windows[rows] = np.minimum(self._windows[rows], window_left)
        upto = np.maximum(self.lengths[rows] - window_left, 0) // self.block_size
        for i in np.flatnonzero(upto > self._released[rows]):
            row = rows[i]
            self._drop(self.table[row, self._released[row] : upto[i]])
            self._released[row] = upto[i]

    def forget(self) -> None:
        self._outdated |= self.lengths > 0

    def _drop(self, pages: np.ndarray) -> None:
        """Returns the pages of some table entries (a view) to the pool."""
        self.pool.drop(pages.copy())
        pages[:] = NO_PAGE

    def _add_rows(self) -> None:
        old = len(self.lengths)
        more = max(old, 8)
        self.table = np.pad(self.table, ((0, more), (0, 0)), constant_values=NO_PAGE)
        self.lengths, self._released, self._windows, self._outdated, self._seen = (
            np.pad(x, (0, more))
            for x in (self.lengths, self._released, self._windows, self._outdated, self._seen)
        )
        self.chains += [[] for _ in range(more)]
        self._free_rows = list(range(old + more - 1, old - 1, -1))

    def _check_lengths(self, what: str, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Raises ValueError unless every sequence has at least its new length, and no later query
        would see pages that were released."""
        have, windows = self.lengths[rows], self._windows[rows]
        gone = self._released[rows] * self.block_size
        least = np.where(gone > 0, gone + windows, 0)  # gone > 0 implies a window
        for i in np.flatnonzero((lengths > have) | (lengths < least))[:1]:
            text = f"PagedKVCache.{what}: length is {lengths[i]}; the sequence has {have[i]} tokens"
            if gone[i]:
                text += f", the first {gone[i]} of which were released"
            if gone[i] <= lengths[i] < least[i]:
                text += f", and the next query would see {windows[i]} keys to its left"
            raise ValueError(text)


def largest(numbers: np.ndarray) -> int:
    """The largest number, or 0 if there is none. `max(initial=0)` would take a microsecond more,
    which counts in a decoding step."""
    return int(numbers.max()) if len(numbers) else 0


def _unknown(sequence: object) -> KeyError:
    return KeyError(f"PagedKVCache: {sequence} is not a sequence of this cache, or was freed")
