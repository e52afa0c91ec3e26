# SPDX-License-Identifier: BSD-3-Clause
"""Which sequences of a batch begin with the same pages, so that attention may read those once."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

# A group is formed if it saves at least this many keys, (sequences - 1) x shared keys. The figures
# are the time of the plain call over that with a prefix, for GQA 32/8, head_dim 128, pages of 16.
LEAST_KEYS = {
    # One thread of a Zen 4, 128 own keys, float32 | bfloat16: 64 x 2048 1.91 | 1.42, 8 x 2048 1.15 |
    # 0.88, 8 x 256 1.02 | 0.93, 2 x 2048 0.92 | 0.90.
    "cpu": 32_768,
    # H200, bfloat16, sequences x (shared + own): 64 x (8192 + 512) 3.2, 256 x (1024 + 128) 1.88, 64 x
    # (2048 + 128) 1.44, 8 x (8192 + 512) 0.66, 8 x (1024 + 128) 0.32, 2 x (8192 + 512) 0.85. These
    # save 516, 261, 129, 57, 7 and 8 thousand keys.
    "cuda": 100_000,
}

# Groups within groups are looked for at this many levels.
LEVELS = 16


class Groups(NamedTuple):
    """A batch as groups of neighbours, each with the number of pages that it shares.

    Attributes:
        starts: [G + 1] sequences: group g is sequences ``starts[g]`` to ``starts[g + 1]``.
        pages: [G] pages; 0 for sequences that share nothing.
    """

    starts: np.ndarray
    pages: np.ndarray


def groups_of(
    table: np.ndarray, most: np.ndarray, counts: np.ndarray, block_size: int, device: str = "cpu"
) -> Groups | None:
    """The groups of a batch, or None if nothing is worth sharing.

    Args:
        table: [B, columns] pages.
        most: [B] leading pages of each sequence that every one of its queries sees.
        counts: [B] query tokens of each sequence.
        block_size: tokens of a page.
        device: the type of the device that holds the pages.
    """
    least = LEAST_KEYS["cuda" if device == "cuda" else "cpu"]
    alike = _alike(table, most)
    if alike is None:
        return None
    _, found = _best(alike, 0, len(table), LEVELS)
    starts, pages = [0], list[int]()
    for low, high, common in found:
        keys = common * block_size
        if keys * (high - low - 1) < least or keys < counts[low:high].sum():
            continue
        if low > starts[-1]:
            starts.append(low)
            pages.append(0)
        starts.append(high)
        pages.append(common)
    if not pages:
        return None
    if starts[-1] < len(table):
        starts.append(len(table))
        pages.append(0)
    return Groups(np.array(starts), np.array(pages))


def _alike(table: np.ndarray, most: np.ndarray) -> np.ndarray | None:
    """[B - 1]: the leading pages that each sequence has in common with the next one. None if no two
    have any."""
    both = np.minimum(most[1:], most[:-1])
    # the first page decides nearly always, so the others are compared only if some agree in it
    both[table[1:, 0] != table[:-1, 0]] = 0
    width = int(both.max(initial=0))
    if width == 0:
        return None
    differs = table[1:, :width] != table[:-1, :width]
    first = np.where(differs.any(1), differs.argmax(1), width)
    return np.minimum(first, both)


def _best(
    alike: np.ndarray, low: int, high: int, levels: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """The groups (first, end, pages) of sequences low to high - 1, and the pages that they save.

    One group of all shares the least of what neighbours have in common. If it is cut where they
    have least in common, its parts may save more.
    """
    inner = alike[low : high - 1]
    least = int(inner.min())
    whole = least * (high - low - 1)
    saved, parts = 0, list[tuple[int, int, int]]()
    if levels > 0:
        cuts = np.flatnonzero(inner == least) + low + 1
        for a, b in pairwise([low, *cuts.tolist(), high]):
            if b - a > 1:
                more, its = _best(alike, a, b, levels - 1)
                saved += more
                parts += its
    if saved > whole:
        return saved, parts
    return whole, [(low, high, least)] if whole else []
