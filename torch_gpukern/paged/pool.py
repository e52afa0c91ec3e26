# SPDX-License-Identifier: BSD-3-Clause
"""The pages of a PagedKVCache: who holds each of them, which are free, and which are known by the
tokens that they hold."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np

Pages = np.ndarray  # [n] int32, none twice

NO_PAGE = -1


def digest(before: bytes, tokens: np.ndarray) -> bytes:
    """What a page is known by: the tokens in it and, through `before`, all tokens that stand before
    them."""
    return hashlib.blake2b(tokens.tobytes(), key=before, digest_size=16).digest()


class PagePool:
    """Pages by number.

    A page is held by the sequences that have it and, once it is published, by its digest: that hold
    keeps what it has in place after the last sequence left, until the page is needed. Then the page
    that was left the longest ago goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holds = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # the next one last
        self._n_free = num_blocks
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # published pages that no sequence has, the longest idle first

    @property
    def available(self) -> int:
        """Pages that no sequence has."""
        return self._n_free + len(self._idle)

    def next(self, n: int) -> Pages:
        """The pages that `take(n)` will take, which is at most `available`. Nothing has changed
        until then."""
        if n <= self._n_free:
            return self._free[self._n_free - n : self._n_free][::-1]
        return np.append(
            self._free[: self._n_free][::-1],
            np.fromiter(islice(self._idle, n - self._n_free), np.int32),
        )

    def take(self, n: int) -> None:
        """Gives the next n pages one holder each. Forgets idle ones where free ones are too few."""
        while self._n_free < n:
            page, _ = self._idle.popitem(last=False)
            self._unpublish(page)
            self._push(np.array([page], np.int32))
        self.holds[self._free[self._n_free - n : self._n_free]] = 1
        self._n_free -= n

    def share(self, pages: Pages) -> None:
        """One more sequence has these pages."""
        self.holds[pages] += 1
        if self._idle:
            for page in pages.tolist():
                self._idle.pop(page, None)

    def drop(self, pages: Pages) -> None:
        """One sequence less has these pages, which are in the order of its tokens: the last ones
        are forgotten first."""
        self.holds[pages] -= 1
        left = pages[::-1]
        holds = self.holds[left]
        self._push(left[holds == 0])
        if self._digest_of:
            for page in left[holds == 1].tolist():
                if page in self._digest_of:
                    self._idle[page] = None

    def publish(self, page: int, known_by: bytes) -> None:
        """The page, which a sequence has, is found by this digest from now on, unless another one
        is, or it has one."""
        if known_by not in self._page_of and page not in self._digest_of:
            self._page_of[known_by] = page
            self._digest_of[page] = known_by
            self.holds[page] += 1

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the first digests, up to the first that is not known."""
        found = []
        for known_by in digests:
            if (page := self._page_of.get(known_by)) is None:
                break
            found.append(page)
        return found

    def forget(self) -> None:
        """Takes every digest back; idle pages are free again."""
        for page in list(self._digest_of):
            self._unpublish(page)
        self._push(np.fromiter(self._idle, np.int32, len(self._idle)))
        self._idle.clear()

    def _unpublish(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
        self.holds[page] -= 1

    def _push(self, pages: Pages) -> None:
        self._free[self._n_free : self._n_free + len(pages)] = pages
        self._n_free += len(pages)
