# SPDX-License-Identifier: BSD-3-Clause
"""The page pool of a PagedKVCache: reference counts, free pages, and published pages, which are
found by a digest of their tokens."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np

Pages = np.ndarray  # [n] int32, all different

NO_PAGE = -1


def digest(before: bytes, tokens: np.ndarray) -> bytes:
    """The digest by which a published page is found. It covers the page's tokens and, through the
    previous page's digest `before`, all tokens before them."""
    return hashlib.blake2b(tokens.tobytes(), key=before, digest_size=16).digest()


class PagePool:
    """Reference counts of pages, which are numbered from 0.

    Each sequence that owns a page holds one reference. A published page has one more for its
    digest. That reference keeps the page's contents after the last sequence has left, until the
    page is needed. The published page that has been idle longest is reused first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # a stack, next page last
        self._n_free = num_blocks
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # published pages that no sequence owns, the longest idle first
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """The number of pages that no sequence owns."""
        return self._n_free + len(self._idle)

    def next(self, n: int) -> Pages:
        """The pages that `take(n)` will take; n is at most `available`. Changes nothing."""
        if n <= self._n_free:
            return self._free[self._n_free - n : self._n_free][::-1]
        return np.append(
            self._free[: self._n_free][::-1],
            np.fromiter(islice(self._idle, n - self._n_free), np.int32),
        )

    def take(self, n: int) -> None:
        """Gives the next n pages one reference each. If there are too few free pages, published
        idle pages are forgotten."""
        while self._n_free < n:
            page, _ = self._idle.popitem(last=False)
            self._unpublish(page)
            self._push(np.array([page], np.int32))
        self.references[self._free[self._n_free - n : self._n_free]] = 1
        self._n_free -= n

    def share(self, pages: Pages) -> None:
        """Counts one more sequence for these pages."""
        self.references[pages] += 1
        if self._idle:
            for page in pages.tolist():
                self._idle.pop(page, None)

    def drop(self, pages: Pages) -> None:
        """Counts one sequence less for these pages, which are in the order of its tokens. The last
        ones will be reused first."""
        self.references[pages] -= 1
        left = pages[::-1]
        references = self.references[left]
        self._push(left[references == 0])
        if self._digest_of:
            for page in left[references == 1].tolist():
                if page in self._digest_of:
                    self._idle[page] = None

    def publish(self, page: int, known_by: bytes) -> None:
        """Publishes a page under a digest. Nothing happens if the digest or the page has been
        published already."""
        if known_by not in self._page_of and page not in self._digest_of:
            self._page_of[known_by] = page
            self._digest_of[page] = known_by
            self.references[page] += 1

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The published pages of the digests, up to the first digest without one."""
        found = []
        for known_by in digests:
            if (page := self._page_of.get(known_by)) is None:
                break
            found.append(page)
        return found

    def forget(self) -> None:
        """Removes all digests and frees the idle pages."""
        for page in list(self._digest_of):
            self._unpublish(page)
        self._push(np.fromiter(self._idle, np.int32, len(self._idle)))
        self._idle.clear()

    def _unpublish(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
        self.references[page] -= 1

    def _push(self, pages: Pages) -> None:
        self._free[self._n_free : self._n_free + len(pages)] = pages
        self._n_free += len(pages)
