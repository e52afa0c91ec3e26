# SPDX-License-Identifier: BSD-3-Clause
"""The part of a PagedKVCache that knows no keys: sequences, the pages that they own and share, and
prefixes that are found again."""

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
    """A method that no other thread's call comes between."""

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
        """Pages that no sequence owns, those among them that `match` may still find."""
        return self._pool.available

    @property
    def sequences(self) -> list[int]:
        """The handles of all sequences, the oldest first."""
        return self._sequences.handles

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return int(self._sequences.lengths[self._sequences.row(sequence)])

    @alone
    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, in the order of its tokens; -1 for those that were released."""
        return self._sequences.pages(self._sequences.row(sequence)).tolist()

    @alone
    def allocate(self, salt: bytes | str = b"") -> int:
        """A new sequence without tokens; returns its handle. Its pages come with `extend`.

        Args:
            salt: what else than its tokens the keys depend on, such as the name of an adapter;
            `match`
                finds pages of equal salt only.

        Raises:
            ValueError: salt is neither str nor bytes.
        """
        return self._sequences.add([prefixes.root(salt)])[0]

    @alone
    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence with the same first tokens, on the same pages; returns its handle.

        No key is copied here. When either of the two grows into a last page that is partly filled,
        `extend` gives it a copy of that page first, so neither sees the other's tokens.

        Args:
            sequence: a handle.
            length: tokens of the new sequence; None is all.

        Raises:
            ValueError: length is more than the sequence has, or so small that a later query would
            see
                pages that were released.
        """
        return self._sequences.fork(sequence, length)

    @alone
    def free(self, sequence: int) -> None:
        """Ends a sequence. Its pages return to the pool, except those that another sequence still
        shares.
        """
        self._sequences.remove(sequence)

    @alone
    def truncate(self, sequences: int | Sequence[int], lengths: int | Sequence[int]) -> None:
        """Takes the last tokens of sequences back, such as drafted ones that were rejected.

        Args:
            sequences: B handles, none twice, or one.
            lengths: tokens that each keeps, or one number for all.

        Raises:
            ValueError: a length is more than the sequence has, or so small that a later query would
            see
                pages that were released. No sequence has changed.
        """
        rows = self._sequences.rows("truncate", as_handles(sequences))
        after = np.empty(len(rows), np.int64)
        after[:] = as_counts("truncate", lengths, len(rows), "lengths")
        self._sequences.truncate(rows, after)

    @alone
    def release(self, sequences: int | Sequence[int], window_left: int) -> None:
        """Gives pages back that no later query sees through a window; -1 stands in their place.

        Call it between the attention over the newest tokens and the next `extend`: the next query
        stands at position `length` and sees no key below ``length - window_left``. All layers of
        this
        cache must have that window, or a smaller one.

        Args:
            sequences: B handles, none twice, or one.
            window_left: of `paged_attn`, at least 0.
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
        """Makes the full pages of a sequence known by their tokens, for `match`. Its keys and
        values
        must be written.

        What was published stays after the sequence is freed until `extend` needs the pages; those
        that
        were used the longest ago go first. It never changes: a sequence that is cut back into such
        a
        page and grows again gets a copy of it. A sequence that had tokens at the last `forget` is
        not
        published.

        Args:
            sequence: a handle.
            tokens: its token ids from the first on; what stands behind its last full page, or in
            pages
                that it has published already, is not read.

        Raises:
            ValueError: tokens are not integers, or fewer than the full pages hold.
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
        """A new sequence on the published pages that hold the first of these tokens.

        Args:
            tokens: token ids from the first on. A model needs a query for its next token: leave the
                last one out.
            salt: as in `allocate`.

        Returns:
            the handle, and how many tokens it has: a multiple of block_size, 0 where nothing is
            known.
        """
        return prefixes.match(self._sequences, [prefixes.root(salt)], as_tokens("match", tokens))

    @alone
    def forget(self) -> None:
        """Forgets what was published, as new weights ask for. No sequence changes, but what
        sequences have now, and what they and their forks write behind it, is not published any
        more: it may depend on keys of the old weights.
        """
        self._pool.forget()
        self._sequences.forget()
