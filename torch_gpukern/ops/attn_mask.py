# SPDX-License-Identifier: BSD-3-Clause
"""attn_mask: declaration of the op that builds a stored attention mask. torch_gpukern/masks.py has
the public functions."""

import torch

from .define import define_op

__all__ = ["DENSE", "STORES", "TILE", "Layout", "attn_mask"]

TILE = 128
KEPT = 3  # stores that are not dense keep the bits of this many partial blocks a row of tiles
BLOCK_INTS = 512
DENSE, RANGES, COLUMNS = 1, 2, 3  # gk_mask_store
STORES = {"bool": DENSE, "bits": DENSE, "blocks": DENSE, "ranges": RANGES, "columns": COLUMNS}


class Layout:
    """Offsets of the parts of one head of a stored mask, in int32. They are those of
    csrc/core/attn_mask.h, in Python, so that sizes may be symbols."""

    def __init__(self, store: int, seq_q: int, seq_k: int, transposed: bool):
        nq, nk = (seq_q + TILE - 1) // TILE, (seq_k + TILE - 1) // TILE
        dense = store == DENSE
        lists = _lines((nq * nk + 1) // 2)
        self.tiles_q, self.tiles_k = nq, nk
        self.flags = 0
        self.tiles = _lines((nq * nk + 3) // 4)
        self.lists = self.tiles + _lines(4 * nq)
        self.words = self.lists + lists
        self.source = self.words + BLOCK_INTS * nq * (nk if dense else KEPT)
        self.tiles_t = self.source + (
            0 if dense else _lines(4 * (seq_q if store == RANGES else seq_k))
        )
        self.lists_t = self.tiles_t + (_lines(4 * nk) if transposed else 0)
        self.words_t = self.lists_t + (lists if transposed else 0)
        self.total = self.words_t + (BLOCK_INTS * nk * (nq if dense else KEPT) if transposed else 0)


def _lines(ints: int) -> int:
    return (ints + 31) // 32 * 32


def _symbolic(first, source, seq_q, seq_k, transposed, **_):
    total = Layout(STORES[source], seq_q, seq_k, transposed).total
    return (first.new_empty((first.shape[0], first.shape[1], total), dtype=torch.int32),)


attn_mask = define_op("attn_mask", symbolic=_symbolic, refuse="attn_mask: a mask has no gradient")
