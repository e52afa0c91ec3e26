# SPDX-License-Identifier: BSD-3-Clause
"""The bookkeeping of a PagedKVCache on the host: sequences, the pages that they own and share, and
published prefixes. This part knows nothing of keys and values."""

from collections.abc import Callable, Sequence
from functools import wraps
from operator import index
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from torch import Tensor

from . import prefixes
from .arguments import as_counts, as_handles, as_tokens
from .pool import PagePool
from .sequences import Sequences

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound="Bookkeeping")


def alone(method: Callable[Concatenate[B, P], R]) -> Callable[Concatenate[B, P], R]:
    """Decorates a method that holds the cache's lock while it runs."""

    @wraps(method)
    def locked(self: B, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Bookkeeping:
    """Which pages belong to which sequence, on the host.

    Args:
        num_blocks: pages in the pool, for all sequences together.
        block_size: tokens in a page.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = index(num_blocks)
        self.block_size = index(block_size)
        self._pool = PagePool(self.num_blocks)
        self._sequences = Sequences(self._pool, self.block_size)
        self._lock = RLock()

    @property
    def free_blocks(self) -> int:
        """The number of pages that no sequence owns, including those that `match` may still
        find."""
        return self._pool.available

    @property
    def sequences(self) -> list[int]:
        """The handles of all sequences, the oldest first."""
        return self._sequences.handles

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence."""
        return int(self._sequences.lengths[self._sequences.row(sequence)])

    @alone
    def lengths(self, sequences: Sequence[int]) -> np.ndarray:
        """int [B]: the number of tokens of each of B different sequences."""
        return self._sequences.lengths[self._sequences.rows("lengths", sequences)]

    @alone
    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence in the order of its tokens; -1 for a page that was released."""
        return self._sequences.pages(self._sequences.row(sequence)).tolist()

    @alone
    def by_pages(self, sequences: Sequence[int]) -> list[int]:
        """The same handles in an order in which sequences that share their first pages are
        neighbours."""
        rows = self._sequences.rows("by_pages", sequences, distinct=False).tolist()
        # as bytes, equal first pages are equal first bytes
        pages = {row: self._sequences.pages(row).tobytes() for row in rows}
        order = sorted(range(len(rows)), key=lambda i: pages[rows[i]])
        return [sequences[i] for i in order]

    @alone
    def allocate(self, salt: bytes | str = b"") -> int:
        """Makes a new sequence without tokens and returns its handle. `extend` gives it pages.

        Args:
            salt: what its keys depend on beside its tokens, such as the name of an adapter. `match`
                finds only pages with the same salt.

        Raises:
            ValueError: salt is neither str nor bytes.
        """
        return self._sequences.add([prefixes.root(salt)])[0]

    @alone
    def fork(self, sequence: int, length: int | None = None) -> int:
        """Makes a new sequence with the same first tokens, on the same pages, and returns its
        handle.

        No key is copied here. When one of the two grows into a shared page that is partly filled,
        `extend` first gives it a copy of that page. So neither sees the other's tokens.

        Args:
            sequence: a handle.
            length: tokens of the new sequence; None is all.

        Raises:
            ValueError: length is more than the sequence has, or so small that a later query would
                see pages that were released.
        """
        return self._sequences.fork(sequence, length)

    @alone
    def free(self, sequence: int) -> None:
        """Ends a sequence. Its pages return to the pool, except those that other sequences
        share."""
        self._sequences.remove(sequence)

    @alone
    def truncate(self, sequences: int | Sequence[int], lengths: int | Sequence[int]) -> None:
        """Removes the last tokens of sequences, for example drafted tokens that were rejected.

        Args:
            sequences: B different handles, or one.
            lengths: tokens that each keeps, or one number for all.

        Raises:
            ValueError: a length is more than the sequence has, or so small that a later query would
                see pages that were released. No sequence has changed.
        """
        rows = self._sequences.rows("truncate", as_handles(sequences))
        after = np.empty(len(rows), np.int64)
        after[:] = as_counts("truncate", lengths, len(rows), "lengths")
        self._sequences.truncate(rows, after)

    @alone
    def release(self, sequences: int | Sequence[int], window_left: int) -> None:
        """Returns pages to the pool that no later query sees through a window. Their table entries
        become -1.

        Call it between the attention over the newest tokens and the next `extend`. The next query
        is at position `length` and sees no key below ``length - window_left``. All layers of this
        cache must have that window, or a smaller one.

        Args:
            sequences: B different handles, or one.
            window_left: that of `paged_attn`, at least 0.

        Raises:
            ValueError: window_left is negative.
        """
        if index(window_left) < 0:
            raise ValueError(
                f"PagedKVCache.release: window_left is {window_left}; expected at least 0"
            )
        self._sequences.release(
            self._sequences.rows("release", as_handles(sequences)), index(window_left)
        )

    @alone
    def publish(self, sequence: int, tokens: Sequence[int] | np.ndarray | Tensor) -> None:
        """Publishes the full pages of a sequence, so that `match` finds them by their tokens. Their
        keys and values must have been written.

        Published pages stay after the sequence is freed, until `extend` needs them; those that have
        been idle longest are reused first. Their contents never change: a sequence that is
        truncated into such a page and grows again gets a copy. A sequence that had tokens at the
        last `forget` is not published.

        Args:
            sequence: a handle.
            tokens: its token ids, from the first on. Tokens after its last full page, and those of
                pages that it has already published, are not read.

        Raises:
            ValueError: tokens are not integers, or are fewer than the full pages hold.
        """
        row = self._sequences.row(sequence)
        known = len(self._sequences.chains[row]) - 1
        if known < int(
            self._sequences.lengths[row]
        ) // self.block_size and self._sequences.may_publish(row):
            prefixes.publish(self._sequences, row, as_tokens("publish", tokens))

    @alone
    def match(
        self, tokens: Sequence[int] | np.ndarray | Tensor, salt: bytes | str = b""
    ) -> tuple[int, int]:
        """Makes a new sequence on the published pages that hold the first of these tokens.

        Args:
            tokens: token ids, from the first on. Leave out the last token: the model needs a query
                to compute the next one.
            salt: as in `allocate`.

        Returns:
            The sequence's handle and its number of tokens: a multiple of block_size, 0 if no page
            was found.
        """
        return prefixes.match(self._sequences, [prefixes.root(salt)], as_tokens("match", tokens))

    @alone
    def forget(self) -> None:
        """Forgets all published pages, for example after the weights have changed. No sequence
        changes. Sequences that have tokens now, and their forks, are not published any more,
        because their keys may depend on the old weights.
        """
        self._pool.forget()
        self._sequences.forget()
