# SPDX-License-Identifier: BSD-3-Clause
"""Shared prefixes of a PagedKVCache: full pages are published under a digest of their tokens and of
all tokens before them. Digests of consecutive pages form a chain."""

from collections.abc import Iterator

import numpy as np

from .pool import NO_PAGE, digest
from .sequences import Sequences


def root(salt: bytes | str) -> bytes:
    """The first digest of a chain. A number is refused, since bytes(n) would be n zeros."""
    if not isinstance(salt, (bytes, str)):
        raise ValueError(
            f"PagedKVCache: salt must be str or bytes, got {salt!r:.80} of type "
            f"{type(salt).__name__}"
        )
    text = salt.encode() if isinstance(salt, str) else salt
    return digest(b"", np.frombuffer(text, np.uint8))


def publish(sequences: Sequences, row: int, ids: np.ndarray) -> None:
    """Publishes the full pages of the sequence in `row`, whose tokens begin with ids."""
    chain, size = sequences.chains[row], sequences.block_size
    full = int(sequences.lengths[row]) // size
    if len(ids) < full * size:
        raise ValueError(
            f"PagedKVCache.publish: {len(ids)} tokens; the full pages hold {full * size}"
        )
    for i in range(len(chain) - 1, full):
        chain.append(digest(chain[-1], ids[i * size : (i + 1) * size]))
        page = int(sequences.table[row, i])
        if page != NO_PAGE:
            sequences.pool.publish(page, chain[-1])


def match(sequences: Sequences, chain: list[bytes], ids: np.ndarray) -> tuple[int, int]:
    """A new sequence on the published pages that hold the first tokens of ids. `chain` holds the
    root and gets the digests. Returns the sequence's handle and length."""
    size = sequences.block_size

    def digests() -> Iterator[bytes]:
        for i in range(len(ids) // size):
            chain.append(digest(chain[-1], ids[i * size : (i + 1) * size]))
            yield chain[-1]

    pages = np.array(sequences.pool.find(digests()), np.int32)
    return sequences.add_on(chain[: 1 + len(pages)], pages), len(pages) * size
